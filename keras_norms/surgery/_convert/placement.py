"""Where CBN layers stand: before the layers with a kernel, but not on the raw input."""

from typing import NamedTuple

from keras import layers, tree

from keras_norms.layers.cbn import CBN
from keras_norms.surgery._graph import linear, moves
from keras_norms.surgery._graph.graph import Graph
from keras_norms.surgery._graph.units import Node, Unit, Value

_PADDING_OR_NOISE = moves.ZERO_PADDING + moves.NOISE
# What may stand between the input of a model and its first linear layer.
_PREPROCESSING = (
    *(*_PADDING_OR_NOISE, *moves.CROPPING, *moves.UPSAMPLING, layers.InputLayer),
    *(layers.Reshape, layers.Flatten, layers.Permute, layers.RepeatVector),
    *(layers.Concatenate, layers.Masking),
)
_PREPROCESSING_OPERATIONS = {
    *("Absolute", "Add", "Divide", "Multiply", "Negative", "Subtract", "TrueDivide"),
    *("Cast", "Concatenate", "ExpandDims", "Flip", "GetItem", "Moveaxis", "Pad"),
    *("Reshape", "Resize", "Squeeze", "Stack", "Swapaxes", "Transpose"),
}


class Insertion(NamedTuple):
    """One CBN: where it is called, and by what.

    Attributes:
        graph: The graph of all its calls.
        units: The linear layers that read it; it is named after the first.
        axis: That of the channels.
        values: The tensors that it is called on.
        readers: For each of these, the calls that read the result.
    """

    graph: Graph
    units: list[Unit]
    axis: int
    values: list[Value]
    readers: list[list[Node]]


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
    places = {}  # By the tensor, and the axis of its channels.
    for node in graph.nodes:
        if node.unit not in eligible or node.input is None or raw[id(node.input)]:
            continue
        value, reader = _before_padding(node.input, eligible)
        if value.node is not None and value.node.unit.cls is CBN:
            continue
        axis = linear.channel_axis(node.unit, node.input.rank)
        place = places.setdefault(
            (id(value), axis), Insertion(graph, [], axis, [value], [[]])
        )
        place.units.append(node.unit)
        reader = reader or node
        if reader not in place.readers[0]:
            place.readers[0].append(reader)
    # A shared layer has one CBN for all its calls, and so has what they share.
    merged = []
    for place in places.values():
        for other in list(merged):
            if other.axis == place.axis and set(other.units) & set(place.units):
                merged.remove(other)
                place = Insertion(
                    graph,
                    other.units + place.units,
                    place.axis,
                    other.values + place.values,
                    other.readers + place.readers,
                )
        merged.append(place)
    return merged


def _before_padding(value, eligible):
    """The tensor before zero padding and Dropout, and the first of these calls."""
    reader = None
    while value.node is not None and value.node.unit.cls in _PADDING_OR_NOISE:
        if value.node.input is None or not _only_linear(value, eligible):
            break
        reader = value.node
        value = reader.input
    return value, reader


def _only_linear(value, eligible):
    """Whether all that reads a tensor, past padding and noise, is eligible."""
    return not value.is_output and all(
        node.unit in eligible
        or (
            node.unit.cls in _PADDING_OR_NOISE
            and node.output is not None
            and _only_linear(node.output, eligible)
        )
        for node in value.readers
    )
