"""CBN in float64 NumPy, written from the formulas of the paper, statistic by statistic.

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

    def __post_init__(self):
        self.mean = np.zeros(self.channels)
        self.square = np.ones(self.channels)
        self.weight = 0.0

    def inference(self, x, gamma, beta):
        root = np.sqrt(self.square + self.epsilon)
        if self.decouple:
            return gamma / self.rho * (x - self.mean + beta) / root
        return gamma / self.rho * (x - self.mean) / root + beta

    def train(self, x, gamma, beta, learning_rate=-1.0):
        """Normalise one batch and update the state.

        Returns the output and the `Constants` of this step, with which `forward` and
        `gradients` can be evaluated elsewhere than at `x`.
        """
        x = np.asarray(x, "float64")
        batch_mean, _ = _moments(x)
        known = learning_rate >= 0
        eta = max(1 - self.omega * learning_rate, 0.0) if known else self.momentum
        weight = eta * self.weight + (1 - eta)

        def average(old, new):
            return (eta * self.weight * old + (1 - eta) * new) / weight

        stored_mean = average(self.mean, batch_mean)
        used_mean = stored_mean if known else batch_mean
        square = self._square(x, used_mean, beta)
        stored_square = average(self.square, square)
        used_square = stored_square if known else square

        mean_weight = np.ones(self.channels)
        if self.mean_gradient == "ratio":
            nonzero = np.where(batch_mean == 0, 1, batch_mean)
            ratio = np.clip(used_mean / nonzero, -10, 10)
            mean_weight = np.where(batch_mean == 0, 1, ratio)
        constants = Constants(
            mean_weight=mean_weight,
            mean_offset=used_mean - mean_weight * batch_mean,
            ratio=np.sqrt((used_square + self.epsilon) / (square + self.epsilon)),
        )
        self.mean, self.square, self.weight = stored_mean, stored_square, weight
        return self.forward(x, gamma, beta, constants), constants

    def _square(self, x, mean, beta):
        mean = np.asarray(mean)
        if not self.decouple:
            return _moments(x)[1]
        return np.mean((x - mean + beta) ** 2, axis=_axes(x))

    def forward(self, x, gamma, beta, constants):
        """The training map as a function of x, gamma and beta alone."""
        mean = constants.mean_weight * _moments(x)[0] + constants.mean_offset
        root = np.sqrt(self._square(x, mean, beta) + self.epsilon)
        scale = gamma / (self.rho * constants.ratio * root)
        if self.decouple:
            return scale * (x - mean + beta)
        return scale * (x - mean) + beta

    def gradients(self, g, x, gamma, beta, constants):
        """dx, dgamma, dbeta of sum(g * y): the chain rule through every statistic."""
        x, g = np.asarray(x, "float64"), np.asarray(g, "float64")
        axes, m = _axes(x), x.size / x.shape[-1]
        batch_mean, _ = _moments(x)
        mean = constants.mean_weight * batch_mean + constants.mean_offset
        square = self._square(x, mean, beta)
        scale = gamma / (self.rho * constants.ratio * np.sqrt(square + self.epsilon))
        shifted = x - mean + (beta if self.decouple else 0)
        normed = shifted if self.decouple else x - batch_mean
        dsquare = np.sum(g * shifted, axes) * scale * -0.5 / (square + self.epsilon)
        dnormed = normed * 2 * dsquare / m
        if self.decouple:
            dshifted = g * scale + dnormed
            dmean = -np.sum(dshifted, axes)
            dbeta = np.sum(dshifted, axes)
            dx = dshifted + constants.mean_weight * dmean / m
        else:
            dmean = -np.sum(g * scale, axes)
            dbeta = np.sum(g, axes)
            dx = g * scale + dnormed + constants.mean_weight * dmean / m
        root = np.sqrt(square + self.epsilon)
        dgamma = np.sum(g * shifted, axes) / (self.rho * constants.ratio * root)
        return dx, dgamma, dbeta


@dataclasses.dataclass
class Constants:
    """What the gradient of one step holds constant.

    The mean in use is mean_weight * mean(x) + mean_offset; the root of the mean square
    in use is `ratio` times that of the batch.
    """

    mean_weight: np.ndarray
    mean_offset: np.ndarray
    ratio: np.ndarray


def _axes(x):
    return tuple(range(x.ndim - 1))


def _moments(x):
    return x.mean(_axes(x)), x.var(_axes(x))


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
