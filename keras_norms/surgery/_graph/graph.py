"""A Functional or Sequential model as a graph that can be edited and built again.

`Graph(model)` reads a model without touching it. A `Value` is a tensor, a `Node` is one
call, a `Unit` is a layer with its configuration and weights. A unit has several nodes
where the layer is shared, and a graph of its own where it is a model. `Graph.build`
makes new layers, calls them and gives them their weights.
"""

import itertools
import tempfile
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms.layers.frozen import plain_class, set_frozen
from keras_norms.surgery._graph import remake


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
    is_sequential = isinstance(model, keras.Sequential)
    if is_graph(model):
        return _keras.functional_in(model) if is_sequential else model
    if is_sequential:
        raise ValueError(
            "Argument `model` must be built: give it a `keras.Input`, or call it "
            f"on data. Received: Sequential model '{model.name}' without an input "
            "shape"
        )
    wanted = "a Functional or Sequential Keras model"
    if not isinstance(model, keras.Model):
        raise arguments.wrong("model", wanted, model)
    raise ValueError(
        f"Argument `model` must be {wanted}: the layers of a subclassed model cannot "
        f"be seen from outside. Received: model '{model.name}' of class "
        f"{type(model).__name__}"
    )


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

    def replace_input(self, old, new):
        """Read `new` wherever it reads `old`."""

        def swap(leaf):
            if leaf is not old:
                return leaf
            old.readers.remove(self)
            new.readers.append(self)
            return new

        self.args, self.kwargs = tree.map_structure(swap, (self.args, self.kwargs))


class Unit:
    """A layer to be: class (of a frozen norm that of the norm), configuration, weights.

    Attributes:
        source: The layer or operation it stands for, or `None` for a new one.
        arrays: Dictionary of weights, by name, that are not those of `source`.
        nodes: Its calls.
        graph: That of a model, which it is then.
        made: The new layer, once it is made.
        wrapper: A class, or a partial of one, whose instance takes the new layer in.
    """

    def __init__(self, source=None, cls=None, config=None):
        self.source, self._config = source, config
        self.cls = cls or plain_class(type(source))
        self.is_frozen = source is not None and self.cls is not type(source)
        self.arrays, self.nodes = {}, []
        self.graph = self.made = self.wrapper = None

    @property
    def config(self):
        if self._config is None:
            try:
                self._config = remake.config_of(self.source)
            except Exception as e:
                raise ValueError(
                    f"Layer '{self.source.name}' has no configuration to copy it from: "
                    f"{e}"
                ) from e
        return self._config

    def configure(self, **changes):
        self._config = {**self.config, **changes}

    @property
    def name(self):
        if self.graph is not None:
            return self.graph.name
        # Operations made by an operator (x + y), and layers whose constructor does not
        # take it, have no name in their configuration.
        known = self._config is not None and "name" in self._config
        return self._config["name"] if known else self.source.name

    @property
    def layer(self):
        """The source where it is a layer, else `None`."""
        return self.source if isinstance(self.source, keras.layers.Layer) else None

    @property
    def readers(self):
        """The units that read what it makes."""
        values = [value for node in self.nodes for value in node.outputs]
        return {reader.unit for value in values for reader in value.readers}

    def weight(self, name):
        """A weight in float64, or `None`."""
        if name not in self.arrays and self.layer is not None:
            # The first is its own; layers inside may have weights of that name too.
            for found in [v for v in self.layer.weights if v.name == name][:1]:
                self.arrays[name] = to_float64(found)
        return self.arrays.get(name)

    def become(self, cls, config, arrays):
        """Turn into another layer at the same place."""
        self.source, self.cls, self._config, self.arrays = None, cls, config, arrays
        self.is_frozen = False

    def rename(self, name):
        if self.graph is not None:
            self.graph.name = name
        else:
            self.configure(name=name)

    def make(self):
        """A new layer, without weights; always the same one."""
        if self.made is None:
            self.made = self._make() if self.graph is None else self.graph.build()
        return self.made

    def _make(self):
        layer = self._make_layer()
        if self.is_frozen:
            set_frozen(layer, True)
        if self.wrapper is None:
            return layer
        wrapped = self.wrapper(layer, name=self.name)
        if not layer.trainable:
            wrapped.trainable = False  # with its gain
        return wrapped

    def _make_layer(self):
        if remake.is_copied(self.source):
            return remake.copied(self.source, self.name)
        try:
            layer = remake.from_config(self.cls, self.config, self.source)
            if "name" not in self.config:
                layer.name = self.name
            return layer
        except Exception as e:
            if self.source is not None and not getattr(self.source, "variables", ()):
                return remake.copied(self.source, self.name)
            if self._config is None:
                raise
            raise ValueError(
                f"Layer '{self.name}' could not be made again from its configuration, "
                f"{self.cls.__name__}.from_config() failed: {e}"
            ) from e

    def give_weights(self):
        """Give the new layer its weights, and what it keeps outside of them."""
        made = self.made if self.wrapper is None else self.made.layer
        if self.graph is not None or not isinstance(made, keras.layers.Layer):
            return
        if self.layer is not None:
            remake.warn_of_what_is_left_out(self.layer, made)
            self._copy_variables(made)
        if hasattr(self.layer, "save_assets"):
            # A vocabulary.
            with tempfile.TemporaryDirectory() as folder:
                self.layer.save_assets(folder)
                made.load_assets(folder)
        assign_all(made, self.arrays)

    def _copy_variables(self, made):
        old, new = self.layer.variables, made.variables
        # By place: names may be counted up. A layer that gained a bias has names.
        same = [tuple(v.shape) for v in old] == [tuple(v.shape) for v in new]
        by_name = {v.name: v for v in old}
        for i, variable in enumerate(new):
            if variable.name not in self.arrays:
                variable.assign(to_numpy(old[i] if same else by_name[variable.name]))
        if old and isinstance(made, keras.layers.Normalization):
            made.finalize_state()


class Graph:
    """The calls of a model in an order in which they can be run.

    `units` has those of the layers, shared with nested graphs, and `traced` what stands
    for `calls_of` models that are read otherwise; both by `id`.
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
        """Take a call out: who read its result reads its input."""
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
        if isinstance(self.model, keras.Sequential) and self._is_chain():
            made_layers = [node.unit.make() for node in self.nodes]
            trainable = self.model.trainable
            return keras.Sequential(made_layers, name=self.name, trainable=trainable)
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
        cls, is_sequential = type(self.model), isinstance(self.model, keras.Sequential)
        # That of a Sequential takes layers, whatever its signature says.
        takes_tensors = _keras.functional_like_constructor(cls) and not is_sequential
        if not takes_tensors or not is_graph(self.model):
            cls = keras.Model
        model = cls(*_filled((self.inputs, self.outputs), tensors), name=self.name)
        if not self.model.trainable:
            model.trainable = False
        return model

    def _is_chain(self):
        return all(
            len(node.args) == len(node.outputs) == 1
            and node.input is before.output
            and issubclass(node.unit.cls, keras.layers.Layer)
            for before, node in itertools.pairwise(self.nodes)
        )

    def _keep_names_of_outputs(self):
        """Let outputs have their names, by which losses and targets may be given."""
        names = getattr(self.model, "output_names", [])
        if isinstance(self.outputs, dict) or (
            len(names) == 1 and not remake.is_compiled_by_names(self.model)
        ):
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


# Arrays


def to_numpy(x):
    """An array or variable of any backend as a NumPy array."""
    return ops.convert_to_numpy(ops.convert_to_tensor(x))


def to_float64(x):
    return np.asarray(to_numpy(x), "float64")


def assign(variable, array):
    """Give a variable the values of an array of any dtype."""
    variable.assign(ops.cast(np.asarray(array), variable.dtype))


def assign_all(layer, arrays):
    """Give the weights of a layer the values of arrays, by name."""
    for variable in layer.weights:
        if variable.name in arrays:
            assign(variable, arrays[variable.name])
