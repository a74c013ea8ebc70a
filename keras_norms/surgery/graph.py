"""A Functional or Sequential model as a graph that can be edited and built again.

`Graph(model)` reads a model without touching it. A `Value` is a tensor, a `Node` is one
call, a `Unit` is a layer with its configuration and weights. A unit has several nodes
where the layer is shared, and a graph of its own where it is a model. `Graph.build`
makes new layers, calls them and gives them their weights.
"""

import tempfile
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms.surgery import again


class Call(NamedTuple):
    """One call as Keras recorded it, on symbolic tensors."""

    operation: Any
    args: tuple
    kwargs: dict
    outputs: list


class Value:
    """A tensor of the graph: who makes it and who reads it."""

    def __init__(self, shape, dtype, node=None):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.node = node
        self.readers = []
        self.is_output = False

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
        self.unit = unit
        self.args = args
        self.kwargs = kwargs
        self.graph = graph
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

    def reads(self, old, new):
        """Read `new` wherever it reads `old`."""

        def swap(leaf):
            if leaf is not old:
                return leaf
            old.readers.remove(self)
            new.readers.append(self)
            return new

        self.args = tree.map_structure(swap, self.args)
        self.kwargs = tree.map_structure(swap, self.kwargs)


class Unit:
    """A layer to be: class, configuration, and weights by name.

    Args:
        source: The layer or operation it stands for, or `None` for a new one.
        cls: Class of the new layer.
        config: Its configuration.
        arrays: Dictionary of weights that are not those of `source`.
    """

    def __init__(self, source=None, cls=None, config=None, arrays=None):
        self.source = source
        self.cls = cls or type(source)
        self._config = config
        self.arrays = arrays or {}
        self.nodes = []
        self.graph = None
        self.made = None
        self.wrapper = None

    @property
    def config(self):
        if self._config is None:
            try:
                self._config = again.config_of(self.source)
            except Exception as e:
                raise ValueError(
                    f"Layer '{self.source.name}' has no configuration to copy it from: "
                    f"{e}"
                ) from e
        return self._config

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

    def weight(self, name):
        """A weight in float64, or `None`."""
        if name not in self.arrays:
            variables = () if self.layer is None else self.layer.weights
            found = [v for v in variables if v.name == name]
            if not found:
                return None
            self.arrays[name] = np.asarray(numpy(found[0]), "float64")
        return self.arrays[name]

    def become(self, cls, config, arrays):
        """Turn into another layer at the same place."""
        self.source, self.cls, self._config, self.arrays = None, cls, config, arrays

    def rename(self, name):
        if self.graph is not None:
            self.graph.name = name
        else:
            self._config = {**self.config, "name": name}

    def wrap_in(self, wrapper):
        """Call it inside of `wrapper(layer, name=...)`, which takes its name."""
        self.wrapper = wrapper

    def make(self):
        """A new layer, without weights."""
        if self.graph is not None:
            return self.graph.build()
        layer = self._make_layer()
        return layer if self.wrapper is None else self.wrapper(layer, name=self.name)

    def _make_layer(self):
        if again.is_copied(self.source):
            return again.copied(self.source, self.name)
        try:
            layer = again.from_config(self.cls, self.config, self.source)
            if "name" not in self.config:
                layer.name = self.name
            return layer
        except Exception as e:
            if self.source is not None and not getattr(self.source, "variables", ()):
                return again.copied(self.source, self.name)
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
            again.warn_of_what_is_left_out(self.layer, made)
        if self.layer is not None and self.layer.variables:
            old, new = self.layer.variables, made.variables
            # By place: names may be counted up. A layer that gained a bias has names.
            same = [tuple(v.shape) for v in old] == [tuple(v.shape) for v in new]
            by_name = {v.name: v for v in old}
            for i, variable in enumerate(new):
                if variable.name not in self.arrays:
                    origin = old[i] if same else by_name[variable.name]
                    variable.assign(numpy(origin))
            if isinstance(made, keras.layers.Normalization):
                made.finalize_state()
        if hasattr(self.layer, "save_assets"):
            # A vocabulary.
            with tempfile.TemporaryDirectory() as folder:
                self.layer.save_assets(folder)
                made.load_assets(folder)
        for variable in made.weights:
            if variable.name in self.arrays:
                array = np.asarray(self.arrays[variable.name])
                variable.assign(ops.cast(array, variable.dtype))


class Graph:
    """The calls of a model in an order in which they can be run.

    Args:
        model: A built Functional or Sequential model. It is only read.
        units: Units by the `id` of their layer, shared with nested graphs.
        traced: Inputs, calls and outputs, as of `calls_of`, of those models that are
            read otherwise, by the `id` of the model.
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

        args, kwargs = call.args, _without_automatic_masks(call)
        if any(
            isinstance(x, keras.KerasTensor) and id(x) not in values
            for x in tree.flatten((args, kwargs))
        ):
            return  # A call whose inputs are not part of this model.
        args, kwargs = tree.map_structure(value_of, (args, kwargs))
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

    def insert(self, unit, value, before=None):
        """Call `unit` on `value`.

        Args:
            unit: A `Unit` that keeps shapes.
            value: What it reads.
            before: The nodes that read the result instead of `value`. By default all
                that read `value`, the outputs of the model included.

        Returns:
            The result.
        """
        readers = list(value.readers) if before is None else before
        node = Node(unit, (value,), {}, self)
        result = Value(value.shape, value.dtype, node)
        node.outputs.append(result)
        place = self.nodes.index(value.node) + 1
        self.nodes.insert(place, node)
        for reader in readers:
            if value in reader.inputs:
                reader.reads(value, result)
        if before is None:
            self._output(value, result)
        return result

    def remove(self, node):
        """Take a call out: who read its result reads its input."""
        value, result = node.input, node.output
        for reader in list(result.readers):
            if result in reader.inputs:
                reader.reads(result, value)
        self._output(result, value)
        self.drop(node)

    def drop(self, node):
        """Forget a call whose result nobody reads."""
        for value in node.inputs:
            value.readers.remove(node)
        node.unit.nodes.remove(node)
        self.nodes.remove(node)

    def _output(self, old, new):
        if old.is_output:
            self.outputs = tree.map_structure(
                lambda v: new if v is old else v, self.outputs
            )
            old.is_output, new.is_output = False, True

    # The new model

    def build(self):
        """Return a new model. Call `make` for one with weights and compile state."""
        for node in reversed(list(self.nodes)):
            inputs = tree.flatten(self.inputs)
            if not any(
                v.readers or v.is_output or any(v is i for i in inputs)
                for v in node.outputs
            ):
                self.drop(node)
        if isinstance(self.model, keras.Sequential) and self._is_chain():
            return self._build_sequential()
        tensors = {}
        for node in self.nodes:
            args, kwargs = tree.map_structure(
                lambda leaf: tensors[id(leaf)] if isinstance(leaf, Value) else leaf,
                (node.args, node.kwargs),
            )
            layer = self._make(node.unit)
            if isinstance(layer, keras.layers.InputLayer):
                results = [layer.output]
            else:
                results = tree.flatten(layer(*args, **kwargs))
            for value, result in zip(node.outputs, results):
                tensors[id(value)] = result
        inputs, outputs = (
            tree.map_structure(lambda v: tensors[id(v)], structure)
            for structure in (self.inputs, self.outputs)
        )
        cls = type(self.model)
        if not is_graph(self.model) or not _keras.functional_like_constructor(cls):
            cls = keras.Model
        if cls is _keras.Functional or isinstance(self.model, keras.Sequential):
            cls = keras.Model
        model = cls(inputs, outputs, name=self.name)
        if not self.model.trainable:
            model.trainable = False
        return model

    def _is_chain(self):
        return all(
            len(node.args) == len(node.outputs) == 1
            and issubclass(node.unit.cls, keras.layers.Layer)
            for node in self.nodes[1:]
        ) and all(
            node.input is before.output
            for before, node in zip(self.nodes, self.nodes[1:])
        )

    def _build_sequential(self):
        layers = [self._make(node.unit) for node in self.nodes]
        return keras.Sequential(layers, name=self.name, trainable=self.model.trainable)

    @staticmethod
    def _make(unit):
        if unit.made is None:
            unit.made = unit.make()
        return unit.made

    def make(self):
        """Return the new model with weights, compiled as the one that was read was."""
        model = self.build()
        units = self.all_units()
        for unit in units:
            unit.give_weights()
        sources = [
            unit.source
            for unit in units
            if unit.source is not None and unit.graph is None
        ]
        again.warn_of_what_is_shared(sources, self.model)
        again.compile_as(self.model, model)
        return model


def calls_of(model):
    """The inputs, the calls in an order in which they can be run, and the outputs."""
    inputs, nodes, outputs = _keras.structure_of(functional_of(model))
    calls = [
        Call(node.operation, node.arguments.args, node.arguments.kwargs, node.outputs)
        for node in nodes
    ]
    return inputs, calls, outputs


def is_graph(layer):
    """Whether `layer` is a model whose calls can be read."""
    if isinstance(layer, keras.Sequential):
        return _keras.functional_in(layer) is not None
    functional = _keras.Functional
    return isinstance(layer, functional) and type(layer).call is functional.call


def functional_of(model):
    """The Functional model in `model`, or an error that says why there is none."""
    if isinstance(model, keras.Sequential):
        if _keras.functional_in(model) is None:
            raise ValueError(
                "Argument `model` must be built: give it a `keras.Input`, or call it "
                f"on data. Received: Sequential model '{model.name}' without an input "
                "shape"
            )
        return _keras.functional_in(model)
    if not isinstance(model, keras.Model):
        raise ValueError(
            "Argument `model` must be a Functional or Sequential Keras model. "
            f"Received: model={arguments.shown(model)}"
        )
    if not is_graph(model):
        raise ValueError(
            "Argument `model` must be a Functional or Sequential Keras model: the "
            "layers of a subclassed model cannot be seen from outside. "
            f"Received: model '{model.name}' of class {type(model).__name__}"
        )
    return model


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


def numpy(x):
    """An array or variable of any backend as a NumPy array."""
    return ops.convert_to_numpy(ops.convert_to_tensor(x))
