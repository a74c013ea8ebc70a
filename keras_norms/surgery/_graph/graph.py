"""A Functional or Sequential model as a graph that can be edited and built again.

`Graph(model)` reads a model without touching it. A `Value` is a tensor, a `Node` is one
call, a `Unit` is a layer with its configuration and weights. A unit has several nodes
where the layer is shared, and a graph of its own where it is a model. `Graph.build`
makes new layers, calls them and gives them their weights.
"""

from typing import Any, NamedTuple

import keras
from keras import tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms.surgery._graph import remake
from keras_norms.surgery._graph.units import Node, Unit, Value


class Call(NamedTuple):
    """One call of a layer or operation as Keras recorded it, on symbolic tensors."""

    operation: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: Any  # a list of the tensors that it makes, or any structure of them


def call_of(node):
    """What a node of Keras records."""
    given = node.arguments
    return Call(node.operation, given.args, given.kwargs, node.outputs)


def is_graph(layer):
    """Whether `layer` is a model whose calls can be read."""
    if isinstance(layer, keras.Sequential):
        return _keras.functional_in(layer) is not None
    functional = _keras.Functional
    return isinstance(layer, functional) and type(layer).call is functional.call


def calls_of(model):
    """The inputs, the calls in an order in which they can be run, and the outputs."""
    inputs, nodes, outputs = _keras.structure_of(functional_of(model))
    return inputs, list(map(call_of, nodes)), outputs


def functional_of(model):
    """The Functional model in `model`, or an error that says why there is none."""
    if is_graph(model):
        is_sequential = isinstance(model, keras.Sequential)
        return _keras.functional_in(model) if is_sequential else model
    if isinstance(model, keras.Sequential):
        raise ValueError(
            "Argument `model` must be built: give it a `keras.Input`, or call it "
            f"on data. Received: Sequential model '{model.name}' without an input "
            "shape"
        )
    wanted = "Argument `model` must be a Functional or Sequential Keras model"
    if not isinstance(model, keras.Model):
        raise ValueError(f"{wanted}. Received: model={arguments.shown(model)}")
    raise ValueError(
        f"{wanted}: the layers of a subclassed model cannot be seen from outside. "
        f"Received: model '{model.name}' of class {type(model).__name__}"
    )


def _without_automatic_masks(call):
    """The keyword arguments of a call, less masks that Keras fills in by itself."""
    kwargs = dict(call.kwargs)
    if "mask" in kwargs:
        first = call.args[0] if call.args else None
        masks = map(_keras.get_keras_mask, tree.flatten(first))
        automatic = {id(None), *map(id, masks)}
        if all(id(leaf) in automatic for leaf in tree.flatten(kwargs["mask"])):
            del kwargs["mask"]
    return {name: value for name, value in kwargs.items() if value is not None}


class Graph:
    """The calls of a model in an order in which they can be run.

    `units` has those of the layers, by `id`, shared with nested graphs. `traced` has
    inputs, calls and outputs, as of `calls_of`, of models that are read otherwise, by
    `id` too.
    """

    def __init__(self, model, units=None, traced=None):
        self.traced = traced or {}
        inputs, calls, outputs = self.traced.get(id(model)) or calls_of(model)
        self.model, self.name = model, model.name
        self.units = {} if units is None else units
        self.nodes = []
        self.has_masks = False
        values = {}
        for call in calls:
            self._read(call, values)
        self.inputs = tree.map_structure(lambda x: values[id(x)], inputs)
        self.outputs = tree.map_structure(lambda x: values[id(x)], outputs)
        for value in tree.flatten(self.outputs):
            value.is_output = True

    def _read(self, call, values):
        def value_of(leaf):
            return values[id(leaf)] if isinstance(leaf, keras.KerasTensor) else leaf

        given = call.args, _without_automatic_masks(call)
        if any(
            isinstance(x, keras.KerasTensor) and id(x) not in values
            for x in tree.flatten(given)
        ):
            return  # A call whose inputs are not part of this model.
        args, kwargs = tree.map_structure(value_of, given)
        node = Node(self._unit(call.operation), args, kwargs, self)
        for x in call.outputs:
            value = Value(x.shape, keras.backend.standardize_dtype(x.dtype), node)
            values[id(x)] = value
            node.outputs.append(value)
            self.has_masks |= _keras.get_keras_mask(x) is not None
        self.nodes.append(node)

    def _unit(self, operation):
        unit = self.units.get(id(operation))
        if unit is None:
            unit = self.units[id(operation)] = Unit(operation)
            if is_graph(operation):
                unit.graph = Graph(operation, self.units, self.traced)
        return unit

    # What is there

    def walk(self):
        """Yield every graph, nested ones first, each once."""
        seen = set()

        def visit(graph):
            if id(graph) in seen:
                return
            seen.add(id(graph))
            for node in graph.nodes:
                if node.unit.graph is not None:
                    yield from visit(node.unit.graph)
            yield graph

        return visit(self)

    def all_units(self):
        """Every unit of this graph and of those in it, each once, in order."""
        found = {}
        for graph in self.walk():
            for node in graph.nodes:
                found.setdefault(id(node.unit), node.unit)
        return list(found.values())

    def free_name(self, name):
        taken = {node.unit.name for node in self.nodes}
        candidate, count = name, 0
        while candidate in taken:
            count += 1
            candidate = f"{name}_{count}"
        return candidate

    # Changes

    def insert(self, unit, value, readers):
        """Call `unit`, which keeps shapes, on `value`; `readers` read the result."""
        node = Node(unit, (value,), {}, self)
        result = Value(value.shape, value.dtype, node)
        node.outputs.append(result)
        self.nodes.insert(self.nodes.index(value.node) + 1, node)
        for reader in readers:
            reader.replace_input(value, result)

    def remove(self, node):
        """Take a call out: who read its result reads its input."""
        value, result = node.input, node.output
        for reader in list(result.readers):
            reader.replace_input(result, value)
        if result.is_output:
            self.outputs = tree.map_structure(
                lambda v: value if v is result else v, self.outputs
            )
            result.is_output, value.is_output = False, True
        self.drop(node)

    def drop(self, node):
        """Forget a call whose result nobody reads."""
        for value in node.inputs:
            value.readers.remove(node)
        node.unit.nodes.remove(node)
        self.nodes.remove(node)

    # The new model

    def build(self):
        """Return a new model. Call `make` for one with weights and compile state."""
        inputs = {id(v) for v in tree.flatten(self.inputs)}
        for node in reversed(list(self.nodes)):
            if not any(
                v.readers or v.is_output or id(v) in inputs for v in node.outputs
            ):
                self.drop(node)
        if isinstance(self.model, keras.Sequential) and self._is_chain():
            made_layers = [node.unit.make() for node in self.nodes]
            trainable = self.model.trainable
            return keras.Sequential(made_layers, name=self.name, trainable=trainable)
        tensors = {}

        def made(structure):
            return tree.map_structure(
                lambda leaf: tensors[id(leaf)] if isinstance(leaf, Value) else leaf,
                structure,
            )

        for node in self.nodes:
            layer = node.unit.make()
            if isinstance(layer, keras.layers.InputLayer):
                results = layer.output
            else:
                args, kwargs = made((node.args, node.kwargs))
                results = layer(*args, **kwargs)
            for value, result in zip(node.outputs, tree.flatten(results)):
                tensors[id(value)] = result
        model = self._class()(*made((self.inputs, self.outputs)), name=self.name)
        if not self.model.trainable:
            model.trainable = False
        return model

    def _class(self):
        """That of the model, where it is made of inputs and outputs alone."""
        cls = type(self.model)
        is_plain = cls is _keras.Functional or isinstance(self.model, keras.Sequential)
        if is_plain or not is_graph(self.model):
            return keras.Model
        return cls if _keras.functional_like_constructor(cls) else keras.Model

    def _is_chain(self):
        return all(
            len(node.args) == len(node.outputs) == 1
            and issubclass(node.unit.cls, keras.layers.Layer)
            for node in self.nodes[1:]
        ) and all(
            node.input is before.output
            for before, node in zip(self.nodes, self.nodes[1:])
        )

    def make(self):
        """Return the new model with weights, compiled as the one that was read was."""
        model = self.build()
        units = self.all_units()
        for unit in units:
            unit.give_weights()
        sources = [u.source for u in units if u.graph is None and u.source is not None]
        remake.warn_of_what_is_shared(sources, self.model)
        remake.compile_as(self.model, model)
        return model
