"""Gradients of a model's loss, and its Hessian: products, eigenvalues, trace."""

from typing import Any, NamedTuple

import keras
import numpy as np

from keras_norms._checks import arguments
from keras_norms._types import Data, LayerOrName, Loss
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.optional import optional


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
        A `LossAndGradient`, in float32, or float64 if a weight has it.
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

    The gradient of CBN with a known learning rate treats the ratio of its averages to
    the batch's statistics as a constant. So does the Hessian. It is symmetric, but then
    not the derivative of that gradient.

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


class Trace(NamedTuple):
    """What `hessian_trace` returns.

    Attributes:
        trace: The mean over the samples.
        standard_error: Of that mean.
        samples: Of shape `(samples,)`, the single estimates.
    """

    trace: float
    standard_error: float
    samples: np.ndarray


def hessian_eigenvalues(
    model: keras.Model,
    x: Data,
    y: Data,
    loss: Loss = None,
    *,
    count: int = 1,
    which: str = "LA",
    tolerance: float = 1e-3,
    seed: int = 0,
    training: bool = True,
) -> np.ndarray:
    """Compute the top eigenvalues of the Hessian, with SciPy's Lanczos method.

    The Hessian is never formed: each iteration is one Hessian-vector product. All of
    them have the same dropout and noise, and nothing of the model changes.

    Args:
        model, x, y, loss, training: See `Objective`.
        count: How many, less than the number of weights.
        which: `"LA"` for the largest, `"SA"` for the smallest, `"LM"` for the largest
            in magnitude, as in `scipy.sparse.linalg.eigsh`.
        tolerance: Non-negative, relative accuracy of the eigenvalues.
        seed: Of the vector that the iteration starts from.

    Returns:
        Array of shape `(count,)`, from the largest to the smallest.

    Raises:
        ValueError: If a product is not finite.
        scipy.sparse.linalg.ArpackNoConvergence: If the method does not converge.
    """
    linalg = optional("scipy.sparse.linalg", "`hessian_eigenvalues`", "SciPy")
    objective = Objective(model, x, y, loss, training=training)
    size = objective.start.size
    arguments.choice("which", which, ("LA", "SA", "LM"))
    arguments.integer("count", count, at_least=1, below=size)
    arguments.number("tolerance", tolerance, at_least=0)
    arguments.integer("seed", seed, at_least=0)
    product = linalg.LinearOperator(
        (size, size), lambda vector: _product(objective, vector), dtype="float64"
    )
    v0 = np.random.default_rng(seed).normal(size=size)
    found = linalg.eigsh(
        product, count, which=which, v0=v0, tol=tolerance, return_eigenvectors=False
    )
    return np.sort(found)[::-1]


def hessian_trace(
    model: keras.Model,
    x: Data,
    y: Data,
    loss: Loss = None,
    *,
    samples: int = 10,
    seed: int = 0,
    training: bool = True,
) -> Trace:
    """Estimate the Hessian's trace with Hutchinson's method.

    It is the expectation of `v^T H v` over vectors `v` of random signs.

    Args:
        model, x, y, loss, training: See `Objective`.
        samples: The number of vectors, at least 2.
        seed: Of the vectors.

    Raises:
        ValueError: If a product is not finite.
    """
    arguments.integer("samples", samples, at_least=2)
    arguments.integer("seed", seed, at_least=0)
    objective = Objective(model, x, y, loss, training=training)
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], (samples, objective.start.size))
    estimates = np.array([v @ _product(objective, v) for v in signs])
    error = np.std(estimates, ddof=1) / np.sqrt(samples)
    return Trace(float(np.mean(estimates)), float(error), estimates)


def _product(objective, vector):
    product = objective.hessian_vector_product(np.ravel(vector)).astype("float64")
    if not np.all(np.isfinite(product)):
        raise ValueError("The Hessian of the loss is not finite at these weights.")
    return product
