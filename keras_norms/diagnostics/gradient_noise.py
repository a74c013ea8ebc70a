"""How much the gradient of a mini-batch varies from batch to batch."""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_norms._checks import arguments
from keras_norms._checks.models import (
    check_compiled_or_loss,
    check_loss,
    check_pair,
)
from keras_norms._types import Batch, Directory, Loss
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics.probe import Probe


class GradientNoise(NamedTuple):
    """What `gradient_noise` returns, over the batches with a finite gradient.

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

    Every batch starts from the same moving statistics and seeds: only the choice of
    samples makes the variance. The model does not change.

    Args:
        model, loss, training: See `Objective`.
        batches: Batches `(x, y)`, at least two, of one size.

    Returns:
        A `GradientNoise`. Its numbers are NaN if fewer than two batches have a finite
        gradient.

    Reference:

    - Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and Beyond,
      TPAMI 2023, Theorem 1 and Figure 10. https://doi.org/10.1109/TPAMI.2023.3319005
    """
    check_compiled_or_loss(model, loss)
    arguments.boolean("training", training)
    pairs: Iterable | None = None
    with contextlib.suppress(TypeError):  # of what cannot be iterated
        pairs = map(functools.partial(check_pair, model, name="batches"), batches)
    if pairs is None or isinstance(batches, (str, bytes)):
        raise arguments.wrong("batches", "an iterable of pairs", batches)
    if isinstance(batches, (list, tuple)):
        pairs = list(pairs)  # Check all before one is used.
    objective, index = None, -1
    losses, not_finite = [], []
    mean, spread = np.zeros(()), 0.0
    for index, (x, y) in enumerate(pairs):
        if objective is None:
            objective = Objective(model, x, y, loss, training=training)
        else:
            objective = objective.of_batch(x, y)
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
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(np.divide(squared_norm, variance))
    loss = float(np.mean(losses)) if losses else np.nan
    skipped = tuple(not_finite)
    return GradientNoise(variance, squared_norm, ratio, loss, index + 1, skipped)


class GradientNoiseProbe(Probe):
    """Measures `gradient_noise` in training.

    Its numbers are `variance`, `squared_norm`, `signal_to_noise`, `loss` and
    `not_finite`, the number of batches left out.

    Args:
        batches: List of batches `(x, y)`.
        every, log_dir: See `Probe`.
        loss: See `gradient_noise`.
    """

    prefix = "gradient"

    def __init__(
        self,
        batches: Sequence[Batch],
        every: int = 200,
        log_dir: Directory | None = None,
        loss: Loss = None,
    ) -> None:
        super().__init__(every, log_dir)
        if not isinstance(batches, (list, tuple)) or len(batches) < 2:
            raise arguments.wrong("batches", "a list of two batches or more", batches)
        for batch in batches:
            check_pair(None, batch, "batches")
        check_loss(loss)
        self._batches = batches
        self._loss = loss

    def measure(self) -> dict[str, float]:
        found = gradient_noise(self.model, self._batches, self._loss)._asdict()
        del found["batches"]
        return found | {"not_finite": len(found["not_finite"])}
