"""The loss of a model as a function: of tensors, and of a flat vector, compiled."""

import contextlib
import copy
import functools
import weakref
from typing import Any, NamedTuple, Self

import keras
import numpy as np
from keras import ops, tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_batch, check_compiled_or_loss
from keras_norms._types import Data, LayerOrName, Loss, Tensor
from keras_norms.diagnostics._engine.differentiation import (
    compiler,
    differentiate,
    drawing_from,
    randomness,
    twice_differentiable,
)
from keras_norms.diagnostics._engine.reading import find_layer


class ModelLoss:
    """The loss on a batch, as training computes it, of tensors in place of variables.

    It is that of `fit`: the mean over the batch, the losses of regularizers and of
    `add_loss` included. A call changes nothing: new moving statistics and seed states
    go into a scope that is thrown away. No reference to the model is kept. With a layer
    it is a function of the `"input"` or `"output"` of the layer, which `side` says.
    """

    def __init__(self, model, loss=None, layer=None, side="input", training=True):
        self._model, self._layer = _weak(model), _weak(layer)
        self._side = side
        self._training = training
        self._loss = None if loss is None else _keras.CompileLoss(loss)
        compiled = compiler(model)
        self.activation = compiled(self._activation)
        self.value_and_grad = compiled(self._value_and_grad)
        self.hessian_vector_product = compiled(self._hessian_vector_product)

    @property
    def _variables(self):
        """The weights, none where there is a layer, and all else that a call reads."""
        model = self._model()
        weights = model.trainable_variables
        others = [*model.non_trainable_variables, *model.metrics_variables]
        return (weights, others) if self._layer is None else ([], [*weights, *others])

    def values(self):
        """Read what the loss is a function of, and the state: two lists of tensors."""
        if keras.backend.backend() == "jax":
            self._model().jax_state_sync()  # In `fit`, the trainer holds the state.
        weights, others = self._variables
        return [v.value for v in weights], [v.value for v in others]

    def build(self, x, y):
        """Make what the loss makes when it sees its first batch."""
        model, loss = self._model(), self._loss
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
        model, replacing = self._model(), contextlib.nullcontext()
        if self._layer is not None:
            replacing = self._intercepting(lambda a: ops.cast(values[0], a.dtype))
        with self._scope(values, state), replacing:
            predictions = self._forward(x)
            if self._loss is None:
                return _keras.compute_loss(model, x, y, predictions, self._training)
            total = self._loss(y, predictions)
            for term in model.losses:
                total = total + ops.cast(ops.sum(term), total.dtype)
            return total

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
        # Keras makes no NumPy array of a bfloat16 scalar of TensorFlow.
        loss = ops.cast(loss, _widest([loss.dtype]))
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
        with _keras.keeping_losses(model), scope:
            _keras.clear_losses(model)
            yield

    @contextlib.contextmanager
    def _intercepting(self, function):
        """Apply `function` to the layer's input or output on the way."""
        layer, side, calls = self._layer(), self._side, []

        def one_tensor(value):
            calls.append(value)
            if not ops.is_tensor(value):
                raise ValueError(
                    f"Argument `layer` must have a single tensor as its {side}. "
                    f"Received: layer '{layer.name}', {side} {value}"
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


def _widest(dtypes):
    names = map(keras.backend.standardize_dtype, dtypes)
    return "float64" if "float64" in names else "float32"


def _flat(gradients, scale):
    dtype = _widest(gradient.dtype for gradient in gradients)
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
    # There is none of an output without a loss.
    return None if tensor is None else keras.KerasTensor(tensor.shape, tensor.dtype)


# Compiled functions: model -> settings -> `ModelLoss`. They hold no model alive.
_LOSSES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_LOSSES_OF_A_MODEL = 8


class Objective:
    """The loss of a model on one batch, as a function of a flat vector.

    The vector holds all trainable weights, or the input or output of a layer. Weights,
    moving statistics and seed states are those at the time when the object is made;
    every evaluation starts from them, so that dropout and noise are the same at every
    point, and changes none of them. It is the loss that training minimises,
    regularizers included, with layers in training mode.

    The functions are compiled (`tf.function`, `jax.jit`) once for each model, loss and
    shape of the batch, and used again by later objectives of the same model.

    Args:
        model: A built `keras.Model`: Functional, Sequential or subclassed.
        x: The batch's inputs, an array or what else the model takes.
        y: Its targets.
        loss: What `model.compile` takes as `loss`, or `None`: the compiled one.
        layer: `None`, or a layer of the model or its name: the vector then is the
            layer's input or output for this batch, and a change of it leaves
            everything before the layer alone.
        side: `"input"` or `"output"` of `layer`.
        training: Boolean, whether layers run in training mode.

    Attributes:
        start: The vector at the time when the object was made, float32, or float64
            where a weight has it. `None` instead of a point means `start`.
        shapes: List of the shapes of what the vector holds.
        gradient_evaluations: Number of gradients that have been computed.

    Raises:
        ValueError: If the model is not built or has no loss or no trainable weights, if
            the batch is empty, or if the layer is not in the model, has not one tensor
            at `side`, or is not called exactly once.
    """

    def __init__(
        self,
        model: keras.Model,
        x: Data,
        y: Data,
        loss: Loss = None,
        *,
        layer: LayerOrName | None = None,
        side: str = "output",
        training: bool = True,
    ) -> None:
        check_compiled_or_loss(model, loss)
        check_batch(model, x, y)
        arguments.choice("side", side, ("input", "output"))
        arguments.boolean("training", training)
        if layer is None and not model.trainable_variables:
            raise ValueError(
                "Argument `model` must have trainable weights. "
                f"Received: model '{model.name}'"
            )
        layer = None if layer is None else find_layer(model, layer)
        self._model = model  # `ModelLoss` does not keep it.
        self._of_weights = layer is None
        self._loss = _loss_of(model, loss, layer, side, training)
        values, state = self._loss.values()
        self._batch = as_tensors(model, x, y)
        self._loss.build(*self._batch)
        self._randomness = randomness()
        # Copies, for training may go on in the memory of the variables.
        self._state = [ops.copy(value) for value in state]
        if not self._of_weights:
            with drawing_from(self._randomness):
                values = [self._loss.activation(self._state, self._batch[0])]
        self._scale = _loss_scale(model)
        self._dtypes = [v.dtype for v in values]
        self.shapes = [tuple(v.shape) for v in values]
        self.start = self.flatten([ops.convert_to_numpy(v) for v in values])
        self.gradient_evaluations = 0

    def of_batch(self, x: Data, y: Data) -> Self:
        """Return the objective with another batch, from the same weights and seeds."""
        if not self._of_weights:
            raise ValueError("The objective of a layer's activations has one batch.")
        check_batch(self._model, x, y)
        other = copy.copy(self)
        other._batch = as_tensors(self._model, x, y)
        other._loss.build(*other._batch)
        other.gradient_evaluations = 0
        return other

    def value_and_grad(
        self, point: np.ndarray | None = None
    ) -> tuple[float, np.ndarray]:
        """Compute the loss, a float, and its gradient at a point, a vector."""
        self.gradient_evaluations += 1
        values = self._tensors("point", self.start if point is None else point)
        loss, gradient = self._scaled(self._loss.value_and_grad, values)
        return float(loss), gradient

    def hessian_vector_product(
        self, vector: np.ndarray, point: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute the Hessian at a point times a vector, a vector."""
        values = self._tensors("point", self.start if point is None else point)
        vectors = self._tensors("vector", vector)
        return self._scaled(self._loss.hessian_vector_product, values, vectors)[0]

    def _scaled(self, function, *values):
        """Compute a function of the scale of the loss: a smaller one if it overflows.

        The scale of training falls in the same way, by halves, over many steps.
        """
        while True:
            scale = ops.convert_to_tensor(self._scale, "float32")
            with drawing_from(self._randomness):
                found = function(*values, self._state, *self._batch, scale)
            found = [_numpy(each) for each in tree.flatten(found)]
            if self._scale <= 1 or np.isfinite(found[-1]).all():
                return found
            self._scale /= 8

    def flatten(self, values: Data) -> np.ndarray:
        """Make a vector of a list of arrays, or, with a layer, of one array."""
        return self._flatten("values", values)

    def _flatten(self, name, values):
        values = values if isinstance(values, (list, tuple)) else [values]
        values = [arguments.array(name, value) for value in values]
        _check_shape(name, [value.shape for value in values], self.shapes)
        vector = np.concatenate([np.ravel(value) for value in values])
        return vector.astype(_widest(self._dtypes))

    def unflatten(self, vector: np.ndarray) -> Any:
        """Make the list of arrays of a vector, or, with a layer, the array."""
        values = self._parts("vector", vector)
        return values if self._of_weights else values[0]

    def _parts(self, name, vector):
        vector = arguments.array(name, vector)
        _check_shape(name, vector.shape, self.start.shape)
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        parts = np.split(vector, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes)]

    def _tensors(self, name, vector):
        parts = self._parts(name, vector)
        return [ops.convert_to_tensor(*each) for each in zip(parts, self._dtypes)]


def _check_shape(name, found, expected):
    if found != expected:
        raise ValueError(
            f"Argument `{name}` must be of shape {expected}. "
            f"Received: {name} of shape {found}"
        )


def _loss_of(model, loss, layer, side, training):
    """Return the `ModelLoss` of these settings, a new one if the model has changed."""
    made_for = (
        _weak(layer),
        # `compile`, and `AMAT` where it changes the step, have the step made anew.
        _weak(model.train_function),
        _keras.compiled_loss(model),
        *map(id, [*model.variables, *model.metrics_variables]),
        *(each.trainable for each in _keras.layers_of(model)),
    )
    kept = _LOSSES.setdefault(model, {})
    key = (id(loss), id(layer), side, training)
    found, then, _ = kept.pop(key, (None, None, None))
    if then != made_for:
        found = ModelLoss(model, loss, layer, side, training)
        while len(kept) >= _LOSSES_OF_A_MODEL:
            del kept[next(iter(kept))]  # the one that was used least lately
    kept[key] = (found, made_for, loss)
    return found


def _weak(value):
    return None if value is None else weakref.ref(value)


def _loss_scale(model):
    """Return training's factor, which keeps float16 gradients from vanishing."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
        return float(ops.convert_to_numpy(scale))
    return 1.0


def _numpy(tensor):
    # A copy: NumPy may otherwise look into memory of the backend.
    return np.array(ops.convert_to_numpy(tensor))


class Call(NamedTuple):
    """One call of a layer, with its first input and its output."""

    layer: keras.layers.Layer
    input: Tensor
    output: Tensor

    @property
    def mask(self) -> Tensor | None:
        """That of the output, which a norm has from its input or as an argument."""
        return _keras.get_keras_mask(self.output)


def record(model, layers, x, training):
    """Record the calls of layers, in order, when the model is called on a batch.

    Nothing of the model changes. A layer that reads the output of another as it is has
    the same tensor as its input.
    """
    pure = ModelLoss(model, training=training)
    x, _ = as_tensors(model, x, None)
    calls = []

    def recording(layer):
        def call_with(x, call):
            calls.append(Call(layer, x, call(x)))
            return calls[-1].output

        return replacing_call(layer, call_with)

    with drawing_from(randomness()), contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(recording(layer))
        pure.outputs(*pure.values(), x)
    return calls
