"""Where CBN layers stand: before the layers with a kernel, but not on the raw input."""

from typing import Any, NamedTuple

from keras import layers, tree

from keras_norms.layers.cbn import CBN
from keras_norms.surgery import fuse, linear

# What may stand between the input of a model and its first linear layer.
_PREPROCESSING = (
    fuse.ZERO_PADDING
    + fuse.NOISE
    + (
        layers.InputLayer,
        layers.Cropping1D,
        layers.Cropping2D,
        layers.Cropping3D,
        layers.UpSampling1D,
        layers.UpSampling2D,
        layers.UpSampling3D,
        layers.Reshape,
        layers.Flatten,
        layers.Permute,
        layers.RepeatVector,
        layers.Concatenate,
        layers.Masking,
    )
)
_PREPROCESSING_OPERATIONS = {
    "Absolute",
    "Add",
    "Cast",
    "Concatenate",
    "Divide",
    "ExpandDims",
    "Flip",
    "GetItem",
    "Moveaxis",
    "Multiply",
    "Negative",
    "Pad",
    "Reshape",
    "Resize",
    "Squeeze",
    "Stack",
    "Subtract",
    "Swapaxes",
    "Transpose",
    "TrueDivide",
}


class Insertion(NamedTuple):
    """One CBN: the tensors it is called on, and the calls that read each of them."""

    graph: Any
    first: Any
    axis: int
    values: list
    readers: list


def insertions(graph, graphs, eligible):
    """Say where CBN layers go.

    Args:
        graph: The graph of the whole model.
        graphs: Those of its graphs that are changed.
        eligible: The linear units that get a CBN.

    Returns:
        A list of `Insertion`, in the order of the calls.
    """
    raw = {}
    _mark_raw(graph, [True] * len(tree.flatten(graph.inputs)), raw)
    eligible = set(eligible)
    return [
        insertion for one in graphs for insertion in _insertions_in(one, eligible, raw)
    ]


def _mark_raw(graph, flags, raw):
    """Mark tensors that are the raw input but for preprocessing, in all calls."""
    inputs = {id(v): flag for v, flag in zip(tree.flatten(graph.inputs), flags)}
    for node in graph.nodes:
        arguments = [raw[id(v)] for v in node.inputs]
        if node.unit.graph is not None:
            results = _mark_raw(node.unit.graph, arguments, raw)
        else:
            clean = all(arguments) and _is_preprocessing(node.unit)
            results = [inputs.get(id(v), clean) for v in node.outputs]
        for value, result in zip(node.outputs, results):
            raw[id(value)] = raw.get(id(value), True) and result
    return [raw[id(v)] for v in tree.flatten(graph.outputs)]


def _is_preprocessing(unit):
    if unit.layer is None:
        return unit.cls.__name__ in _PREPROCESSING_OPERATIONS
    if unit.cls is layers.Activation:
        return linear.has_linear_activation(unit)
    # Rescaling, Normalization, Resizing, random augmentation, encodings.
    return (
        issubclass(unit.cls, _PREPROCESSING)
        or ".layers.preprocessing." in unit.cls.__module__
    )


def _insertions_in(graph, eligible, raw):
    places = {}  # (tensor, axis) -> the calls of linear layers it leads to.
    for node in graph.nodes:
        if node.unit not in eligible or node.input is None or raw[id(node.input)]:
            continue
        value, reader = _before_padding(node.input, eligible)
        if value.node is not None and value.node.unit.cls is CBN:
            continue
        axis = linear.channel_axis(node.unit, node.input.rank)
        place = places.setdefault((id(value), axis), (value, axis, [], []))
        if reader is None:
            reader = node
        if reader not in place[2]:
            place[2].append(reader)
        place[3].append(node.unit)
    # A shared layer has one CBN for all its calls, and so has what they share.
    merged = []
    for value, axis, readers, units in places.values():
        group = [set(units), axis, [value], [readers], units[0]]
        for other in [m for m in merged if m[0] & group[0] and m[1] == axis]:
            merged.remove(other)
            group = [
                other[0] | group[0],
                axis,
                other[2] + group[2],
                other[3] + group[3],
                other[4],
            ]
        merged.append(group)
    return [
        Insertion(graph, first, axis, values, readers)
        for _, axis, values, readers, first in merged
    ]


def _before_padding(value, eligible):
    """The tensor before zero padding and Dropout, and the first of these calls."""
    reader = None
    while value.node is not None and value.node.unit.cls in (
        fuse.ZERO_PADDING + fuse.NOISE
    ):
        if value.node.input is None or not _only_linear(value, eligible):
            break
        reader = value.node
        value = reader.input
    return value, reader


def _only_linear(value, eligible):
    return not value.is_output and all(
        node.unit in eligible
        or (
            node.unit.cls in fuse.ZERO_PADDING + fuse.NOISE
            and node.output is not None
            and _only_linear(node.output, eligible)
        )
        for node in value.readers
    )
