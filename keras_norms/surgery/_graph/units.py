"""What a graph consists of: tensors, calls, and layers to be."""

import tempfile

import keras
import numpy as np
from keras import ops, tree

from keras_norms.layers.frozen import plain_class, set_frozen
from keras_norms.surgery._graph import remake


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
    """A layer to be: class, configuration, and weights by name.

    Args:
        source: The layer or operation it stands for, or `None` for a new one.
        cls: Class of the new layer; of a frozen norm that of the norm.
        config: Its configuration.

    Attributes:
        arrays: Dictionary of weights that are not those of `source`.
        is_frozen: Whether the new layer is a frozen norm.
        nodes: Its calls.
        graph: That of a model, which it is then.
        made: The new layer, once it is made.
        wrapper: A class, or a partial of one, whose instance takes the new layer in,
            under its name.
    """

    def __init__(self, source=None, cls=None, config=None):
        self.source = source
        self.cls = cls or plain_class(type(source))
        self.is_frozen = source is not None and self.cls is not type(source)
        self._config = config
        self.arrays = {}
        self.nodes = []
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
        """Change its configuration."""
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
        return {
            reader.unit
            for node in self.nodes
            for value in node.outputs
            for reader in value.readers
        }

    def weight(self, name):
        """A weight in float64, or `None`."""
        if name not in self.arrays:
            variables = () if self.layer is None else self.layer.weights
            found = [v for v in variables if v.name == name]
            if not found:
                return None
            self.arrays[name] = to_float64(found[0])
        return self.arrays[name]

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
            self.made = self._make()
        return self.made

    def _make(self):
        if self.graph is not None:
            return self.graph.build()
        layer = self._make_layer()
        if self.is_frozen:
            set_frozen(layer, True)
        return layer if self.wrapper is None else self.wrapper(layer, name=self.name)

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
        for variable in made.weights:
            if variable.name in self.arrays:
                assign(variable, self.arrays[variable.name])

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


def to_numpy(x):
    """An array or variable of any backend as a NumPy array."""
    return ops.convert_to_numpy(ops.convert_to_tensor(x))


def to_float64(x):
    return np.asarray(to_numpy(x), "float64")


def assign(variable, array):
    """Give a variable the values of an array of any dtype."""
    variable.assign(ops.cast(np.asarray(array), variable.dtype))
