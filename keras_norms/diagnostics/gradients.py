"""Gradients and Hessian-vector products of a model's loss, on any backend."""

from typing import Any, NamedTuple

import keras

from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.types import Data, LayerOrName, Loss


class LossAndGradient(NamedTuple):
    """What `value_and_grad` returns.

    Attributes:
        loss: Float.
        gradient: List of arrays, one for each trainable weight of the model and of its
            shape. With a layer, one array of the shape of its input or output.
    """

    loss: float
    gradient: Any


def value_and_grad(
    model: keras.Model,
    x: Data,
    y: Data,
    loss: Loss = None,
    *,
    layer: LayerOrName | None = None,
    side: str = "output",
    training: bool = True,
) -> LossAndGradient:
    """Compute the loss on a batch and its gradient. Nothing of the model changes.

    Example:

    >>> loss, gradient = value_and_grad(model, x, y)
    >>> _, activation_gradient = value_and_grad(model, x, y, layer="conv2d_3")

    Args:
        model, x, y, loss, layer, side, training: See `Objective`.

    Returns:
        A `LossAndGradient`, in float32, or float64 where a weight has it.
    """
    objective = Objective(model, x, y, loss, layer=layer, side=side, training=training)
    value, gradient = objective.value_and_grad()
    return LossAndGradient(value, objective.unflatten(gradient))


def hessian_vector_product(
    model: keras.Model,
    x: Data,
    y: Data,
    vector: Any,
    loss: Loss = None,
    *,
    layer: LayerOrName | None = None,
    side: str = "output",
    training: bool = True,
) -> Any:
    """Multiply the loss's Hessian by a vector. Nothing of the model changes.

    It is the derivative of `<gradient, vector>`, reverse over reverse, exact up to
    rounding, at the cost of about two gradients.

    CBN with a known learning rate holds the ratio of its averages to the batch's
    statistics constant in its gradient. So does the Hessian, which is symmetric, but
    then not the derivative of that gradient.

    Args:
        model, x, y, loss, layer, side, training: See `Objective`.
        vector: Of the shape of the gradient that `value_and_grad` returns: a list of
            arrays, or with a layer an array.

    Returns:
        The product, of the shape of `vector`.
    """
    objective = Objective(model, x, y, loss, layer=layer, side=side, training=training)
    product = objective.hessian_vector_product(objective._flatten("vector", vector))
    return objective.unflatten(product)
