"""The loss of a model on one batch, as a function of a flat vector, compiled."""

import copy
import weakref
from typing import Any, Self

import keras
import numpy as np
from keras import ops

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_batch, check_compiled_or_loss
from keras_norms.diagnostics._engine.differentiation import (
    compiler,
    differentiate,
    drawing_from,
    randomness,
    twice_differentiable,
)
from keras_norms.diagnostics._engine.layers import find_layer
from keras_norms.diagnostics._engine.model_loss import ModelLoss, as_tensors
from keras_norms.diagnostics._engine.types import Data, LayerOrName, Loss

# Compiled functions: model -> settings -> `_Program`. They hold no model alive.
_PROGRAMS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_PROGRAMS_OF_A_MODEL = 8


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
        self._model = model  # The program does not keep it.
        self._of_weights = layer is None
        self._program = _program(model, loss, layer, side, training)
        pure = self._program.pure
        values, state = pure.values()
        self._batch = as_tensors(model, x, y)
        pure.build(*self._batch)
        self._randomness = randomness()
        # Copies, for training may go on in the memory of the variables.
        self._state = [ops.copy(value) for value in state]
        if not self._of_weights:
            with drawing_from(self._randomness):
                values = [self._program.activation(self._state, self._batch[0])]
        self._scale = ops.convert_to_tensor(_loss_scale(model), "float32")
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
        other._program.pure.build(*other._batch)
        other.gradient_evaluations = 0
        return other

    def value_and_grad(
        self, point: np.ndarray | None = None
    ) -> tuple[float, np.ndarray]:
        """Compute the loss, a float, and its gradient at a point, a vector."""
        self.gradient_evaluations += 1
        values = self._tensors("point", point)
        with drawing_from(self._randomness):
            loss, gradient = self._program.value_and_grad(
                values, self._state, *self._batch, self._scale
            )
        return float(ops.convert_to_numpy(loss)), _numpy(gradient)

    def hessian_vector_product(
        self, vector: np.ndarray, point: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute the Hessian at a point times a vector, a vector."""
        values = self._tensors("point", point)
        vectors = self._tensors("vector", vector)
        with drawing_from(self._randomness):
            product = self._program.hessian_vector_product(
                values, vectors, self._state, *self._batch, self._scale
            )
        return _numpy(product)

    def flatten(self, values: Data) -> np.ndarray:
        """Make a vector of a list of arrays, or, with a layer, of one array."""
        return self._flatten("values", values)

    def _flatten(self, name, values):
        values = values if isinstance(values, (list, tuple)) else [values]
        values = [arguments.array(name, value) for value in values]
        shapes = [value.shape for value in values]
        if shapes != self.shapes:
            raise ValueError(
                f"Argument `{name}` must have the shapes {self.shapes}. "
                f"Received: {name} of shapes {shapes}"
            )
        vector = np.concatenate([np.ravel(value) for value in values])
        return vector.astype(_widest(self._dtypes))

    def unflatten(self, vector: np.ndarray) -> Any:
        """Make the list of arrays of a vector, or, with a layer, the array."""
        values = self._parts("vector", vector)
        return values if self._of_weights else values[0]

    def _parts(self, name, vector):
        """Split a vector into arrays, if it is like `start`."""
        vector = arguments.array(name, vector)
        if vector.shape != self.start.shape:
            raise ValueError(
                f"Argument `{name}` must have the shape {self.start.shape}. "
                f"Received: {name} of shape {vector.shape}"
            )
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        parts = np.split(vector, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes)]

    def _tensors(self, name, vector):
        vector = self.start if name == "point" and vector is None else vector
        return [
            ops.convert_to_tensor(part, dtype)
            for part, dtype in zip(self._parts(name, vector), self._dtypes)
        ]


class _Program:
    """The compiled functions of a model's loss."""

    def __init__(self, pure, compiled):
        self.pure = pure
        self.activation = compiled(pure.activation)
        self.value_and_grad = compiled(self._value_and_grad)
        self.hessian_vector_product = compiled(self._hessian_vector_product)

    def _scaled(self, values, state, x, y, scale):
        loss = self.pure(values, state, x, y)
        return loss * ops.cast(scale, loss.dtype)

    def _value_and_grad(self, values, state, x, y, scale):
        scaled, gradients = differentiate(
            lambda values: self._scaled(values, state, x, y, scale), values
        )
        return scaled / ops.cast(scale, scaled.dtype), _flat(gradients, scale)

    def _hessian_vector_product(self, values, vectors, state, x, y, scale):
        def slope(values):
            _, gradients = differentiate(
                lambda values: self._scaled(values, state, x, y, scale),
                values,
                differentiable=True,
            )
            return ops.sum(_flat(gradients, 1) * _flat(vectors, 1))

        with twice_differentiable():
            return _flat(differentiate(slope, values)[1], scale)


def _widest(dtypes):
    names = map(keras.backend.standardize_dtype, dtypes)
    return "float64" if "float64" in names else "float32"


def _flat(gradients, scale):
    dtype = _widest(gradient.dtype for gradient in gradients)
    flat = [ops.reshape(ops.cast(g, dtype), (-1,)) for g in gradients]
    return ops.concatenate(flat) / ops.cast(scale, dtype)


def _program(model, loss, layer, side, training):
    """Return the program of these settings, a new one if the model has changed."""
    variables = [*model.variables, *model.metrics_variables]
    made_for = (
        # `compile`, and `AMAT` where it changes the step, have the step made anew.
        None if model.train_function is None else weakref.ref(model.train_function),
        _keras.compiled_loss(model),
        *(id(variable) for variable in variables),
        *(each.trainable for each in _keras.layers_of(model)),
    )
    programs = _PROGRAMS.setdefault(model, {})
    key = (id(loss), id(layer), side, training)
    if key in programs:
        program, then, _ = programs[key]
        if then == made_for and program.pure.layer is layer:
            return program
        del programs[key]
    while len(programs) >= _PROGRAMS_OF_A_MODEL:
        del programs[next(iter(programs))]
    pure = ModelLoss(model, loss, layer, side, training)
    program = _Program(pure, compiler(model))
    programs[key] = (program, made_for, loss)
    return program


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
