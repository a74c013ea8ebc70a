"""CBN, BN and LpNorm in float64 NumPy, written from the formulas.

Channels are the last axis. Nothing here is shared with the package.
"""

import dataclasses

import keras
import numpy as np


@dataclasses.dataclass
class CBNReference:
    """Complete batch normalization with its state (Peng et al., Eqs. 4-9)."""

    channels: int
    rho: float = 1.0
    omega: float = 10.0
    momentum: float = 0.99
    epsilon: float = 1e-5
    decouple: bool = True
    mean_gradient: str = "shift"
    rate: float = -1.0
    weight, uses_averages = 0.0, True
    moving_mean, moving_statistic = 0.0, 1.0

    def inference(self, x, gamma, beta):
        scale = gamma / (self.rho * np.sqrt(self.moving_statistic + self.epsilon))
        return self._affine(scale, x - self.moving_mean, beta)

    def train(self, x, gamma, beta, mask=None):
        """Normalise one batch and update the state.

        Keeps what the gradient of this step holds constant, which lets `forward` and
        `gradients` be evaluated at points other than `x`: the mean in use is
        `mean_weight` * mean(x) + `mean_offset`; the root mean square in use is `ratio`
        times that of the batch.
        """
        x = np.asarray(x, "float64")
        seen = _mask(x, mask).any(_axes(x))
        known = self.uses_averages and self.rate >= 0
        eta = max(1 - self.omega * self.rate, 0.0) if known else self.momentum
        weight = eta * self.weight + (1 - eta)

        def stored_and_used(old, new):
            average = (eta * self.weight * old + (1 - eta) * new) / weight
            stored = np.where(seen, average, old)
            used = stored if known else np.where(seen, new, old)
            return stored, used if self.uses_averages else new

        mean = _mean(x, mask)
        stored_mean, used_mean = stored_and_used(self.moving_mean, mean)
        square = self._square(x, used_mean, beta, mask)
        stored_square, used = stored_and_used(self.moving_statistic, square)
        self.mean_weight = 1.0
        if self.mean_gradient == "ratio":
            ratio = np.clip(used_mean / np.where(mean == 0, 1, mean), -10, 10)
            self.mean_weight = np.where(mean == 0, 1, ratio)
        self.mean_offset = used_mean - self.mean_weight * mean
        self.ratio = np.sqrt((used + self.epsilon) / (square + self.epsilon))
        self.moving_mean, self.moving_statistic = stored_mean, stored_square
        self.weight = weight if seen.any() else self.weight
        return self.forward(x, gamma, beta, mask)

    def _square(self, x, mean, beta, mask):
        if not self.decouple:
            mean, beta = _mean(x, mask), 0
        return _mean((x - mean + beta) ** 2, mask)

    def forward(self, x, gamma, beta, mask=None):
        """The training map as a function of x, gamma and beta alone."""
        mean = self.mean_weight * _mean(x, mask) + self.mean_offset
        root = np.sqrt(self._square(x, mean, beta, mask) + self.epsilon)
        scale = gamma / (self.rho * self.ratio * root)
        return self._affine(scale, x - mean, beta)

    def _affine(self, scale, c, beta):
        return scale * (c + beta) if self.decouple else scale * c + beta

    def gradients(self, g, x, gamma, beta, mask=None):
        """dx, dgamma, dbeta of sum(g * y): the chain rule through every statistic."""
        visible, axes = _mask(x, mask), _axes(x)
        m = _count(visible)
        mean = self.mean_weight * _mean(x, mask) + self.mean_offset
        square = self._square(x, mean, beta, mask) + self.epsilon
        scale = 1 / (self.rho * self.ratio * np.sqrt(square))
        shifted = x - mean + (beta if self.decouple else 0)
        normed = shifted if self.decouple else x - _mean(x, mask)
        dgamma = np.sum(g * shifted, axes) * scale
        dsquare = -0.5 * gamma * dgamma / square
        # If coupled, the part through the square sums to 0.
        direct = g * gamma * scale + visible * normed * 2 * dsquare / m
        dmean = -np.sum(direct, axes)
        dx = direct + visible * self.mean_weight * dmean / m
        return dx, dgamma, -dmean if self.decouple else np.sum(g, axes)


@dataclasses.dataclass
class BatchNormReference(CBNReference):
    """Batch normalization: coupled, with full averages that no step uses."""

    epsilon: float = 1e-3
    decouple: bool = False
    weight, uses_averages = 1.0, False


@dataclasses.dataclass
class LpNormReference:
    """l_p normalization: (x - mean) / (norm + epsilon), and the averages of both.

    The norm is (mean |u|^p)^(1/p), where u is x or x - mean.
    """

    channels: int
    p: float = 2
    norm_of: str = "input"
    momentum: float = 0.99
    epsilon: float = 1e-5
    moving_mean, moving_statistic = 0.0, 1.0

    def inference(self, x, gamma, beta):
        divisor = self.moving_statistic + self.epsilon
        return gamma * (x - self.moving_mean) / divisor + beta

    def train(self, x, gamma, beta, mask=None):
        """Normalise one batch and update the averages where it has an element."""
        mean, norm, _ = self._statistics(x, mask)
        seen = _mask(x, mask).any(_axes(x))

        def moved(old, new):
            return np.where(seen, self.momentum * old + (1 - self.momentum) * new, old)

        self.moving_mean = moved(self.moving_mean, mean)
        self.moving_statistic = moved(self.moving_statistic, norm)
        return self.forward(x, gamma, beta, mask)

    def forward(self, x, gamma, beta, mask=None):
        mean, norm, _ = self._statistics(x, mask)
        return gamma * (x - mean) / (norm + self.epsilon) + beta

    def gradients(self, g, x, gamma, beta, mask=None):
        """dx, dgamma, dbeta of sum(g * y): the chain rule through both statistics."""
        mean, norm, u = self._statistics(x, mask)
        visible, axes = _mask(x, mask), _axes(x)
        divisor, c = norm + self.epsilon, x - mean
        dc = g * gamma / divisor
        dnorm = -np.sum(g * gamma * c, axes) / divisor**2
        du = visible * dnorm * self._norm_gradient(u, norm, _count(visible))
        dmean = -np.sum(dc, axes)
        if self.norm_of == "centered":
            dmean = dmean - np.sum(du, axes)
        dx = dc + du + visible * dmean / _count(visible)
        return dx, np.sum(g * c, axes) / divisor, np.sum(g, axes)

    def _statistics(self, x, mask):
        """Mean, norm and u."""
        mean, visible = _mean(x, mask), _mask(x, mask)
        u = np.where(visible, x - mean if self.norm_of == "centered" else x, 0)
        if self.p == np.inf:
            return mean, np.abs(u).max(_axes(u), initial=0), u
        powers = np.sum(np.abs(u) ** self.p, _axes(u))
        return mean, (powers / _count(visible)) ** (1 / self.p), u

    def _norm_gradient(self, u, norm, count):
        """An equal part for each element that attains the maximum."""
        if self.p == np.inf:
            attained = np.abs(u) == norm
            return np.sign(u) * attained / attained.sum(_axes(u))
        norm = np.where(norm > 0, norm, 1)
        return np.sign(u) * (np.abs(u) / norm) ** (self.p - 1) / count


def _axes(x):
    return tuple(range(x.ndim - 1))


def _mask(x, mask):
    return np.broadcast_to(True if mask is None else mask, x.shape)


def _mean(x, mask):
    mask = _mask(x, mask)
    return np.sum(np.where(mask, x, 0), _axes(x)) / _count(mask)


def _count(mask):
    return np.maximum(mask.sum(_axes(mask)), 1)


def finite_differences(function, x, step=1e-6):
    """Gradient of a scalar function of a float64 array, by central differences."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        forward, backward = x.copy(), x.copy()
        forward[index] += step
        backward[index] -= step
        gradient[index] = (function(forward) - function(backward)) / (2 * step)
    return gradient


def relative_error(actual, expected):
    """Largest deviation, relative to the largest expected magnitude."""
    actual = np.asarray(keras.ops.convert_to_numpy(actual), "float64")
    return np.abs(actual - expected).max() / np.abs(expected).max()
