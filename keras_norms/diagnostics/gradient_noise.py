"""How much the gradient of a mini-batch varies from batch to batch."""

from collections.abc import Iterable
from typing import NamedTuple

import keras
import numpy as np

from keras_norms._checks import arguments
from keras_norms._checks.models import check_compiled_or_loss, check_pair
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.types import Batch, Loss

PAIRS = "hold pairs `(x, y)`"


class GradientNoise(NamedTuple):
    """What `gradient_noise` returns, all of it over the batches with a finite gradient.

    The sum of `variance` and `squared_norm` is the mean of `|g_i|^2`.

    Attributes:
        variance: The trace of the covariance of the batch gradients.
        squared_norm: `|E g|^2`, estimated without bias: it may be negative where there
            is more noise than gradient.
        signal_to_noise: `squared_norm / variance`.
        loss: The mean loss.
        batches: How many batches there are.
        not_finite: The indices of batches that were left out, because their loss or
            gradient is not finite.
    """

    variance: float
    squared_norm: float
    signal_to_noise: float
    loss: float
    batches: int
    not_finite: tuple[int, ...]


def gradient_noise(
    model: keras.Model,
    batches: Iterable[Batch],
    loss: Loss = None,
    *,
    training: bool = True,
) -> GradientNoise:
    """Measure the mean and variance of the mini-batch gradient at fixed weights.

    With `g_i` the gradient of batch `i` of `n` over all trainable weights:

    ```
    mean           = sum_i g_i / n
    variance       = sum_i |g_i - mean|^2 / (n - 1)
    squared_norm   = |mean|^2 - variance / n
    ```

    Every batch starts from the same moving statistics and seeds, so that the variance
    is that of the choice of samples alone. Nothing of the model changes.

    Args:
        model, loss, training: See `Objective`.
        batches: Batches `(x, y)`, at least two, of one size.

    Returns:
        A `GradientNoise`. Its numbers are NaN where fewer than two batches have a
        finite gradient.

    Reference:

    - Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and Beyond,
      TPAMI 2023, Theorem 1 and Figure 10. https://doi.org/10.1109/TPAMI.2023.3319005
    """
    check_compiled_or_loss(model, loss)
    arguments.boolean("training", training)
    try:
        iterator = None if isinstance(batches, (str, bytes)) else iter(batches)
    except TypeError:
        iterator = None
    if iterator is None:
        raise arguments.wrong("batches", "an iterable of pairs", batches)
    # Those of a list at once, others when they come.
    for batch in batches if isinstance(batches, (list, tuple)) else ():
        check_pair(model, batch, "batches", PAIRS)
    objective, index = None, -1
    losses, not_finite = [], []
    mean, spread = np.zeros(()), 0.0
    for index, batch in enumerate(iterator):
        check_pair(model, batch, "batches", PAIRS)
        if objective is None:
            objective = Objective(model, *batch, loss, training=training)
        else:
            objective = objective.of_batch(*batch)
        value, gradient = objective.value_and_grad()
        gradient = gradient.astype("float64")
        if not np.isfinite(value) or not np.all(np.isfinite(gradient)):
            not_finite.append(index)
            continue
        losses.append(value)
        # Welford's recurrence: no gradient is kept.
        deviation = gradient - mean
        mean = mean + deviation / len(losses)
        spread += float(deviation @ (gradient - mean))
    if index < 1:
        raise ValueError(
            "Argument `batches` must hold at least two batches. "
            f"Received: {index + 1} batches"
        )
    n = len(losses)
    variance = squared_norm = np.nan
    if n > 1:
        variance = spread / (n - 1)
        squared_norm = float(mean @ mean) - variance / n
    ratio = np.inf if squared_norm > 0 else np.nan
    if variance != 0:
        ratio = squared_norm / variance
    return GradientNoise(
        variance=variance,
        squared_norm=squared_norm,
        signal_to_noise=ratio,
        loss=float(np.mean(losses)) if losses else np.nan,
        batches=index + 1,
        not_finite=tuple(not_finite),
    )
