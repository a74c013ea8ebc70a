"""Layers with fewer channels. Everything here works on a `Unit`, as in linear.py."""

import keras
import numpy as np
from keras import layers

from keras_norms.surgery import affine as affine_lib
from keras_norms.surgery import linear


def absorb_constants(unit, constants):
    """Give the bias what the kernel makes of `constants`, a vector over the inputs.

    Where a BatchNormalization alone follows a layer without a bias, its mean takes it.
    """
    if not np.any(constants):
        return
    config = unit.config
    linear.absorb_input(unit, np.ones_like(constants), constants)
    norm = None if config["use_bias"] else _norm_after(unit)
    if norm is not None:
        bias = unit.arrays.pop("bias")
        unit._config = config
        norm.arrays["moving_mean"] = norm.weight("moving_mean") - bias


def _norm_after(unit):
    readers = {reader.unit for node in unit.nodes for reader in node.output.readers}
    if len(readers) != 1 or not linear.has_linear_activation(unit):
        return None
    (norm,) = readers
    fits = (
        affine_lib.is_norm(norm)
        and all(node.output.is_private for node in unit.nodes)
        and len(norm.nodes) == len(unit.nodes)
    )
    return norm if fits else None


def add_inputs(unit, targets, sources, scales):
    """Let input channels `targets` do what `scales` times them did as `sources`."""
    kernel = np.moveaxis(unit.weight("kernel"), _input_axis(unit), 0).copy()
    scales = scales.reshape((-1,) + (1,) * (kernel.ndim - 1))
    np.add.at(kernel, targets, scales * kernel[sources])
    unit.arrays["kernel"] = np.moveaxis(kernel, 0, _input_axis(unit))


def keep_inputs(unit, keep):
    """Drop the input channels of a layer with a kernel where `keep` is false."""
    if unit.cls in linear.SEPARABLE:
        _keep(unit, "depthwise_kernel", keep, -2)
        keep = np.repeat(keep, unit.config["depth_multiplier"])
        _keep(unit, "pointwise_kernel", keep, -2)
    else:
        _keep(unit, "kernel", keep, _input_axis(unit))


def keep_outputs(unit, keep):
    """Drop the output channels of a layer with a kernel where `keep` is false."""
    name = "pointwise_kernel" if unit.cls in linear.SEPARABLE else "kernel"
    _keep(unit, name, keep, -2 if unit.cls in linear.TRANSPOSED else -1)
    _keep(unit, "bias", keep, 0)
    size = "units" if unit.cls in linear.DENSE else "filters"
    unit._config = {**unit.config, size: int(np.sum(keep))}


def keep_channels(unit, axis, keep, made_axis, made_keep):
    """Drop channels of a layer that keeps them apart.

    Args:
        unit: A norm, a depthwise convolution, a diagonal EinsumDense, a PReLU, or a
            layer that knows its shape.
        axis, keep: The axis of the channels in the input, and which of them stay.
        made_axis, made_keep: The same of the output.
    """
    cls, config = unit.cls, unit.config
    size = int(np.sum(made_keep))
    if cls in linear.DEPTHWISE:
        _keep(unit, "kernel", keep, -2)
        _keep(unit, "bias", made_keep, 0)
    elif cls is layers.PReLU:
        alpha = unit.weight("alpha")
        if alpha.shape[axis - 1] > 1:
            unit.arrays["alpha"] = np.compress(keep, alpha, axis - 1)
    elif cls in linear.EINSUM:
        _keep(unit, "kernel", keep, 0)
        _keep(unit, "bias", keep, 0)
        shape = [config["output_shape"]]
        shape = list(keras.tree.flatten(shape))
        shape[axis - 1] = size
        unit._config = {**config, "output_shape": shape}
    elif cls is layers.Reshape:
        shape = list(config["target_shape"])
        if shape[made_axis - 1] != -1:
            shape[made_axis - 1] = size
        unit._config = {**config, "target_shape": tuple(shape)}
    elif issubclass(cls, layers.InputLayer):
        shape = list(config["batch_shape"])
        shape[axis] = size
        unit._config = {**config, "batch_shape": tuple(shape)}
    elif affine_lib.is_norm(unit):
        for variable in unit.layer.weights:
            if tuple(variable.shape) == keep.shape:
                _keep(unit, variable.name, keep, 0)


def _input_axis(unit):
    return -1 if unit.cls in linear.TRANSPOSED else -2


def _keep(unit, name, keep, axis):
    array = unit.weight(name)
    if array is not None:
        unit.arrays[name] = np.compress(keep, array, axis)
