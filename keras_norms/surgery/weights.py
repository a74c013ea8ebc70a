"""Wrapping the layers of a graph in WS, CWN or WN."""

import math

import keras
import numpy as np

from keras_norms.layers import kernels
from keras_norms.layers.wn import WN
from keras_norms.surgery import affine, linear
from keras_norms.surgery.graph import numpy


def wrap(units, wrapper):
    """Wrap every layer with a kernel, under its own name.

    Args:
        units: The units to look at.
        wrapper: Partial of a class of wrappers.

    Returns:
        Names of layers that cannot be wrapped.
    """
    unwrapped = []
    for unit in units:
        if not linear.is_linear(unit) or issubclass(unit.cls, linear.WRAPPERS):
            continue
        if _can_wrap(unit.layer, wrapper.func):
            unit.wrap_in(wrapper)
        else:
            unwrapped.append(unit.name)
    return unwrapped


def _can_wrap(layer, cls):
    try:
        kernels.check_layer(layer)
    except ValueError:
        return False
    for kernel in kernels.kernels_of(layer):
        shape = getattr(layer, kernel.name).shape
        if math.prod(shape[i] for i in kernel.fan_in) < cls.smallest_fan_in:
            return False
    return True


def keep_function(units):
    """Keep as much of the function as the wrappers of made units can hold.

    The gain of WN takes the lengths over, so that nothing changes. WS and CWN take the
    mean of each unit's weights out for good; their gain takes the lengths over, and
    where there is none, a BatchNormalization that follows takes them.

    Returns:
        Names of layers whose function changed.
    """
    changed = []
    for unit in units:
        if unit.wrapper is None:
            continue
        wrapper = unit.made
        if isinstance(wrapper, WN):
            wrapper.reset_gain()
            continue
        stored = {
            k.name: _float64(getattr(wrapper.layer, k.name)) for k in _all(wrapper)
        }
        for kernel in _all(wrapper):
            ratio = _ratio(wrapper, kernel, stored[kernel.name])
            gain = wrapper.gains.get(kernel.name)
            if gain is not None:
                gain.assign(keras.ops.cast(numpy(gain) / ratio, gain.dtype))
            elif kernel == _all(wrapper)[-1]:
                _scale_statistics(unit, np.ravel(ratio))
        if not all(
            np.allclose(numpy(value), stored[name], rtol=1e-5, atol=1e-7)
            for name, value in wrapper.normalized_kernels().items()
        ):
            changed.append(unit.name)
    return changed


def _all(wrapper):
    return kernels.kernels_of(wrapper.layer)


def _ratio(wrapper, kernel, stored):
    """How much longer units are than they were, their means taken out."""
    centered = stored - stored.mean(kernel.fan_in, keepdims=True)
    new = _float64(wrapper.normalized_kernels()[kernel.name])
    old, new = (np.sqrt(np.sum(np.square(v), kernel.fan_in)) for v in (centered, new))
    fits = (old > 0) & (new > 0)
    return np.where(fits, new / np.where(fits, old, 1), 1)


def _scale_statistics(unit, ratio):
    """Let the BatchNormalization after a layer see `ratio` times what it saw.

    With m' = ratio * m and v' = ratio^2 * v its output is the same, but for epsilon,
    which gamma makes up for.
    """
    after = {reader.unit for node in unit.nodes for reader in node.output.readers}
    if len(after) != 1 or not linear.has_linear_activation(unit):
        return
    if kernels.overrides_call(unit.cls):
        return
    (norm,) = after
    fits = (
        affine.is_batch_norm(norm)
        and all(node.output.is_private for node in unit.nodes)
        and len(norm.nodes) == len(unit.nodes)
        and len(ratio) == norm.made.moving_mean.shape[0]
    )
    if not fits:
        return
    layer, bias = norm.made, unit.made.layer.bias
    bias = 0.0 if bias is None else np.ravel(_float64(bias))
    mean = bias + ratio * (_float64(layer.moving_mean) - bias)
    old = _float64(layer.moving_variance)
    variance = np.square(ratio) * old
    if layer.gamma is None:
        variance = np.square(ratio) * (old + layer.epsilon) - layer.epsilon
        variance = np.maximum(variance, 0)
    else:
        gamma = _float64(layer.gamma) * np.sqrt(
            (variance + layer.epsilon) / (old + layer.epsilon)
        )
        layer.gamma.assign(keras.ops.cast(gamma / ratio, layer.gamma.dtype))
    layer.moving_mean.assign(keras.ops.cast(mean, layer.moving_mean.dtype))
    layer.moving_variance.assign(keras.ops.cast(variance, layer.moving_mean.dtype))


def _float64(x):
    return np.asarray(numpy(x), "float64")
