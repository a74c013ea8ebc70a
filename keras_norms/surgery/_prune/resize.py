"""Layers with fewer channels. Everything here works on a `Unit`, as in linear.py."""

import keras
import numpy as np
from keras import layers

from keras_norms.surgery._graph import affine as affine_lib
from keras_norms.surgery._graph import linear


def absorb_constants(unit, constants):
    """Give the bias what the kernel makes of `constants`, a vector over the inputs.

    Where a BatchNormalization alone follows a layer without a bias, its mean takes it.
    """
    if not np.any(constants):
        return
    norm = None if unit.config["use_bias"] else affine_lib.norm_after(unit)
    linear.absorb_input(unit, np.ones_like(constants), constants)
    if norm is not None:
        unit.configure(use_bias=False)
        bias = unit.arrays.pop("bias")
        norm.arrays["moving_mean"] = norm.weight("moving_mean") - bias


def input_squares(unit):
    """How much of each input's mean square a kernel passes on, a vector."""
    if unit.cls not in linear.SEPARABLE:
        kernel = np.moveaxis(unit.weight("kernel"), linear.kernel_axes(unit)[0], 0)
        return np.sum(np.square(kernel), axis=tuple(range(1, kernel.ndim)))
    depth = np.square(unit.weight("depthwise_kernel"))
    depth = np.sum(depth, axis=tuple(range(depth.ndim - 2)))
    point = np.square(unit.weight("pointwise_kernel"))
    return np.sum(depth * np.sum(point.reshape(*depth.shape, -1), -1), -1)


def add_inputs(unit, targets, sources, scales):
    """Let input channels `targets` do what `scales` times them did as `sources`."""
    axis = linear.kernel_axes(unit)[0]
    kernel = np.moveaxis(unit.weight("kernel"), axis, 0).copy()
    scales = scales.reshape((-1,) + (1,) * (kernel.ndim - 1))
    np.add.at(kernel, targets, scales * kernel[sources])
    unit.arrays["kernel"] = np.moveaxis(kernel, 0, axis)


def drop_inputs(unit, stays):
    """Drop the input channels of a layer with a kernel where `stays` is false."""
    if unit.cls in linear.SEPARABLE:
        _select(unit, "depthwise_kernel", stays, -2)
        stays = np.repeat(stays, unit.config["depth_multiplier"])
        _select(unit, "pointwise_kernel", stays, -2)
    else:
        _select(unit, "kernel", stays, linear.kernel_axes(unit)[0])


def drop_outputs(unit, stays):
    """Drop the output channels of a layer with a kernel where `stays` is false."""
    name = "pointwise_kernel" if unit.cls in linear.SEPARABLE else "kernel"
    _select(unit, name, stays, linear.kernel_axes(unit)[1])
    _select(unit, "bias", stays, 0)
    size = "units" if unit.cls in linear.DENSE else "filters"
    unit.configure(**{size: int(np.sum(stays))})


def drop_channels(unit, axis, stays, made_axis, made_stays):
    """Drop channels of a layer that keeps them apart: in its input, in its output."""
    cls, config = unit.cls, unit.config
    size = int(np.sum(made_stays))
    if cls in linear.DEPTHWISE:
        _select(unit, "kernel", stays, -2)
        _select(unit, "bias", made_stays, 0)
    elif cls is layers.PReLU:
        if unit.weight("alpha").shape[axis - 1] > 1:
            _select(unit, "alpha", stays, axis - 1)
    elif cls in linear.EINSUM:
        _select(unit, "kernel", stays, 0)
        _select(unit, "bias", stays, 0)
        shape = keras.tree.flatten(config["output_shape"])
        unit.configure(output_shape=[*_with(shape, axis - 1, size)])
    elif cls is layers.Reshape:
        shape = config["target_shape"]
        if shape[made_axis - 1] != -1:
            unit.configure(target_shape=_with(shape, made_axis - 1, size))
    elif issubclass(cls, layers.InputLayer):
        unit.configure(batch_shape=_with(config["batch_shape"], axis, size))
    elif affine_lib.is_norm(unit):
        for variable in unit.layer.weights:
            if tuple(variable.shape) == stays.shape:
                _select(unit, variable.name, stays, 0)


def _with(shape, axis, size):
    return (*shape[:axis], size, *shape[axis + 1 :])


def _select(unit, name, stays, axis):
    array = unit.weight(name)
    if array is not None:
        unit.arrays[name] = np.compress(stays, array, axis)
