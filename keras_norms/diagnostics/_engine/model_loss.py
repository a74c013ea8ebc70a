"""The loss of a model as a function of tensors in place of its variables, compiled."""

import contextlib
import weakref

import keras
import numpy as np
from keras import ops, tree

from keras_norms import _keras
from keras_norms.diagnostics._engine.differentiation import (
    compiler,
    differentiate,
    twice_differentiable,
)
from keras_norms.layers.learning_rate import FollowsLearningRate


class ModelLoss:
    """The loss on a batch, as training computes it, of tensors in place of variables.

    It is the loss of `fit`: the mean over the batch, with the losses of regularizers
    and `add_loss`. A call changes nothing: new moving statistics and seed states go
    into a scope that is thrown away. It keeps no reference to the model. With a layer
    it is a function of the layer's `"input"` or `"output"`, given by `side`.
    """

    def __init__(self, model, loss=None, layer=None, side="input", *, training):
        self._model, self._layer = weak_reference(model), weak_reference(layer)
        self._side = side
        self._training = training
        self._is_given = loss is not None
        if self._is_given:
            names = getattr(model, "output_names", None)  # of a Functional model
            self._loss = _keras.CompileLoss(loss, output_names=names)
        else:
            # Not the model's own: the first `fit` reads one batch more to build it.
            self._loss = _keras.unbuilt_loss(model)
        compiled = compiler(model)
        self.activation = compiled(self._activation)
        self.value_and_grad = compiled(self._value_and_grad)
        self.hessian_vector_product = compiled(self._hessian_vector_product)

    @property
    def _variables(self):
        """The weights (none with a layer), and all else that a call reads."""
        model = self._model()
        weights = model.trainable_variables
        others = [*model.non_trainable_variables, *model.metrics_variables]
        followers = _keras.layers_of(model, FollowsLearningRate)
        counters = {id(each.iterations): each.iterations for each in followers}
        others += [counter for counter in counters.values() if counter is not None]
        return (weights, others) if self._layer is None else ([], [*weights, *others])

    def values(self):
        """Read the arguments of the loss, and the state: two lists of tensors."""
        if keras.backend.backend() == "jax":
            self._model().jax_state_sync()  # In `fit`, the trainer holds the state.
        weights, others = self._variables
        return [v.value for v in weights], [v.value for v in others]

    def build(self, x, y):
        """Build the loss, as it does on its first batch."""
        model, loss = self._model(), self._loss
        if loss is not None and y is None:
            raise ValueError(
                "Argument `y` must hold the targets of the loss. Received: y=None"
            )
        if loss is None or loss.built:
            return
        x, y = tree.map_structure(_symbolic, (x, y))
        with _keras.keeping_losses(model):
            predictions = _keras.compute_output_spec(model, x)
            if self._is_given:
                _keras.compute_output_spec(loss, y, predictions)
            else:
                _keras.compute_output_spec(self._compiled, x, y, predictions, False)

    def __call__(self, values, state, x, y):
        """Compute the loss, a scalar tensor, of tensors in place of `self.values()`.

        With a layer, `values` holds one in place of its input or output.
        """
        model, replacing = self._model(), contextlib.nullcontext()
        if self._layer is not None:
            replacing = self._intercepting(lambda a: ops.cast(values[0], a.dtype))
        with self._scope(values, state), replacing:
            predictions = self._forward(x)
            if not self._is_given:
                return self._compiled(x, y, predictions, self._training)
            total = self._loss(y, predictions)
            for term in model.losses:
                total = total + ops.cast(ops.sum(term), total.dtype)
            return total

    def _compiled(self, *args):
        """Compute the loss that the model was compiled with."""
        with _keras.replaced(self._model(), _compile_loss=self._loss):
            return _keras.compute_loss(self._model(), *args)

    def outputs(self, values, state, x):
        """Compute what the model returns."""
        with self._scope(values, state):
            return self._forward(x)

    def _activation(self, state, x):
        """Compute the tensor that goes into, or comes out of, the layer."""
        seen = []
        with self._scope([], state), self._intercepting(lambda a: seen.append(a) or a):
            self._forward(x)
        return seen[0]

    def _scaled(self, values, state, x, y, scale, differentiable=False):
        """Compute the loss and its gradients, times `scale`."""

        def scaled(values):
            loss = self(values, state, x, y)
            return loss * ops.cast(scale, loss.dtype)

        return differentiate(scaled, values, differentiable)

    def _value_and_grad(self, values, state, x, y, scale):
        loss, gradients = self._scaled(values, state, x, y, scale)
        # Keras cannot convert a bfloat16 scalar of TensorFlow to NumPy.
        loss = ops.cast(loss, widest([loss.dtype]))
        return loss / ops.cast(scale, loss.dtype), _flat(gradients, scale)

    def _hessian_vector_product(self, values, vectors, state, x, y, scale):
        def slope(values):
            _, gradients = self._scaled(values, state, x, y, scale, True)
            return ops.sum(_flat(gradients, 1) * _flat(vectors, 1))

        with twice_differentiable():
            return _flat(differentiate(slope, values)[1], scale)

    def _forward(self, x):
        model, mode = self._model(), {"training": self._training}
        return model(x, **mode if _keras.takes_training(model) else {})

    @contextlib.contextmanager
    def _scope(self, values, state):
        model, (weights, others) = self._model(), self._variables
        mapping = [*zip(weights, values), *zip(others, state)]
        scope = keras.StatelessScope(mapping, collect_losses=True)
        once = _keras.running_once(_keras.layers_of(model))
        with _keras.keeping_losses(model), once, scope:
            _keras.clear_losses(model)
            yield

    @contextlib.contextmanager
    def _intercepting(self, function):
        """Apply `function` to the layer's input or output on the way."""
        layer, side, calls = self._layer(), self._side, []

        def one_tensor(value):
            calls.append(value)
            is_tensor = ops.is_tensor(value)
            if not is_tensor or not keras.backend.is_float_dtype(value.dtype):
                raise ValueError(
                    f"Argument `layer` must have a single tensor as its {side}, of "
                    f"floats. Received: layer '{layer.name}', {side} {value}"
                )
            return function(value)

        def call_with(x, call):
            return call(one_tensor(x)) if side == "input" else one_tensor(call(x))

        with replacing_call(layer, call_with):
            yield
        if len(calls) != 1:
            raise ValueError(
                f"Argument `layer` must be called once by the model, not {len(calls)} "
                f"times. Received: layer '{layer.name}'"
            )


def replacing_call(layer, function):
    """A scope in which a layer computes `function` of its first input and its call."""
    call = layer.call

    def replaced(*args, **kwargs):
        if args:
            return function(args[0], lambda x: call(x, *args[1:], **kwargs))
        first = next(iter(kwargs))
        return function(kwargs[first], lambda x: call(**{**kwargs, first: x}))

    return _keras.replaced(layer, call=replaced)


def widest(dtypes):
    """Return the name of the dtype that a vector of values of some dtypes has."""
    names = map(keras.backend.standardize_dtype, dtypes)
    return "float64" if "float64" in names else "float32"


def _flat(gradients, scale):
    dtype = widest(gradient.dtype for gradient in gradients)
    flat = [ops.reshape(ops.cast(g, dtype), (-1,)) for g in gradients]
    return ops.concatenate(flat) / ops.cast(scale, dtype)


def as_tensors(model, x, y):
    """Convert a batch to tensors, as `fit` gives them to the model."""
    floats = "float64" if model.compute_dtype == "float64" else keras.config.floatx()

    def tensor(array):
        if array is None:
            return None
        array = array if ops.is_tensor(array) else np.asarray(array)
        array = ops.convert_to_tensor(array)
        is_float = keras.backend.is_float_dtype(array.dtype)
        return ops.cast(array, floats) if is_float else array

    return tree.map_structure(tensor, (x, y))


def _symbolic(tensor):
    # An output without a loss has none.
    return None if tensor is None else keras.KerasTensor(tensor.shape, tensor.dtype)


def weak_reference(value):
    """Return a weak reference, or `None` for `None`."""
    return None if value is None else weakref.ref(value)
