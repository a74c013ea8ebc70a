"""Wrapping the layers of a graph in WS, CWN or WN."""

import math

import numpy as np

from keras_norms.layers import kernels
from keras_norms.layers.fused_cbn import FusedCBN
from keras_norms.layers.wn import WN
from keras_norms.surgery._graph import affine, linear
from keras_norms.surgery._graph.arrays import assign, to_float64


def wrap(report, units, wrapper):
    """Wrap every layer with a kernel, under its own name, by a partial of a class."""
    for unit in units:
        if issubclass(unit.cls, FusedCBN):
            report.unwrapped.append(unit.name)
        if not linear.is_linear(unit) or issubclass(unit.cls, linear.WRAPPERS):
            continue
        if _can_wrap(unit.layer, wrapper.func):
            unit.wrapper = wrapper
        else:
            report.unwrapped.append(unit.name)


def _can_wrap(layer, cls):
    return kernels.has_kernels(layer) and all(
        math.prod(getattr(layer, name).shape[i] for i in fan_in) >= cls.smallest_fan_in
        for name, fan_in in kernels.kernels_of(layer)
    )


def keep_function(report, units):
    """Keep as much of the function as the wrappers of made units can hold.

    The gain of WN takes over the lengths, and nothing changes. WS and CWN lose the mean
    of each unit's weights; their gain takes over the lengths, or without one, a
    BatchNormalization that follows.
    """
    for unit in [unit for unit in units if unit.wrapper is not None]:
        wrapper = unit.made
        if isinstance(wrapper, WN):
            wrapper.reset_gain()
            continue
        found = kernels.kernels_of(wrapper.layer)
        stored = {k.name: to_float64(getattr(wrapper.layer, k.name)) for k in found}
        for kernel in found:
            ratio = _ratio(wrapper, kernel, stored[kernel.name])
            gain = wrapper.gains.get(kernel.name)
            if gain is not None:
                assign(gain, to_float64(gain) / ratio)
            elif kernel == found[-1] and _scale_statistics(unit, np.ravel(ratio)):
                stored[kernel.name] *= np.expand_dims(ratio, kernel.fan_in)
        if not all(
            _are_close(to_float64(value), stored[name])
            for name, value in wrapper.normalized_kernels().items()
        ):
            report.changed.append(unit.name)


def _are_close(new, old):
    """Whether kernels differ by rounding, which is relative to the largest weight."""
    return np.abs(new - old).max() <= 1e-5 * np.abs(old).max()


def _ratio(wrapper, kernel, stored):
    """How much longer units are than they were, both without their means."""
    centered = stored - stored.mean(kernel.fan_in, keepdims=True)
    new = to_float64(wrapper.normalized_kernels()[kernel.name])
    old, new = (np.sqrt(np.sum(np.square(v), kernel.fan_in)) for v in (centered, new))
    fits = (old > 0) & (new > 0)
    return np.where(fits, new / np.where(fits, old, 1), 1)


def _scale_statistics(unit, ratio):
    """Let the BatchNormalization after a layer see `ratio` times what it saw.

    With m' = ratio * m and v' = ratio^2 * v its output is the same except for epsilon.
    Gamma makes up for that, or v' where there is no gamma. Returns whether there is
    such a norm.
    """
    norm = affine.norm_after(unit, affine.is_batch_norm)
    is_linear = not kernels.overrides_call(unit.cls)
    if norm is None or not (is_linear and affine.is_of_channels_of(norm, unit)):
        return False
    layer, bias = norm.made, unit.made.layer.bias
    if len(ratio) != layer.moving_mean.shape[0]:
        return False
    bias = 0.0 if bias is None else np.ravel(to_float64(bias))
    old = to_float64(layer.moving_variance)
    variance = np.square(ratio) * old
    if layer.gamma is None:
        variance = np.square(ratio) * (old + layer.epsilon) - layer.epsilon
        if variance.min() < 0:
            return False
    else:
        roots = np.sqrt((variance + layer.epsilon) / (old + layer.epsilon))
        assign(layer.gamma, to_float64(layer.gamma) * roots / ratio)
    for variable in layer.non_trainable_variables:
        value = to_float64(variable)
        if variable.name in ("moving_mean", "renorm_mean"):
            assign(variable, bias + ratio * (value - bias))
        elif variable.name in ("moving_stddev", "renorm_stddev"):
            assign(variable, ratio * value)
    assign(layer.moving_variance, variance)
    return True
