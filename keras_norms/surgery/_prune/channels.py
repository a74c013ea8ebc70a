"""Which channels of a graph stand and fall together.

A channel that goes has to go from every tensor it is in: from both sides of a sum,
from the normalisation after a convolution, from every position of a flattened image.
Each channel of each tensor has a number here, and numbers that must go together have
the same root (union-find).
"""

from typing import NamedTuple

import keras
import numpy as np
from keras import layers, tree

from keras_norms import activations
from keras_norms.surgery._graph import affine as affine_lib
from keras_norms.surgery._graph import linear, moves

_MERGES = (
    *(layers.Add, layers.Subtract, layers.Multiply, layers.Average),
    *(layers.Maximum, layers.Minimum),
)
# Functions of `keras.ops`, such as what `x + y` makes.
_MERGE_OPERATIONS = {
    *("Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Maximum", "Minimum"),
}
_UNARY_OPERATIONS = {
    *("Absolute", "Negative", "Square", "Sqrt", "Exp", "Sigmoid", "Silu", "Tanh"),
    *("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Gelu", "Softplus", "Softsign"),
    *("HardSigmoid", "HardSilu", "HardTanh", "Mish", "Clip"),
}
_ACTIVATIONS = tuple(
    getattr(keras.activations, name)
    for name in (
        *("celu", "elu", "exponential", "gelu", "hard_shrink", "hard_sigmoid"),
        *("hard_silu", "hard_tanh", "leaky_relu", "linear", "log_sigmoid", "mish"),
        *("relu", "relu6", "selu", "sigmoid", "silu", "soft_shrink", "softplus"),
        *("softsign", "squareplus", "tanh", "tanh_shrink", "threshold"),
    )
    if hasattr(keras.activations, name)
) + (activations.relu, activations.relu6)
_ACTIVATION_LAYERS = (layers.ReLU, layers.LeakyReLU, layers.ELU)
_IN_PLACE = (
    *(*moves.ZERO_PADDING, *moves.CROPPING, *moves.UPSAMPLING),
    *(*moves.MAX, *moves.AVERAGE),
)
_GLOBAL = moves.GLOBAL_MAX + moves.GLOBAL_AVERAGE
_READERS = linear.CONVOLUTIONS + linear.TRANSPOSED + linear.SEPARABLE + linear.DENSE


class Labels(NamedTuple):
    """The axis of the channels of a tensor, and the number of each of them."""

    axis: int
    ids: np.ndarray


class Channels:
    """The channels of a graph, nested graphs included.

    Attributes:
        readers: Dictionary from layers that mix channels, by their kernels, to the
            `Labels` of what they read.
        makers: From these to the `Labels` of what they make.
        passers: From layers that have weights or a shape for each channel, and keep
            channels apart, to the `Labels` of what they read and of what they make.
        names: From makers to the name of the layer, with that of its model if nested.
    """

    def __init__(self, graph):
        self.readers, self.makers, self.passers, self.names = {}, {}, {}, {}
        self._parents, self._fixed = [], set()
        self._labels, self._top = {}, graph
        inputs = [self._new(v, v.rank - 1) for v in tree.flatten(graph.inputs)]
        for labels in inputs + self._visit(graph, inputs):
            self._fix(labels)
        self.makers = {unit: made for unit, made in self.makers.items() if made}
        self._roots = np.array([*map(self._find, range(len(self._parents)))], dtype=int)
        self._root_is_fixed = np.zeros(len(self._roots), bool)
        self._root_is_fixed[self._roots[sorted(self._fixed)]] = True

    def roots(self, ids):
        """What stands for each channel and all that go with it."""
        return self._roots[ids]

    def is_fixed(self, roots):
        """Whether these have to stay."""
        return self._root_is_fixed[roots]

    # Numbers

    def _new(self, value, axis):
        size = value.shape[axis] if value.rank > 1 else None
        if size is None:
            return None
        first = len(self._parents)
        self._parents.extend(range(first, first + size))
        return Labels(axis, np.arange(first, first + size))

    def _find(self, i):
        while self._parents[i] != i:
            self._parents[i] = self._parents[self._parents[i]]
            i = self._parents[i]
        return i

    def _join(self, labels, other):
        """Let channels at the same place go together."""
        fit = labels is not None and other is not None and labels.axis == other.axis
        if not fit or len(labels.ids) != len(other.ids):
            self._fix(labels)
            self._fix(other)
            return
        for i, j in zip(labels.ids, other.ids, strict=True):
            i, j = self._find(i), self._find(j)
            self._parents[max(i, j)] = min(i, j)

    def _fix(self, labels):
        if labels is not None:
            self._fixed.update(labels.ids.tolist())

    def _set(self, value, labels):
        known = self._labels.setdefault(id(value), labels)
        if known is not labels:  # A nested model is called once more.
            self._join(known, labels)

    # Calls

    def _visit(self, graph, arguments):
        """Go through all calls. Returns the labels of the outputs."""
        for value, labels in zip(tree.flatten(graph.inputs), arguments):
            self._set(value, labels)
        for node in graph.nodes:
            if issubclass(node.unit.cls, layers.InputLayer):
                labels = self._labels.get(id(node.output))
                if graph is not self._top and labels is not None:
                    self.passers[node.unit] = labels, labels
                continue
            read = [self._labels.get(id(v)) for v in node.inputs]
            if node.unit.graph is not None:
                made = self._visit(node.unit.graph, read)
            elif (labels := self._call(node, read)) is not None:
                made = [labels]
            else:
                # Nothing is known of it, so all that it reads and makes has to stay.
                made = [self._new(v, v.rank - 1) for v in node.outputs]
                for labels in read + made:
                    self._fix(labels)
            for value, labels in zip(node.outputs, made):
                self._set(value, labels)
        return [self._labels.get(id(v)) for v in tree.flatten(graph.outputs)]

    def _call(self, node, read):
        """The labels of what a call makes, or `None` where channels may be mixed."""
        unit = node.unit
        operation = unit.cls.__name__ if unit.layer is None else None
        if node.output is None or node.always_trains:
            return None
        if unit.cls in _READERS and linear.is_foldable(unit):
            return self._mixing(node, *read) if len(read) == 1 else None
        if any(labels is None for labels in read) or not read:
            return None
        if unit.cls in _MERGES or operation in _MERGE_OPERATIONS:
            return self._merge(node, read)
        if unit.cls is layers.Concatenate:
            return self._concatenate(node, read)
        if operation in _UNARY_OPERATIONS and len(read) == 1:
            own = [v for name, v in vars(unit.source).items() if name[0] != "_"]
            return None if _has_arrays(node) or any(map(np.ndim, own)) else read[0]
        if unit.layer is None or node.options or len(read) > 1:
            return None
        return self._one_by_one(node, read[0])

    def _mixing(self, node, labels):
        """A layer that makes channels of its own out of all that it reads."""
        unit, value = node.unit, node.output
        if node.options or unit.config.get("groups", 1) != 1:
            return None
        axis = linear.channel_axis(unit, node.input.rank)
        if labels is None or labels.axis != axis:
            self._fix(labels)
            labels = self._new(node.input, axis)
            self._fix(labels)  # What it reads in its other calls has to stay too.
        if unit in self.readers:
            self._join(self.readers[unit], labels)
        else:
            self.readers[unit] = labels
        if unit not in self.makers:
            self.makers[unit] = self._new(value, linear.channel_axis(unit, value.rank))
            nested = node.graph is not self._top
            prefix = f"{node.graph.model.name}/" if nested else ""
            self.names[unit] = prefix + unit.name
            if unit.layer.activation not in _ACTIVATIONS:
                self._fix(self.makers[unit])
        return self.makers[unit]

    def _merge(self, node, read):
        if _has_arrays(node):
            return None
        value, first = node.output, read[0]
        fits = all(
            v.rank == value.rank
            and v.shape[first.axis] == value.shape[first.axis]
            and labels.axis == first.axis
            for v, labels in zip(node.inputs, read)
        )
        return self._joined(read) if fits else None

    def _concatenate(self, node, read):
        if any(labels.axis != read[0].axis for labels in read):
            return None
        axis = node.unit.config["axis"] % node.output.rank
        if axis == read[0].axis:
            return Labels(axis, np.concatenate([labels.ids for labels in read]))
        return self._joined(read)

    def _joined(self, read):
        for labels in read[1:]:
            self._join(read[0], labels)
        return read[0]

    def _one_by_one(self, node, labels):
        """A layer of one input that treats each channel on its own."""
        unit, axis, rank = node.unit, labels.axis, node.input.rank
        cls, layer = unit.cls, unit.layer
        if cls in moves.NOISE + _ACTIVATION_LAYERS:
            return labels
        if cls is layers.Activation:
            return labels if layer.activation in _ACTIVATIONS else None
        if cls is layers.Rescaling:
            is_one_number = np.ndim(layer.scale) == np.ndim(layer.offset) == 0
            return labels if is_one_number else None
        is_channel_axis = axis == linear.channel_axis(unit, rank)
        if cls in _IN_PLACE + _GLOBAL + linear.DEPTHWISE and not is_channel_axis:
            return None
        if cls in _IN_PLACE:
            return labels
        if cls in _GLOBAL:
            return Labels(axis if layer.keepdims else 1, labels.ids)
        if cls in linear.DEPTHWISE and linear.is_foldable(unit):
            if layer.activation not in _ACTIVATIONS:
                return None
            ids = np.repeat(labels.ids, layer.depth_multiplier)
            return self._passed(unit, labels, Labels(axis, ids))
        is_map = affine_lib.is_norm(unit) or cls in linear.EINSUM
        if cls is layers.PReLU or (is_map and affine_lib.axis_of(unit, rank) == axis):
            return self._passed(unit, labels, labels)
        if cls in (layers.Flatten, layers.Reshape, layers.Permute):
            return self._reshaped(node, labels)
        return None

    def _passed(self, unit, read, made):
        pair = read, made
        for known, labels in zip(self.passers.setdefault(unit, pair), pair):
            if known is not labels:  # The layer is called once more.
                self._join(known, labels)
        return made

    def _reshaped(self, node, labels):
        """Channels after a change of shape, if they still have an axis of their own."""
        unit, shape = node.unit, node.input.shape[1:]
        if None in shape or None in node.output.shape[1:]:
            return None
        own = [-1 if i == labels.axis - 1 else 1 for i in range(len(shape))]
        ids = np.broadcast_to(labels.ids.reshape(own), shape)
        if unit.cls is layers.Permute:
            ids = np.transpose(ids, np.subtract(unit.config["dims"], 1))
        elif unit.config.get("data_format") == "channels_first" and ids.ndim > 1:
            ids = np.moveaxis(ids, 0, -1)
        ids = ids.reshape(node.output.shape[1:])
        for axis in range(ids.ndim):
            along = np.moveaxis(ids, axis, -1).reshape(-1, ids.shape[axis])
            if np.all(along == along[0]):
                made = Labels(axis + 1, along[0])
                is_sized = unit.cls is layers.Reshape
                return self._passed(unit, labels, made) if is_sized else made
        return None


def _has_arrays(node):
    """Whether a call has arguments that may differ between channels."""
    leaves = tree.flatten((node.args, node.options))
    return any(np.ndim(v) for v in leaves if not any(v is i for i in node.inputs))
