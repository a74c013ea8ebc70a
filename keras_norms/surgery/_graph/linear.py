"""Layers with a kernel, and how an affine map of each channel goes into it.

Everything here works on a `Unit`: its weights are float64 arrays, its configuration is
changed only where a bias is added. `a` and `b` are vectors over the channels.
"""

import keras
import numpy as np
from keras import layers

from keras_norms import _keras
from keras_norms.layers.channel_affine import ChannelAffine
from keras_norms.layers.cwn import CWN
from keras_norms.layers.kernels import (
    CONVOLUTIONS,
    DEPTHWISE,
    SEPARABLE,
    TRANSPOSED,
    einsum_letters,
)
from keras_norms.layers.wn import WN
from keras_norms.layers.ws import WS

DENSE = (layers.Dense,)
EINSUM = (layers.EinsumDense, ChannelAffine)
PLAIN = CONVOLUTIONS + TRANSPOSED + DEPTHWISE + SEPARABLE + DENSE + EINSUM
WRAPPERS = (WS, CWN, WN)


def is_linear(unit):
    """Whether it is a linear layer that a CBN can be put before.

    One that maps each channel on its own (`diagonal_axis`) is not: it mixes none.
    """
    return issubclass(unit.cls, PLAIN + WRAPPERS) and diagonal_axis(unit, 2) is None


def is_foldable(unit):
    """Whether its kernel is known well enough to change it."""
    layer = unit.layer
    if unit.cls not in PLAIN or diagonal_axis(unit, 2) is not None:
        return False  # A subclass may compute something else.
    # Under LoRA and quantization the kernel is not what the weight `kernel` holds.
    return layer is None or not (
        getattr(layer, "lora_rank", None) or getattr(layer, "quantization_mode", None)
    )


def data_format(unit):
    """That of the layer, or of the one inside a wrapper; `None` if it has none."""
    if unit.layer is None:
        return unit.config.get("data_format")
    layer = unit.layer.layer if issubclass(unit.cls, WRAPPERS) else unit.layer
    return getattr(layer, "data_format", None)


def channel_axis(unit, rank):
    """The channel axis of its input and output."""
    return 1 if data_format(unit) == "channels_first" else rank - 1


def has_linear_activation(unit):
    return unit.config.get("activation") in (None, "linear")


def sees_border(unit):
    """Whether a constant input does not give an output constant over positions."""
    if unit.cls in DENSE:
        return False
    if unit.cls in EINSUM:
        # Like a Dense layer, it may sum over the last axis and put one in its place.
        read, kernel, made = _einsum_letters(unit)
        is_last = read[:-1] == made[:-1] and read[-1] not in made
        return not (is_last and sorted(kernel) == sorted(read[-1] + made[-1]))
    if all(size == 1 for size in np.ravel(unit.config["kernel_size"])):
        # A transposed convolution with a stride leaves gaps even so.
        strides = np.ravel(unit.config["strides"])
        return unit.cls in TRANSPOSED and any(stride != 1 for stride in strides)
    # Copies of a transposed kernel overlap, and fewer do so at the border.
    return unit.cls in TRANSPOSED or unit.config["padding"] != "valid"


def is_unconstrained(unit):
    """Whether no constraint would change the kernel or bias in the next step."""
    return not any(
        unit.config.get(f"{name}_constraint")
        for name in ("kernel", "depthwise", "pointwise", "bias")
    )


def plain_dtype(unit):
    """Its dtype policy as a norm can have it: without quantization."""
    return _keras.unquantized(keras.dtype_policies.get(unit.config["dtype"]))


def absorb_input(unit, a, b):
    """Make `layer(x)` what `layer(a * x + b)` was. Needs b = 0 if it sees a border."""
    name, axis = kernel_names(unit)[0], kernel_axes(unit)[0]
    kernel = unit.weight(name)
    if unit.cls in CONVOLUTIONS:
        # With groups, each output channel reads a part of the input channels.
        groups, (fan_in, filters) = unit.config["groups"], kernel.shape[-2:]
        a, b = (
            np.repeat(v.reshape(groups, fan_in).T, filters // groups, axis=1)
            for v in (a, b)
        )
    else:
        a, b = (_along(axis, v, kernel) for v in (a, b))
    unit.arrays[name] = kernel * a
    if not np.any(b):
        return
    positions = tuple(range(kernel.ndim - 2))
    if unit.cls in DEPTHWISE + SEPARABLE:
        bias = np.sum(kernel * b, axis=positions).reshape(-1)
    else:
        bias = np.sum(kernel * b, axis=(*positions, axis))
    if unit.cls in SEPARABLE:
        point = unit.weight("pointwise_kernel")
        bias = bias @ point.reshape(point.shape[-2:])
    _add_bias(unit, bias)


def absorb_output(unit, a, b):
    """Make `layer(x)` what `a * layer(x) + b` was. Needs a linear activation."""
    name = kernel_names(unit)[1]
    kernel, bias = unit.weight(name), unit.weight("bias")
    if unit.cls in DEPTHWISE:
        unit.arrays[name] = kernel * a.reshape(kernel.shape[-2:])
    else:
        unit.arrays[name] = kernel * _along(kernel_axes(unit)[1], a, kernel)
    if bias is not None:
        unit.arrays["bias"] = bias * a
    if np.any(b):
        _add_bias(unit, b)


def kernel_names(unit):
    """The kernels that read the input and that make the output."""
    is_separable = unit.cls in SEPARABLE
    return ("depthwise_kernel", "pointwise_kernel") if is_separable else ("kernel",) * 2


def kernel_axes(unit):
    """The axes of `kernel_names` that count channels of the input and of the output.

    A depthwise layer has no second one.
    """
    if unit.cls in EINSUM:
        read, kernel, made = _einsum_letters(unit)
        return kernel.find(read[-1]), kernel.find(made[-1])
    return (-1, -2) if unit.cls in TRANSPOSED else (-2, -1)


def _along(axis, vector, kernel):
    shape = [1] * kernel.ndim
    shape[axis] = -1
    return vector.reshape(shape)


def can_absorb(unit, b, as_input):
    """Whether `absorb_input` is exact, or `absorb_output`."""
    if unit.cls in EINSUM:
        read, kernel, made = _einsum_letters(unit)
        bias = unit.config["bias_axes"] or made[-1]
        bias_fits = bias[-1] == made[-1] if np.any(b) else as_input or made[-1] in bias
        if not bias_fits or (read if as_input else made)[-1] not in kernel:
            return False
    if as_input:
        return not np.any(b) or not sees_border(unit)
    return has_linear_activation(unit)


def add_missing_bias(unit):
    """Give it a bias of zeros, where it has none."""
    if not is_foldable(unit):
        return
    made = unit.nodes[0].output
    size = made.shape[channel_axis(unit, made.rank)]
    if unit.cls in EINSUM:
        has_axis = _einsum_letters(unit)[2][-1] != "." and size is not None
        lacks_bias = unit.config["bias_axes"] is None and has_axis
    else:
        lacks_bias = not unit.config["use_bias"]
    if lacks_bias:
        _add_bias(unit, np.zeros(size))


def _add_bias(unit, bias):
    old = unit.weight("bias")
    if old is None:
        if unit.cls in EINSUM:
            made = _einsum_letters(unit)[2]
            unit.configure(bias_axes=made[-1])
        else:
            unit.configure(use_bias=True)
        old = 0.0
    unit.arrays["bias"] = old + bias


def _einsum_letters(unit):
    return einsum_letters(unit.config["equation"])


def diagonal_axis(unit, rank):
    """The channel axis, if it is an EinsumDense that maps each channel on its own."""
    if unit.cls not in EINSUM:
        return None
    read, kernel, made = _einsum_letters(unit)
    bias = unit.config["bias_axes"]
    if len(kernel) != 1 or read != made or kernel not in read:
        return None
    if bias not in (None, kernel) or not has_linear_activation(unit):
        return None
    place = read.index(kernel)
    return place if "." not in read[:place] else place - len(read) + rank
