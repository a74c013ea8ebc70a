"""How much the gradient of a mini-batch varies from batch to batch."""

from typing import NamedTuple

import numpy as np

from keras_norms._checks import arguments
from keras_norms._checks.models import check_batch, check_compiled_or_loss
from keras_norms.diagnostics.gradients import Objective


class GradientNoise(NamedTuple):
    """What `gradient_noise` returns, all of it over the batches with a finite gradient.

    The sum of `variance` and `squared_norm` is the mean of `|g_i|^2`.

    Attributes:
        variance: Float, the trace of the covariance of the batch gradients.
        squared_norm: Float, `|E g|^2`, estimated without bias: it may be negative where
            there is more noise than gradient.
        signal_to_noise: Float, `squared_norm / variance`.
        loss: Float, the mean loss.
        batches: Integer, how many batches there are.
        not_finite: Tuple of the indices of batches that were left out, because their
            loss or gradient is not finite.
    """

    variance: float
    squared_norm: float
    signal_to_noise: float
    loss: float
    batches: int
    not_finite: tuple


def gradient_noise(model, batches, loss=None, *, training=True):
    """Mean and variance of the mini-batch gradient at fixed weights.

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
        batches: Iterable of batches `(x, y)`, at least two, of one size.

    Returns:
        A `GradientNoise`. Its numbers are NaN where fewer than two batches have a
        finite gradient.

    Raises:
        ValueError: If there are fewer than two batches, or one is not a pair. See also
            `Objective`.

    Reference:

    - Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and Beyond,
      TPAMI 2023, Theorem 1 and Figure 10. https://doi.org/10.1109/TPAMI.2023.3319005
    """
    objective = None
    losses, not_finite = [], []
    mean, spread = 0.0, 0.0
    index = -1
    check_compiled_or_loss(model, loss)
    arguments.boolean("training", training)
    try:
        iterator = iter(None if isinstance(batches, (str, bytes)) else batches)
    except TypeError:
        raise arguments.wrong("batches", "an iterable of pairs", batches) from None
    # Those of a list at once, others when they come.
    for batch in batches if isinstance(batches, (list, tuple)) else ():
        _check_pair(model, batch)
    for index, batch in enumerate(iterator):
        _check_pair(model, batch)
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
    return GradientNoise(
        variance=variance,
        squared_norm=squared_norm,
        signal_to_noise=_ratio(squared_norm, variance),
        loss=float(np.mean(losses)) if losses else np.nan,
        batches=index + 1,
        not_finite=tuple(not_finite),
    )


def _check_pair(model, batch):
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            "Argument `batches` must hold pairs `(x, y)`. "
            f"Received: a batch of class {type(batch).__name__}"
        )
    check_batch(model, *batch, names=("batches", "batches"))


def _ratio(signal, noise):
    if noise == 0:
        return np.inf if signal > 0 else np.nan
    return signal / noise
