"""The loss of a model as a pure function of tensors."""

import contextlib
import functools
import weakref

import keras
import numpy as np
from keras import ops, tree

from keras_norms import _keras
from keras_norms._checks import arguments

SIDES = ("input", "output")


class ModelLoss:
    """The loss on a batch, as training computes it, of tensors in place of variables.

    It is that of `fit`: the mean over the batch, the losses of regularizers and of
    `add_loss` included. A call changes nothing: new moving statistics and seed states
    go into a scope that is thrown away.

    Args:
        model: A built `keras.Model`. No reference to it is kept.
        loss: What `model.compile` takes as `loss`, or `None`: the compiled one.
        layer: A layer of the model, or `None`. See `parameters`.
        side: `"input"` or `"output"` of `layer`.
        training: Boolean, whether layers run in training mode.
    """

    def __init__(self, model, loss, layer, side, training):
        self._model = weakref.ref(model)
        self._layer = None if layer is None else weakref.ref(layer)
        self._side = side
        self._training = training
        self._loss = None if loss is None else _keras.CompileLoss(loss)

    @property
    def model(self):
        return self._model()

    @property
    def parameters(self):
        """The variables that the loss is a function of: the trainable ones.

        With a layer, the loss is a function of its input or output instead.
        """
        return self.model.trainable_variables if self._layer is None else []

    @property
    def state(self):
        """All other variables that a call reads."""
        model = self.model
        fixed = [] if self._layer is None else model.trainable_variables
        return [*fixed, *model.non_trainable_variables, *model.metrics_variables]

    @property
    def layer(self):
        return None if self._layer is None else self._layer()

    def build(self, x, y):
        """Make what the compiled loss makes when it sees its first batch."""
        model, loss = self.model, self._loss
        compiled = _keras.compiled_loss(model) if loss is None else loss
        if compiled is None or compiled.built:
            return
        x, y = tree.map_structure(_symbolic, (x, y))
        with _keras.keeping_losses(model):
            predictions = _keras.compute_output_spec(model, x)
            if loss is not None:
                _keras.compute_output_spec(loss, y, predictions)
            else:
                compute = functools.partial(_keras.compute_loss, model)
                _keras.compute_output_spec(compute, x, y, predictions, False)

    def __call__(self, values, state, x, y):
        """The loss, a scalar tensor.

        Args:
            values: List of tensors in place of `parameters`, or, with a layer, of one
                in place of its input or output.
            state: List of tensors in place of `state`.
            x, y: The batch, tensors.
        """
        with self._scope(values, state), self._replacing(values):
            predictions = self._forward(x)
            if self._loss is None:
                return _keras.compute_loss(
                    self.model, x, y, predictions, self._training
                )
            total = self._loss(y, predictions)
            for term in self.model.losses:
                total = total + ops.cast(ops.sum(term), total.dtype)
            return total

    def activation(self, state, x):
        """The tensor that goes into, or comes out of, the layer."""
        seen = []
        with self._scope([], state), self._intercepting(lambda a: seen.append(a) or a):
            self._forward(x)
        return seen[0]

    def _forward(self, x):
        model = self.model
        if _keras.takes_training(model):
            return model(x, training=self._training)
        return model(x)

    @contextlib.contextmanager
    def _scope(self, values, state):
        mapping = [*zip(self.parameters, values), *zip(self.state, state)]
        with (
            _keras.keeping_losses(self.model),
            keras.StatelessScope(mapping, collect_losses=True),
        ):
            _keras.clear_losses(self.model)
            yield

    def _replacing(self, values):
        if self._layer is None:
            return contextlib.nullcontext()
        return self._intercepting(lambda a: ops.cast(values[0], a.dtype))

    @contextlib.contextmanager
    def _intercepting(self, function):
        """Apply `function` to the layer's input or output on the way."""
        layer = self.layer
        call = layer.call
        calls = []

        def intercepted(*args, **kwargs):
            calls.append(layer)
            if self._side == "output":
                return function(self._one_tensor(call(*args, **kwargs)))
            if args:
                return call(function(self._one_tensor(args[0])), *args[1:], **kwargs)
            first = next(iter(kwargs))
            value = function(self._one_tensor(kwargs[first]))
            return call(**{**kwargs, first: value})

        with _keras.replaced(layer, call=intercepted):
            yield
        if len(calls) != 1:
            raise ValueError(
                f"Argument `layer` must be called once by the model, not {len(calls)} "
                f"times. Received: layer '{layer.name}'"
            )

    def _one_tensor(self, value):
        if not ops.is_tensor(value):
            raise ValueError(
                f"Argument `layer` must have a single tensor as its {self._side}. "
                f"Received: layer '{self.layer.name}', {self._side} {value}"
            )
        return value


def as_tensors(model, x, y):
    """Tensors, as `fit` gives them to the model."""
    floats = "float64" if model.compute_dtype == "float64" else keras.config.floatx()

    def tensor(array):
        if array is None:
            return None
        if not ops.is_tensor(array):
            array = np.asarray(array)
        array = ops.convert_to_tensor(array)
        is_float = keras.backend.is_float_dtype(array.dtype)
        return ops.cast(array, floats) if is_float else array

    return tree.map_structure(tensor, (x, y))


def find_layer(model, layer, argument="layer"):
    """The layer of `model`, nested ones too, by itself, its name or its path."""
    layers = _keras.layers_of(model, include_self=False)
    name = layer if isinstance(layer, str) else object()
    found = [e for e in layers if e is layer or e.name == name or e.path == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"Argument `{argument}` must be a layer, or the name of only one. "
            f"Received: {argument}={layer!r}, the name of {len(found)} layers"
        )
    expected = f"be a layer of model '{model.name}', or its name"
    if argument == "layers":
        expected = f"hold layers of model '{model.name}', or their names"
    raise ValueError(
        f"Argument `{argument}` must {expected}. "
        f"Received: {argument}={arguments.shown(layer)}. "
        f"The model has {[each.name for each in layers]}"
    )


def names_of(layers):
    """The name of each layer, or its path where several have that name."""
    names = [layer.name for layer in layers]
    return [
        name if names.count(name) == 1 else layer.path
        for name, layer in zip(names, layers)
    ]


def _symbolic(tensor):
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return keras.KerasTensor(tensor.shape, dtype)
