"""Arrays in float64 of what a model holds, and tables of numbers."""

import keras
import numpy as np


def float64(x):
    """Copy an array, a tensor or a variable to a float64 array."""
    on_backend = keras.ops.is_tensor(x) or isinstance(x, keras.Variable)
    return np.array(keras.ops.convert_to_numpy(x) if on_backend else x, "float64")


def moments(x, axis):
    """Compute the mean and variance of each channel, float64."""
    x = np.moveaxis(float64(x), axis, -1)
    x = x.reshape(-1, x.shape[-1])
    return x.mean(0), x.var(0)


def affine(norm, channels):
    """Return `gamma` and `beta` of a norm, float64; ones or zeros where it has none."""
    gamma, beta = getattr(norm, "gamma", None), getattr(norm, "beta", None)
    return (
        np.ones(channels) if gamma is None else float64(gamma),
        np.zeros(channels) if beta is None else float64(beta),
    )


def aligned(lines):
    """Write lines of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
        for line in lines
    )
