"""BN and LpNorm in float64 NumPy, written from the formulas, statistic by statistic.

Channels are the last axis. Nothing here is shared with the package.
"""

import dataclasses

import numpy as np


class BatchReference:
    """(x - mean) / divisor with the two statistics of a batch and their averages."""

    centered = True  # whether the second statistic is that of x - mean

    def __post_init__(self):
        self.moving_mean = np.zeros(self.channels)
        self.moving_statistic = np.ones(self.channels)

    def inference(self, x, gamma, beta):
        divisor, _ = self._divisor(self.moving_statistic)
        return gamma * (x - self.moving_mean) / divisor + beta

    def train(self, x, gamma, beta, mask=None):
        """Normalise one batch and move the averages on where it has an element."""
        mean, statistic = self.statistics(x, mask)
        seen = _mask(x, mask).any(_axes(x))

        def moved(old, new):
            return np.where(seen, self.momentum * old + (1 - self.momentum) * new, old)

        self.moving_mean = moved(self.moving_mean, mean)
        self.moving_statistic = moved(self.moving_statistic, statistic)
        return self.forward(x, gamma, beta, mask)

    def statistics(self, x, mask=None):
        mask = _mask(x, mask)
        mean = np.sum(np.where(mask, x, 0), _axes(x)) / _count(mask)
        u = np.where(mask, x - mean if self.centered else x, 0)
        return mean, self._statistic(u, _count(mask))

    def forward(self, x, gamma, beta, mask=None):
        x = np.asarray(x, "float64")
        mean, statistic = self.statistics(x, mask)
        return gamma * (x - mean) / self._divisor(statistic)[0] + beta

    def gradients(self, g, x, gamma, beta, mask=None):
        """dx, dgamma, dbeta of sum(g * y): the chain rule through both statistics."""
        x, g = np.asarray(x, "float64"), np.asarray(g, "float64")
        mean, statistic = self.statistics(x, mask)
        mask = _mask(x, mask)
        divisor, slope = self._divisor(statistic)
        c = x - mean
        u = np.where(mask, c if self.centered else x, 0)
        dc = g * gamma / divisor
        dstatistic = -np.sum(g * gamma * c, _axes(x)) / divisor**2 * slope
        du = mask * dstatistic * self._statistic_gradient(u, statistic, _count(mask))
        dmean = -np.sum(dc, _axes(x))
        if self.centered:
            dmean = dmean - np.sum(du, _axes(x))
        dx = dc + du + mask * dmean / _count(mask)
        return dx, np.sum(g * c, _axes(x)) / divisor, np.sum(g, _axes(x))


@dataclasses.dataclass
class BatchNormReference(BatchReference):
    """Batch normalization; the second statistic is the variance."""

    channels: int
    momentum: float = 0.99
    epsilon: float = 1e-3

    def _statistic(self, u, count):
        return np.sum(u**2, _axes(u)) / count

    def _statistic_gradient(self, u, variance, count):
        return 2 * u / count

    def _divisor(self, variance):
        """The divisor, and its derivative with respect to the statistic."""
        root = np.sqrt(variance + self.epsilon)
        return root, 0.5 / root


@dataclasses.dataclass
class LpNormReference(BatchReference):
    """l_p normalization; the second statistic is (mean |u|^p)^(1/p)."""

    channels: int
    p: float = 2
    norm_of: str = "input"
    momentum: float = 0.99
    epsilon: float = 1e-5

    @property
    def centered(self):
        return self.norm_of == "centered"

    def _statistic(self, u, count):
        largest = np.abs(u).max(_axes(u), initial=0)
        if self.p == np.inf:
            return largest
        # In extended precision, where 1e10^50 is still a number.
        powers = np.abs(u).astype("longdouble") ** self.p
        return ((np.sum(powers, _axes(u)) / count) ** (1 / self.p)).astype("float64")

    def _statistic_gradient(self, u, norm, count):
        """ds/du; an equal part for each element that attains the maximum."""
        if self.p == np.inf:
            attained = np.abs(u) == norm
            return np.sign(u) * attained / attained.sum(_axes(u))
        norm = np.where(norm > 0, norm, 1)
        return np.sign(u) * (np.abs(u) / norm) ** (self.p - 1) / count

    def _divisor(self, norm):
        return norm + self.epsilon, 1.0


def _axes(x):
    return tuple(range(x.ndim - 1))


def _mask(x, mask):
    return np.broadcast_to(True if mask is None else mask, x.shape)


def _count(mask):
    return np.maximum(mask.sum(_axes(mask)), 1)
