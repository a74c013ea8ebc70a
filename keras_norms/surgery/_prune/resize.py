"""Layers with fewer channels. Everything here works on a `Unit`, as in linear.py."""

import keras
import numpy as np
from keras import layers

from keras_norms.surgery._graph import affine as affine_lib
from keras_norms.surgery._graph import linear


def substitute(site, removed):
    """Let a layer do without what goes; `removed` is that of `select`."""
    unit = site.unit
    constants = np.zeros(sum(group.features.size for group in site.groups))
    targets, sources, scales = [], [], []
    for group in site.groups:
        rows = {int(root): row for row, root in enumerate(group.roots)}
        for root, row in rows.items():
            if root not in removed:
                continue
            other, features = rows.get(removed[root]), group.features[row]
            if other is None:
                constants[features] = group.means[row]
                continue
            alpha, constants[features] = group.substitute(row, other)
            targets.extend(group.features[other])
            sources.extend(features)
            scales.extend([alpha] * len(features))
    if np.any(constants):
        _absorb(unit, constants)
    if targets:
        axis = linear.kernel_axes(unit)[0]
        kernel = np.moveaxis(unit.weight("kernel"), axis, 0).copy()
        scales = np.reshape(scales, (-1,) + (1,) * (kernel.ndim - 1))
        np.add.at(kernel, targets, scales * kernel[sources])
        unit.arrays["kernel"] = np.moveaxis(kernel, 0, axis)


def _absorb(unit, constants):
    """Give the bias what the kernel makes of `constants`, a vector over the inputs.

    Where a BatchNormalization alone follows a layer without a bias, its mean takes it.
    """
    norm = None if unit.config["use_bias"] else affine_lib.norm_after(unit)
    takes_it = norm is not None and affine_lib.is_of_channels_of(norm, unit)
    linear.absorb_input(unit, np.ones_like(constants), constants)
    if takes_it:
        unit.configure(use_bias=False)
        bias = unit.arrays.pop("bias")
        for name in ("moving_mean", "renorm_mean"):
            if norm.weight(name) is not None:
                norm.arrays[name] = norm.weight(name) - bias


def resize(channels, gone):
    """Take channels out, by their roots. Returns what is gone, by name of maker."""

    def stays(labels):
        return ~np.isin(channels.roots(labels.ids), gone)

    for unit, labels in channels.readers.items():
        name = linear.kernel_names(unit)[0]
        _select(unit, name, stays(labels), linear.kernel_axes(unit)[0])
        if unit.cls in linear.SEPARABLE:
            each = np.repeat(stays(labels), unit.config["depth_multiplier"])
            _select(unit, "pointwise_kernel", each, -2)
    for unit, (read, made) in channels.passers.items():
        if not np.all(stays(made)):
            _drop_channels(unit, read.axis, stays(read), made.axis, stays(made))
    removed = {}
    for unit, labels in channels.makers.items():
        mask = stays(labels)
        if np.all(mask):
            continue
        name = linear.kernel_names(unit)[1]
        _select(unit, name, mask, linear.kernel_axes(unit)[1])
        _select(unit, "bias", mask, 0)
        size = "units" if unit.cls in linear.DENSE else "filters"
        unit.configure(**{size: int(np.sum(mask))})
        removed[channels.names[unit]] = np.flatnonzero(~mask)
    return removed


def _drop_channels(unit, axis, stays, made_axis, made_stays):
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
    if not np.all(stays) and unit.weight(name) is not None:
        unit.arrays[name] = np.compress(stays, unit.weight(name), axis)
