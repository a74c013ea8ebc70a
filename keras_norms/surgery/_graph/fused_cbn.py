"""CBN and the linear layers after it as one FusedCBN layer, and back."""

import keras
import numpy as np

from keras_norms.layers.cbn import CBN
from keras_norms.layers.fused_cbn import FusedCBN, can_be_fused
from keras_norms.layers.kernels import CONVOLUTIONS, DEPTHWISE
from keras_norms.ops.linear_of_affine import same_padding
from keras_norms.surgery._graph import moves
from keras_norms.surgery._graph.graph import Graph, Node, Value
from keras_norms.surgery._graph.unit import Unit


class _FusedUnit(Unit):
    """A future FusedCBN layer, with the units of the layers in it."""

    def __init__(self, norm, linears):
        super().__init__(cls=FusedCBN, config={"name": norm.name})
        self.norm, self.linears = norm, linears

    def _make(self):
        layers = [part.make() for part in self.linears]
        layers = layers if len(layers) > 1 else layers[0]
        return FusedCBN(layers, self.norm.make(), name=self.name)

    def give_weights(self):
        for part in (self.norm, *self.linears):
            part.give_weights()


def fuse_cbn(model):
    """Make a copy in which each CBN is fused with all layers that read it.

    Convolutions take over the zero padding before them where `padding="same"` pads as
    much. A CBN stays if a layer reads it that `FusedCBN` does not take, or if it or one
    of its readers is shared.
    """
    graph = Graph(model)
    for unit in graph.all_units():
        if unit.cls is not CBN or not _is_called_once(unit):
            continue
        (node,) = unit.nodes
        paddings = [each for each in node.output.readers if _is_same_padding(each)]
        readers = [each for each in node.output.readers if each not in paddings]
        readers += [reader for each in paddings for reader in each.output.readers]
        if _fits(node, readers):
            for each in paddings:
                for reader in each.output.readers:
                    reader.unit.configure(padding="same")
                graph.remove(each)
            _fuse(node)
    return graph.make()


def _is_called_once(unit):
    return len(unit.nodes) == 1 and not unit.nodes[0].options


def _is_same_padding(node):
    """Whether all that reads a zero padding can pad as much by itself."""
    unit = node.unit
    if unit.cls not in moves.ZERO_PADDING or not _is_called_once(unit):
        return False
    sizes, axis = list(node.input.shape[1:]), _channel_axis(unit)
    del sizes[axis]

    def pads_as_much(reader):
        layer = reader.unit.layer
        if (
            not isinstance(layer, CONVOLUTIONS + DEPTHWISE)
            or layer.padding != "valid"
            or _channel_axis(reader.unit) != axis
        ):
            return False
        steps = zip(sizes, layer.kernel_size, layer.strides, layer.dilation_rate)
        same = [same_padding(*each) for each in steps]
        return np.array_equal(same, np.reshape(unit.layer.padding, (-1, 2)))

    readers = node.output.readers
    is_inside = readers and not node.output.is_output
    return None not in sizes and is_inside and all(map(pads_as_much, readers))


def _channel_axis(unit):
    """Among the axes of a sample."""
    return 0 if unit.layer.data_format == "channels_first" else -1


def _fits(node, readers):
    return (
        not node.output.is_output
        and readers
        and all(
            _is_called_once(reader.unit)
            and reader.unit.layer is not None
            and can_be_fused(reader.unit.layer, node.unit.layer)
            for reader in readers
        )
    )


def _fuse(node):
    graph, readers = node.graph, list(node.output.readers)
    unit = _FusedUnit(node.unit, [reader.unit for reader in readers])
    call = Node(unit, (node.input,), {}, graph)
    call.outputs = [reader.output for reader in readers]
    for value in call.outputs:
        value.node = call
    graph.nodes[graph.nodes.index(node)] = call
    node.input.readers.remove(node)
    for reader in readers:
        graph.nodes.remove(reader)
    for part in (node, *readers):
        part.unit.nodes.clear()


def split_fused_cbn(graph, skipped=()):
    """Replace every FusedCBN of a graph by a CBN and its linear layers.

    Not those that are shared, or whose ids are in `skipped`.
    """
    for unit in graph.all_units():
        if unit.cls is FusedCBN and len(unit.nodes) == 1 and id(unit) not in skipped:
            _split(*unit.nodes)


def _split(node):
    graph, layer, inputs = node.graph, node.unit.layer, node.inputs
    for value in inputs:  # x, and perhaps a mask
        value.readers.remove(node)
    norm = Node(Unit(layer.norm), node.args, dict(node.kwargs), graph)
    value = Value(inputs[0].shape, norm)
    calls = [Node(Unit(linear), (value,), {}, graph) for linear in layer.layers]
    for call, output in zip(calls, node.outputs):
        call.outputs, output.node = [output], call
        for reader in list(output.readers):
            is_identity = reader.unit.cls is keras.layers.Identity
            if is_identity and reader.unit.name == call.unit.name:
                graph.remove(reader)  # The output has that name without it.
    place = graph.nodes.index(node)
    graph.nodes[place : place + 1] = [norm, *calls]
