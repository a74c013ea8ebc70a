"""Layers with a kernel: which weights those are, and where a unit lies in them."""

import collections
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
from keras import layers

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import matching_layers
from keras_norms._types import Shape
from keras_norms.ops.shapes import is_one_of

CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
DEPTHWISE = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
SEPARABLE = (layers.SeparableConv1D, layers.SeparableConv2D)
_DENSE = (layers.Dense, layers.EinsumDense)
WITH_A_KERNEL = _DENSE + CONVOLUTIONS + TRANSPOSED + DEPTHWISE + SEPARABLE


class Kernel(NamedTuple):
    """A kernel of a layer: its attribute, and the axes that one unit sums over."""

    name: str
    fan_in: tuple[int, ...]

    def unit_shape(self, shape: Shape) -> Shape:
        """The sizes of the other axes, with one element for each unit."""
        kept = (i for i in range(len(shape)) if not is_one_of(i, self.fan_in))
        return tuple(shape[i] for i in kept)


def overrides(layer: keras.layers.Layer | type, *names: str) -> bool:
    """Whether an attribute of a layer, or of a class, is not that of Keras' own class.

    This package computes things in place of a Keras layer only if the class does not
    override them.
    """
    cls = layer if isinstance(layer, type) else type(layer)
    own = next(c for c in cls.__mro__ if c.__module__.startswith("keras."))
    return any(
        inspect.getattr_static(layer, name, None)
        is not inspect.getattr_static(own, name, None)
        for name in names
    )


def overrides_call(layer: keras.layers.Layer | type) -> bool:
    """Whether a derived linear layer or BatchNormalization computes something else."""
    return overrides(layer, "__call__", "call", "convolution_op", "_moments")


def has_kernels(layer: keras.layers.Layer) -> bool:
    """Whether a layer has kernels that may be normalised."""
    return isinstance(layer, WITH_A_KERNEL) and obstacle(layer) is None


def check_layer(layer: Any) -> None:
    """Raise `ValueError` unless `layer` has kernels that may be normalised."""
    if not isinstance(layer, WITH_A_KERNEL):
        advice = (
            "a Dense, EinsumDense, Conv, DepthwiseConv or SeparableConv layer of Keras "
            "or a derived class, not a wrapper or model around one"
        )
    elif found := obstacle(layer):
        advice = f"a layer with a plain kernel: this one {found}"
    else:
        return
    raise arguments.wrong("layer", advice, layer)


def obstacle(layer: keras.layers.Layer) -> str | None:
    """What is true of a layer with kernels that may not be normalised."""
    if getattr(layer, "lora_rank", None):
        return (
            f"has LoRA enabled (lora_rank={layer.lora_rank}): its kernel is a sum of "
            "weights. Leave it unwrapped, or wrap a new layer with the merged kernel"
        )
    if layer.quantization_mode:
        return (
            f"is quantized (mode '{layer.quantization_mode}'). Wrap a layer that is "
            "not, and quantize `keras_norms.fold(model)`"
        )
    if overrides(type(layer), "kernel", "depthwise_kernel", "pointwise_kernel"):
        return (
            "is of a class that overrides the kernel. Change the kernel in `call` "
            "instead, or leave the layer unwrapped"
        )
    return None


def kernels_of(layer: keras.layers.Layer) -> tuple[Kernel, ...]:
    """The kernels of a built layer, in the order they apply."""
    if isinstance(layer, SEPARABLE):
        rank = len(layer.depthwise_kernel.shape)
        return (
            Kernel("depthwise_kernel", tuple(range(rank - 2))),
            Kernel("pointwise_kernel", tuple(range(rank - 1))),
        )
    rank = len(layer.kernel.shape)
    if isinstance(layer, layers.EinsumDense):
        _, weight, output = einsum_letters(layer.equation)
        fan_in = tuple(i for i, axis in enumerate(weight) if axis not in output)
    elif isinstance(layer, DEPTHWISE):
        fan_in = tuple(range(rank - 2))
    elif isinstance(layer, TRANSPOSED):
        fan_in = (*range(rank - 2), rank - 1)
    else:
        fan_in = tuple(range(rank - 1))
    return (Kernel("kernel", fan_in),)


def unit_axes(layer: keras.layers.Layer, rank: int) -> tuple[int, ...]:
    """The axes of an output of that rank that count units, in the kernel's order."""
    if isinstance(layer, layers.EinsumDense):
        _, weight, output = einsum_letters(layer.equation)
        output = output.replace("...", "." * (rank - len(output.replace(".", ""))))
        return tuple(output.index(axis) for axis in weight if axis in output)
    return (1 if is_channels_first(layer) else rank - 1,)


def is_channels_first(layer: keras.layers.Layer) -> bool:
    """Whether axis 1 of the input is the channel axis, and not the last one."""
    return getattr(layer, "data_format", None) == "channels_first"


def kernels_owned_by(layer: keras.layers.Layer) -> list[keras.Variable]:
    """List the trainable weights of rank 2 or more that are a layer's own."""
    own = {id(v) for v in _keras.own_weights(layer) if len(v.shape) > 1}
    return [v for v in layer.trainable_variables if id(v) in own]


def kernels_by_name(
    model: keras.Model, layers: Sequence[keras.layers.Layer | str] | None = None
) -> dict[str, keras.Variable]:
    """Return the kernels of a built model by the name of their layer, or their path.

    Of all layers, or of `layers` (layers or names) and those inside them.
    """
    owners = {
        id(kernel): layer
        for layer in _keras.layers_of(model, include_self=False)
        for kernel in kernels_owned_by(layer)
    }
    holders = [model]
    if layers is not None:
        # A wrapper and the layer inside may share a name.
        holders = [each for one in layers for each in matching_layers(model, one)]
    chosen: dict[int, keras.Variable] = {}
    for holder in holders:
        found = {id(v): v for v in holder.trainable_variables if id(v) in owners}
        if not found:
            raise ValueError(
                "Argument `layers` must name layers with a trainable kernel. "
                f"Received: layer '{holder.name}'"
            )
        chosen |= found
    names = [owners[key].name for key in chosen]
    paths = [variable.path for variable in chosen.values()]
    return dict(zip(unique_names(names, paths), chosen.values()))


def unique_names(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return names, paths where names are equal, and counted paths where these are."""
    found, seen = [], collections.Counter[str]()
    for name, path in zip(names, paths):
        name = name if names.count(name) == 1 else path
        seen[name] += 1  # Models in a model may have layers of the same path.
        found.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return found


def einsum_letters(equation: str) -> tuple[str, str, str]:
    """The letters of input, kernel and output of an EinsumDense layer."""
    operands, output = equation.replace(" ", "").split("->")
    read, kernel = operands.split(",")
    return read, kernel, output
