"""The loss of a model as a function of a flat vector."""

import copy
import weakref
from typing import Any, Self

import keras
import numpy as np
from keras import ops, tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_batch, check_compiled_or_loss
from keras_norms._types import Data, LayerOrName, Loss
from keras_norms.diagnostics._engine.differentiation import drawing_from, randomness
from keras_norms.diagnostics._engine.model_loss import (
    ModelLoss,
    as_tensors,
    weak_reference,
    widest,
)
from keras_norms.diagnostics._engine.reading import find_layer

# Compiled functions: model -> settings -> `ModelLoss`. They hold no model alive.
_LOSSES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_LOSSES_OF_A_MODEL = 8


class Objective:
    """The loss of a model on one batch, as a function of a flat vector.

    The vector holds all trainable weights, or the input or output of a layer. Weights,
    moving statistics and seed states are those from when the object was made. Every
    evaluation starts from them and does not change them: dropout and noise are the same
    at every point. It is the loss that training minimises, regularizers included, with
    layers in training mode.

    The functions are compiled (`tf.function`, `jax.jit`) once for each model, loss and
    shape of the batch. Later objectives of the same model use them again.

    Args:
        model: A built `keras.Model`: Functional, Sequential or subclassed.
        x: The inputs of the batch: an array, or any structure that the model takes.
        y: Its targets.
        loss: As in `model.compile`. `None`: the compiled one.
        layer: `None`, or a layer of the model or its name: then the vector is the
            layer's input or output for this batch, and everything before the layer
            stays the same at every point.
        side: `"input"` or `"output"` of `layer`.
        training: Boolean, whether layers run in training mode.

    Attributes:
        start: The vector from when the object was made, float32, or float64 if a weight
            has it. `None` instead of a point means `start`.
        shapes: List of the shapes of the arrays in the vector.
        gradient_evaluations: Number of gradients computed so far.

    Raises:
        ValueError: If the model is not built or has no loss or no trainable weights, if
            the batch is empty, or if the layer is not in the model, does not have one
            tensor of floats at `side`, or is not called exactly once.
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
        # Copies: training may continue in the memory of the variables.
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
            raise ValueError(
                "The objective of a layer's activations cannot change its batch. Make "
                "a new `Objective`."
            )
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
        return vector.astype(widest(self._dtypes))

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

    def _rounded(self, point):
        """Round a point as its tensors do, such as those of bfloat16 weights."""
        return self.flatten([*map(_numpy, self._tensors("point", point))])

    def _tensors(self, name, vector):
        return list(map(ops.convert_to_tensor, self._parts(name, vector), self._dtypes))


def _check_shape(name, found, expected):
    if found != expected:
        raise ValueError(
            f"Argument `{name}` must be of shape {expected}. "
            f"Received: {name} of shape {found}"
        )


def _loss_of(model, loss, layer, side, training):
    """Return the `ModelLoss` of these settings, a new one if the model has changed."""
    made_for = (
        weak_reference(layer),
        # `compile`, and `AMAT` if it changes the step, make a new one.
        weak_reference(model.train_function),
        _keras.compiled_loss(model),
        *map(id, [*model.variables, *model.metrics_variables]),
        *((each.trainable, type(each)) for each in _keras.layers_of(model)),  # `freeze`
    )
    kept = _LOSSES.setdefault(model, {})
    key = (id(loss), id(layer), side, training)
    found, then, _ = kept.pop(key, (None, None, None))
    if then != made_for:
        found = ModelLoss(model, loss, layer, side, training=training)
        while len(kept) >= _LOSSES_OF_A_MODEL:
            del kept[next(iter(kept))]  # the least recently used
    kept[key] = (found, made_for, loss)
    return found


def _loss_scale(model):
    """Return training's factor, which keeps float16 gradients from vanishing."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
        return float(ops.convert_to_numpy(scale))
    return 1.0


def _numpy(tensor):
    # A copy: otherwise NumPy may share memory with the backend.
    return np.array(ops.convert_to_numpy(tensor))
