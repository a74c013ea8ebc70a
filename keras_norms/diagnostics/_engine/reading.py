"""What diagnostics read from a model: float64 arrays, layers by name, its rate."""

import warnings

import numpy as np
from keras import ops

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import matching_layers
from keras_norms.layers.fused_cbn import FusedCBN
from keras_norms.layers.kernels import unique_names


def float64(x):
    """Copy an array, a tensor or a variable to a float64 array."""
    return np.array(ops.convert_to_numpy(x), "float64")


def by_channel(x, axis):
    """Return the elements of each channel, of shape `(elements, channels)`, float64."""
    x = np.moveaxis(float64(x), axis, -1)
    return x.reshape(-1, x.shape[-1])


def visible(x, axis, mask):
    """Return which of the elements of `by_channel` a mask does not hide."""
    mask = True if mask is None else arguments.broadcast_mask(mask, x, axis)
    mask = np.broadcast_to(ops.convert_to_numpy(mask), x.shape)
    return by_channel(mask, axis) > 0


def moments(x, axis, mask):
    """Compute the mean and variance of what is visible of each channel, float64."""
    shown, x = visible(x, axis, mask), by_channel(x, axis)
    return x.mean(0, where=shown), x.var(0, where=shown)


def affine(norm, channels):
    """Return `gamma` and `beta` of a norm, float64; ones or zeros where it has none."""
    gamma, beta = getattr(norm, "gamma", None), getattr(norm, "beta", None)
    return (
        np.ones(channels) if gamma is None else float64(gamma),
        np.zeros(channels) if beta is None else float64(beta),
    )


def find_layer(model, layer, argument="layer"):
    """Find the only layer of a model that an argument means."""
    found = matching_layers(model, layer, argument)
    if len(found) > 1:
        raise ValueError(
            f"Argument `{argument}` must be a layer, or the name of only one. "
            f"Received: {argument}={layer!r}, the name of {len(found)} layers"
        )
    return found[0]


def norms_in(model, kinds):
    """List the called layers of some classes: not the CBN inside a `FusedCBN`."""
    inner = {id(layer.norm) for layer in _keras.layers_of(model, kind=FusedCBN)}
    found = _keras.layers_of(model, kind=kinds, include_self=False)
    return [layer for layer in found if layer.built and id(layer) not in inner]


def names_of(layers):
    """Name each layer, see `unique_names`."""
    return unique_names([each.name for each in layers], [each.path for each in layers])


def learning_rate_of(model, learning_rate):
    """Return the rate given, or the one that the optimizer's next step will use."""
    if learning_rate is not None:
        return arguments.number("learning_rate", learning_rate, above=0)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        expected = "given: the model has no optimizer"
        raise arguments.wrong("learning_rate", expected, None)
    if not hasattr(optimizer, "learning_rate"):
        expected = "given: the model's optimizer has no single one"
        raise arguments.wrong("learning_rate", expected, None)
    rate = float(ops.convert_to_numpy(ops.convert_to_tensor(optimizer.learning_rate)))
    if rate == 0:  # as at the end of many schedules, and at the start of a warm-up
        warnings.warn(
            "The learning rate of the optimizer is 0, so all measured steps have "
            "length 0. Pass `learning_rate`.",
            stacklevel=3,
        )
    return rate


def aligned(lines):
    """Write lines of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
        for line in lines
    )
