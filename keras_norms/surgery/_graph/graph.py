"""A Functional or Sequential model as a graph that can be edited and built again.

`Graph(model)` reads a model without touching it. A `Value` is a tensor, a `Node` is one
call, a `Unit` is a layer with its configuration and weights. A unit has several nodes
where the layer is shared, and a graph of its own where it is a model. `Graph.build`
makes new layers and calls them, `Graph.make` gives them their weights.
"""

import itertools

import keras
from keras import tree

from keras_norms import _keras
from keras_norms.surgery._graph import remake
from keras_norms.surgery._graph.calls import calls_of, is_graph
from keras_norms.surgery._graph.unit import Unit


class Value:
    """A tensor of the graph: the call that makes it, and those that read it."""

    def __init__(self, shape, node):
        self.shape, self.node = tuple(shape), node
        self.readers, self.is_output = [], False
        node.outputs.append(self)

    @property
    def rank(self):
        return len(self.shape)

    @property
    def is_private(self):
        """Whether exactly one call reads it, once."""
        return not self.is_output and len(self.readers) == 1


class Node:
    """One call of a unit."""

    def __init__(self, unit, args, kwargs, graph):
        self.unit, self.args, self.kwargs, self.graph = unit, args, kwargs, graph
        self.outputs = []
        unit.nodes.append(self)
        for value in self.inputs:
            value.readers.append(self)

    @property
    def inputs(self):
        leaves = tree.flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Value)]

    @property
    def input(self):
        """The one tensor it reads, or `None`."""
        inputs = self.inputs
        return inputs[0] if len(inputs) == 1 else None

    @property
    def output(self):
        """The one tensor it makes, or `None`."""
        return self.outputs[0] if len(self.outputs) == 1 else None

    @property
    def options(self):
        """Keyword arguments that the caller gave; Keras itself adds `training`."""
        return {k: v for k, v in self.kwargs.items() if k != "training"}

    @property
    def always_trains(self):
        """Whether it is called with `training=True`, at inference too."""
        return bool(self.kwargs.get("training"))

    def replace_input(self, old, new):
        """Read `new` wherever it reads `old`."""

        def swap(leaf):
            if leaf is not old:
                return leaf
            old.readers.remove(self)
            new.readers.append(self)
            return new

        self.args, self.kwargs = tree.map_structure(swap, (self.args, self.kwargs))


class Graph:
    """The calls of a model in an order in which they can be run.

    `units` has the unit of each layer, shared with nested graphs. `traced` has what is
    read in place of `calls_of(model)` for some models. Keys are `id`s.
    """

    def __init__(self, model, units=None, traced=None):
        self.traced = traced or {}
        inputs, calls, outputs = self.traced.get(id(model)) or calls_of(model)
        self.model, self.name = model, model.name
        self.units = {} if units is None else units
        self.nodes, self.has_masks = [], False
        values = {}
        for call in calls:
            self._read(call, values)
        self.inputs = tree.map_structure(lambda x: values[id(x)], inputs)
        self.outputs = tree.map_structure(lambda x: values[id(x)], outputs)
        for value in tree.flatten(self.outputs):
            value.is_output = True

    def _read(self, call, values):
        given = call.args, _without_automatic_masks(call)
        tensors = [x for x in tree.flatten(given) if isinstance(x, keras.KerasTensor)]
        if any(id(x) not in values for x in tensors):
            return  # A call whose inputs are not part of this model.
        args, kwargs = _filled(given, values)
        node = Node(self._unit(call.operation), args, kwargs, self)
        for x in call.outputs:
            values[id(x)] = Value(x.shape, node)
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
        """List every graph, nested ones first, each once."""
        found = {}
        for node in self.nodes:
            if node.unit.graph is not None:
                found |= {id(graph): graph for graph in node.unit.graph.walk()}
        return [*found.values(), self]

    def all_units(self):
        """Every unit of this graph and of those in it, each once, in order."""
        graphs = self.walk()
        return list({node.unit: None for graph in graphs for node in graph.nodes})

    def free_name(self, name):
        taken = {node.unit.name for node in self.nodes}
        candidates = (f"{name}_{count}" for count in itertools.count(1))
        return next(x for x in itertools.chain([name], candidates) if x not in taken)

    # Changes

    def insert(self, unit, value, readers):
        """Call `unit`, which keeps shapes, on `value`; `readers` read the result."""
        node = Node(unit, (value,), {}, self)
        result = Value(value.shape, node)
        self.nodes.insert(self.nodes.index(value.node) + 1, node)
        for reader in readers:
            reader.replace_input(value, result)

    def remove(self, node):
        """Take a call out: readers of its result read its input instead."""
        value, result = node.input, node.output
        for reader in list(result.readers):
            reader.replace_input(result, value)
        if result.is_output:
            self.outputs = _filled(self.outputs, {id(result): value})
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
        for node in reversed(list(self.nodes)):
            is_used = any(v.readers or v.is_output for v in node.outputs)
            if not is_used and not issubclass(node.unit.cls, keras.layers.InputLayer):
                self.drop(node)
        # Keras calls no Sequential without layers.
        is_empty = len(self.nodes) < 2
        is_sequential = isinstance(self.model, keras.Sequential)
        if is_sequential and not is_empty and self._is_chain():
            made_layers = [node.unit.make() for node in self.nodes]
            return self._frozen_as_before(keras.Sequential(made_layers, name=self.name))
        tensors = {}
        for node in self.nodes:
            layer = node.unit.make()
            if isinstance(layer, keras.layers.InputLayer):
                results = layer.output
            else:
                args, kwargs = _filled((node.args, node.kwargs), tensors)
                results = layer(*args, **kwargs)
            for value, result in zip(node.outputs, tree.flatten(results)):
                tensors[id(value)] = result
        cls = type(self.model)
        # The constructor of a Sequential takes layers, whatever its signature says.
        takes_tensors = _keras.functional_like_constructor(cls) and not is_sequential
        if not takes_tensors or not is_graph(self.model):
            cls = keras.Model
        model = cls(*_filled((self.inputs, self.outputs), tensors), name=self.name)
        return self._frozen_as_before(model)

    def _frozen_as_before(self, model):
        if self.model.trainable:
            return model
        layers = _keras.layers_of(model, include_self=False)
        flags = [layer.trainable for layer in layers]
        model.trainable = False  # and all layers in it, new ones too
        if any(variable.trainable for variable in self.model.variables):
            # The model was set not to train first, and then some layers to train.
            for layer, trains in zip(layers, flags):
                layer.trainable = trains
        return model

    def _is_chain(self):
        return all(
            len(node.args) == len(node.outputs) == 1
            and node.input is before.output
            and issubclass(node.unit.cls, keras.layers.Layer)
            for before, node in itertools.pairwise(self.nodes)
        )

    def _keep_names_of_outputs(self):
        """Let outputs keep their names: losses and targets may be given by name."""
        # Subclassed models have none.
        names = getattr(self.model, "output_names", [])
        is_one = len(names) == 1 and not remake.is_compiled_by_names(self.model)
        if not names or is_one:
            return
        outputs = tree.flatten(self.outputs)
        for i, (name, old) in enumerate(zip(names, self.model.outputs)):
            if outputs[i].node.unit.name == name or self.free_name(name) != name:
                continue
            config = {"name": name, "dtype": old.dtype}
            unit = Unit(cls=keras.layers.Identity, config=config)
            node = Node(unit, (outputs[i],), {}, self)
            outputs[i] = Value(old.shape, node)
            outputs[i].is_output = True
            self.nodes.append(node)
        self.outputs = tree.pack_sequence_as(self.outputs, outputs)

    def make(self):
        """Return the new model with weights, compiled as the one that was read was."""
        self._keep_names_of_outputs()
        model = self.build()
        units = self.all_units()
        for unit in units:
            unit.give_weights()
        sources = [u.source for u in units if u.graph is None and u.source is not None]
        remake.warn_of_what_is_shared(sources, self.model)
        remake.warn_of_lost_methods(self.model, model)
        remake.warn_of_what_is_left_out(self.model, model, stacklevel=4)
        remake.compile_as(self.model, model)
        return model


def _without_automatic_masks(call):
    """The keyword arguments of a call, less masks that Keras fills in by itself."""
    kwargs = {name: value for name, value in call.kwargs.items() if value is not None}
    masks = map(_keras.get_keras_mask, tree.flatten(call.args[:1]))
    automatic = {id(None), *map(id, masks)}
    if all(id(leaf) in automatic for leaf in tree.flatten(kwargs.get("mask"))):
        kwargs.pop("mask", None)
    return kwargs


def _filled(structure, known):
    """A structure in which some objects stand for others, by `id`."""
    return tree.map_structure(lambda leaf: known.get(id(leaf), leaf), structure)
