"""Eigenvalues and trace of the loss's Hessian over all trainable weights."""

from typing import NamedTuple

import numpy as np

from keras_norms._checks import arguments
from keras_norms.diagnostics.gradients import Objective


class Trace(NamedTuple):
    """What `hessian_trace` returns.

    Attributes:
        trace: Float, the mean over the samples.
        standard_error: Float, of that mean.
        samples: Array of shape `(samples,)`, the single estimates.
    """

    trace: float
    standard_error: float
    samples: np.ndarray


def hessian_eigenvalues(
    model,
    x,
    y,
    loss=None,
    *,
    count=1,
    which="LA",
    tolerance=1e-3,
    seed=0,
    training=True,
):
    """The top eigenvalues of the Hessian, with SciPy's Lanczos method.

    The Hessian is never formed: each iteration is one Hessian-vector product. All of
    them have the same dropout and noise, and nothing of the model changes.

    Args:
        model, x, y, loss, training: See `Objective`.
        count: Integer, how many, less than the number of weights.
        which: `"LA"` for the largest, `"SA"` for the smallest, `"LM"` for the largest
            in magnitude, as in `scipy.sparse.linalg.eigsh`.
        tolerance: Non-negative float, relative accuracy of the eigenvalues.
        seed: Integer, of the vector that the iteration starts from.

    Returns:
        Array of shape `(count,)`, from the largest to the smallest.

    Raises:
        ValueError: If an argument is out of its range, or a product is not finite. See
            also `Objective`.
        scipy.sparse.linalg.ArpackNoConvergence: If the method does not converge.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    arguments.choice("which", which, ("LA", "SA", "LM"))
    arguments.integer("count", count, at_least=1)
    arguments.number("tolerance", tolerance, at_least=0)
    arguments.integer("seed", seed, at_least=0)
    objective = Objective(model, x, y, loss, training=training)
    size = objective.start.size
    if count >= size:
        raise arguments.wrong("count", f"less than the {size} weights", count)
    product = LinearOperator(
        (size, size), lambda vector: _product(objective, vector), dtype="float64"
    )
    eigenvalues = eigsh(
        product,
        k=count,
        which=which,
        tol=tolerance,
        v0=np.random.default_rng(seed).normal(size=size),
        return_eigenvectors=False,
    )
    return np.sort(eigenvalues)[::-1]


def hessian_trace(model, x, y, loss=None, *, samples=10, seed=0, training=True):
    """Hutchinson's estimate of the Hessian's trace.

    The mean of `v^T H v` over vectors `v` of random signs. Its expectation is the
    trace.

    Args:
        model, x, y, loss, training: See `Objective`.
        samples: Integer of at least 2, the number of vectors.
        seed: Integer, of the vectors.

    Returns:
        A `Trace`.

    Raises:
        ValueError: If `samples` is less than 2, or a product is not finite. See also
            `Objective`.
    """
    arguments.integer("samples", samples, at_least=2)
    arguments.integer("seed", seed, at_least=0)
    objective = Objective(model, x, y, loss, training=training)
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], (samples, objective.start.size))
    estimates = np.array([v @ _product(objective, v) for v in signs])
    return Trace(
        trace=float(np.mean(estimates)),
        standard_error=float(np.std(estimates, ddof=1) / np.sqrt(samples)),
        samples=estimates,
    )


def _product(objective, vector):
    product = objective.hessian_vector_product(np.ravel(vector)).astype("float64")
    if not np.all(np.isfinite(product)):
        raise ValueError(
            "The Hessian of the loss is not finite at the weights of the model."
        )
    return product
