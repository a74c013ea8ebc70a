"""A layer of a graph, to build a new one from: class, configuration, weights."""

import tempfile

import keras

from keras_norms.layers.frozen import plain_class, set_frozen
from keras_norms.surgery._graph import remake
from keras_norms.surgery._graph.arrays import assign_all, to_float64, to_numpy


class Unit:
    """A layer to make: class (of a frozen norm, the plain one), configuration, weights.

    Attributes:
        source: The layer or operation it stands for, or `None` for a new one.
        arrays: Dictionary of weights in float64, by name: those read from `source`, and
            those that replace them.
        nodes: Its calls.
        graph: If the layer is a model, the graph of that.
        made: The new layer, after it is made.
        wrapper: A partial of a class that wraps the new layer.
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
                    f"Layer '{self.source.name}' could not be rebuilt: its "
                    f"get_config() failed: {e}"
                ) from e
        return self._config

    def configure(self, **changes):
        self._config = {**self.config, **changes}

    @property
    def name(self):
        if self.graph is not None:
            return self.graph.name
        # Operations that an operator makes (x + y), and layers whose constructor takes
        # no name, have none in their configuration.
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

    def become(self, cls, config, arrays, is_frozen=False):
        """Turn into another layer at the same place."""
        self.source, self.cls, self._config, self.arrays = None, cls, config, arrays
        self.is_frozen = is_frozen

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
                f"Layer '{self.name}' could not be rebuilt: "
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
        for variable, source in remake.pairs_of_variables(made, self.layer):
            if variable.name not in self.arrays:
                variable.assign(to_numpy(source))
        if self.layer.variables and isinstance(made, keras.layers.Normalization):
            made.finalize_state()
