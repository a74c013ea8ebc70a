"""The loss of a model as a pure function of tensors, and what layers read in it."""

import contextlib
import functools
import weakref
from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_norms import _keras
from keras_norms._types import Tensor
from keras_norms.diagnostics._engine.differentiation import drawing_from, randomness


class ModelLoss:
    """The loss on a batch, as training computes it, of tensors in place of variables.

    It is that of `fit`: the mean over the batch, the losses of regularizers and of
    `add_loss` included. A call changes nothing: new moving statistics and seed states
    go into a scope that is thrown away. No reference to the model is kept. With a layer
    it is a function of the `"input"` or `"output"` of the layer, which `side` says.
    """

    def __init__(self, model, loss=None, layer=None, side="input", training=True):
        self._model = weakref.ref(model)
        self._layer = None if layer is None else weakref.ref(layer)
        self._side = side
        self._training = training
        self._loss = None if loss is None else _keras.CompileLoss(loss)

    @property
    def model(self):
        return self._model()

    @property
    def layer(self):
        return None if self._layer is None else self._layer()

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

    def values(self):
        """Read `parameters` and `state`: two lists of tensors."""
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()  # In `fit`, the trainer holds the state.
        return [v.value for v in self.parameters], [v.value for v in self.state]

    def build(self, x, y):
        """Make what the loss makes when it sees its first batch."""
        model, loss = self.model, self._loss
        compiled = _keras.compiled_loss(model) if loss is None else loss
        if compiled is not None and y is None:
            raise ValueError(
                "Argument `y` must hold the targets that the loss compares with the "
                "outputs of the model. Received: y=None"
            )
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
        """Compute the loss, a scalar tensor, of tensors in place of `self.values()`.

        With a layer, `values` holds one in place of its input or output.
        """
        replacing = contextlib.nullcontext()
        if self._layer is not None:
            replacing = self._intercepting(lambda a: ops.cast(values[0], a.dtype))
        with self._scope(values, state), replacing:
            predictions = self._forward(x)
            if self._loss is None:
                return _keras.compute_loss(
                    self.model, x, y, predictions, self._training
                )
            total = self._loss(y, predictions)
            for term in self.model.losses:
                total = total + ops.cast(ops.sum(term), total.dtype)
            return total

    def outputs(self, values, state, x):
        """Compute what the model returns."""
        with self._scope(values, state):
            return self._forward(x)

    def activation(self, state, x):
        """Compute the tensor that goes into, or comes out of, the layer."""
        seen = []
        with self._scope([], state), self._intercepting(lambda a: seen.append(a) or a):
            self._forward(x)
        return seen[0]

    def _forward(self, x):
        model, mode = self.model, {"training": self._training}
        return model(x, **mode if _keras.takes_training(model) else {})

    @contextlib.contextmanager
    def _scope(self, values, state):
        mapping = [*zip(self.parameters, values), *zip(self.state, state)]
        with (
            _keras.keeping_losses(self.model),
            keras.StatelessScope(mapping, collect_losses=True),
        ):
            _keras.clear_losses(self.model)
            yield

    @contextlib.contextmanager
    def _intercepting(self, function):
        """Apply `function` to the layer's input or output on the way."""
        layer, side = self.layer, self._side
        calls = []

        def of_one_tensor(value):
            calls.append(value)
            if not ops.is_tensor(value):
                raise ValueError(
                    f"Argument `layer` must have a single tensor as its {side}. "
                    f"Received: layer '{layer.name}', {side} {value}"
                )
            return function(value)

        with intercepting(layer, **{f"on_{side}": of_one_tensor}):
            yield
        if len(calls) != 1:
            raise ValueError(
                f"Argument `layer` must be called once by the model, not {len(calls)} "
                f"times. Received: layer '{layer.name}'"
            )


def intercepting(layer, on_input=lambda value: value, on_output=lambda value: value):
    """A scope in which a layer has `on_input` of its first input, and `on_output`."""
    call = layer.call

    def intercepted(*args, **kwargs):
        if args:
            args = (on_input(args[0]), *args[1:])
        else:
            first = next(iter(kwargs))
            kwargs = {**kwargs, first: on_input(kwargs[first])}
        return on_output(call(*args, **kwargs))

    return _keras.replaced(layer, call=intercepted)


class Call(NamedTuple):
    """One call of a layer, with its first input and its output."""

    layer: keras.layers.Layer
    input: Tensor
    output: Tensor


def record(model, layers, x, training):
    """Record the calls of layers, in order, when the model is called on a batch.

    Nothing of the model changes. A layer that reads the output of another as it is has
    the same tensor as its input.
    """
    pure = ModelLoss(model, training=training)
    x, _ = as_tensors(model, x, None)
    calls = []
    with drawing_from(randomness()), contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_recording(layer, calls))
        pure.outputs(*pure.values(), x)
    return calls


def _recording(layer, calls):
    inputs = []
    return intercepting(
        layer,
        on_input=lambda x: inputs.append(x) or x,
        on_output=lambda y: calls.append(Call(layer, inputs.pop(), y)) or y,
    )


def as_tensors(model, x, y):
    """Convert a batch to tensors, as `fit` gives them to the model."""
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


def _symbolic(tensor):
    if tensor is None:  # of an output without a loss
        return None
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return keras.KerasTensor(tensor.shape, dtype)
