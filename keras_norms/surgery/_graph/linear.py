"""Layers with a kernel, and how an affine map of each channel goes into it.

Everything here works on a `Unit`: its weights are float64 arrays, its configuration is
changed only where a bias is added. `a` and `b` are vectors over the channels.
"""

import keras
import numpy as np
from keras import layers

from keras_norms.layers.channel_affine import ChannelAffine
from keras_norms.layers.cwn import CWN
from keras_norms.layers.wn import WN
from keras_norms.layers.ws import WS

CONV = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
DEPTHWISE = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
SEPARABLE = (layers.SeparableConv1D, layers.SeparableConv2D)
DENSE = (layers.Dense,)
EINSUM = (layers.EinsumDense, ChannelAffine)
PLAIN = CONV + TRANSPOSED + DEPTHWISE + SEPARABLE + DENSE + EINSUM
WRAPPERS = (WS, CWN, WN)


def is_linear(unit):
    """Whether it is a linear layer, which a CBN stands before.

    A map of each channel on its own (`diagonal_axis`) is none: it mixes nothing.
    """
    if diagonal_axis(unit, 2) is not None:
        return False
    return issubclass(unit.cls, PLAIN + WRAPPERS)


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
    """That of the layer, or of the one inside of a wrapper; `None` if it has none."""
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
        return not _is_dense_like(unit)
    if all(size == 1 for size in np.ravel(unit.config["kernel_size"])):
        # A transposed convolution with a stride leaves gaps even so.
        strides = np.ravel(unit.config["strides"])
        return unit.cls in TRANSPOSED and any(stride != 1 for stride in strides)
    # A transposed kernel overlaps its copies, less of them at the border.
    return unit.cls in TRANSPOSED or unit.config["padding"] != "valid"


def is_unconstrained(unit):
    """Whether no constraint would change the kernel or bias in the next step."""
    return not any(
        unit.config.get(f"{name}_constraint")
        for name in ("kernel", "depthwise", "pointwise", "bias")
    )


def plain_dtype(unit):
    """Its dtype policy as a norm can have it: without quantization."""
    policy = keras.dtype_policies.get(unit.config["dtype"])
    if policy.quantization_mode is None:
        return unit.config["dtype"]
    compute, variable = policy.compute_dtype, policy.variable_dtype
    return compute if compute == variable else f"mixed_{compute}"


def absorb_input(unit, a, b):
    """Make `layer(x)` what `layer(a * x + b)` was. Needs b = 0 if it sees a border."""
    bias = None
    if unit.cls in SEPARABLE:
        kernel = unit.weight("depthwise_kernel")
        point = unit.weight("pointwise_kernel")
        mapped = np.sum(kernel * b[:, None], axis=tuple(range(kernel.ndim - 2)))
        point = point.reshape(point.shape[-2:])
        bias = mapped.reshape(-1) @ point
        unit.arrays["depthwise_kernel"] = kernel * a[:, None]
    else:
        kernel = unit.weight("kernel")
        positions = tuple(range(kernel.ndim - 2))
        if unit.cls in DEPTHWISE:
            bias = np.sum(kernel * b[:, None], axis=positions).reshape(-1)
            kernel = kernel * a[:, None]
        elif unit.cls in TRANSPOSED:
            bias = np.sum(kernel * b, axis=(*positions, -1))
            kernel = kernel * a
        elif unit.cls in EINSUM:
            axis = _einsum_letters(unit)[1].index(_einsum_letters(unit)[0][-1])
            shape = [-1 if i == axis else 1 for i in range(kernel.ndim)]
            if _is_dense_like(unit):
                bias = np.sum(kernel * b.reshape(shape), axis=axis)
            kernel = kernel * a.reshape(shape)
        else:
            # With groups, each output channel reads a part of the input channels.
            groups = unit.config.get("groups", 1)
            fan_in, filters = kernel.shape[-2:]
            a, b = (
                np.repeat(v.reshape(groups, fan_in).T, filters // groups, axis=1)
                for v in (a, b)
            )
            bias = np.sum(kernel * b, axis=(*positions, -2))
            kernel = kernel * a
        unit.arrays["kernel"] = kernel
    if np.any(b):
        _add_bias(unit, bias)


def absorb_output(unit, a, b):
    """Make `layer(x)` what `a * layer(x) + b` was. Needs a linear activation."""
    name = "pointwise_kernel" if unit.cls in SEPARABLE else "kernel"
    kernel = unit.weight(name)
    if unit.cls in DEPTHWISE:
        kernel = kernel * a.reshape(kernel.shape[-2:])
    elif unit.cls in TRANSPOSED:
        kernel = kernel * a[:, None]
    elif unit.cls in EINSUM:
        letters = _einsum_letters(unit)
        axis = letters[1].index(letters[2][-1])
        kernel = kernel * a.reshape(
            [-1 if i == axis else 1 for i in range(kernel.ndim)]
        )
    else:
        kernel = kernel * a
    unit.arrays[name] = kernel
    bias = unit.weight("bias")
    if bias is not None:
        unit.arrays["bias"] = bias * a
    if np.any(b):
        _add_bias(unit, b)


def can_absorb_input(unit, b):
    """Whether `absorb_input` is exact."""
    if unit.cls in EINSUM:
        read, kernel, _ = _einsum_letters(unit)
        if read[-1] not in kernel or read[-1] == ".":
            return False
        if np.any(b) and not _einsum_bias_fits(unit):
            return False
    return not np.any(b) or not sees_border(unit)


def can_absorb_output(unit, b):
    """Whether `absorb_output` is exact."""
    if not has_linear_activation(unit):
        return False
    if unit.cls in EINSUM:
        read, kernel, made = _einsum_letters(unit)
        if made[-1] not in kernel or made[-1] == ".":
            return False
        if np.any(b) and not _einsum_bias_fits(unit):
            return False
        bias = unit.config["bias_axes"]
        return bias is None or made[-1] in bias
    return True


def add_missing_bias(unit):
    """Give it a bias of zeros, where it has none."""
    if not is_foldable(unit):
        return
    if unit.cls not in EINSUM:
        if not unit.config["use_bias"]:
            _add_bias(unit, np.zeros(_units(unit)))
    elif unit.config["bias_axes"] is None and _einsum_bias_fits(unit):
        size = unit.nodes[0].output.shape[-1]
        if _einsum_letters(unit)[2][-1] != "." and size is not None:
            _add_bias(unit, np.zeros(size))


def _units(unit):
    if unit.cls in DEPTHWISE:
        return int(np.prod(unit.weight("kernel").shape[-2:]))
    return unit.config["units" if unit.cls in DENSE else "filters"]


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
    """The letters of input, kernel and output."""
    read, made = unit.config["equation"].replace(" ", "").split("->")
    read, kernel = read.split(",")
    return read, kernel, made


def _is_dense_like(unit):
    """Whether it is a Dense layer: the last axis is summed over, and one takes it."""
    read, kernel, made = _einsum_letters(unit)
    return (
        len(kernel) == 2
        and read[:-1] == made[:-1]
        and set(kernel) == {read[-1], made[-1]}
        and read[-1] not in made
    )


def _einsum_bias_fits(unit):
    """Whether a bias over the last axis can be added."""
    bias, made = unit.config["bias_axes"], _einsum_letters(unit)[2]
    return bias is None or bias[-1] == made[-1]


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
