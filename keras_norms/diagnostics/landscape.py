"""The loss around the weights: along a line, and its curvature."""

from typing import Any, NamedTuple

import keras
import numpy as np

from keras_norms._checks import arguments
from keras_norms._checks.models import check_loss
from keras_norms._types import BatchOrFunction, Data, Directory, Loss
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.reading import learning_rate_of
from keras_norms.diagnostics.probe import Probe, batch_by_step


class Landscape(NamedTuple):
    """What `landscape` returns. Extremes are over the points that are finite.

    Attributes:
        loss: `L(W)`.
        gradient_norm: `|g|_2`.
        loss_range: `(min, max)` of `losses`.
        gradient_distance: `(min, max)` of `distances`.
        effective_beta: The maximum of `betas`.
        steps: Of shape `(points,)`, the step lengths `s`.
        losses: `L(W - s d)`.
        distances: `|grad L(W - s d) - g|_2`.
        betas: `distances / |s d|_2`.
        not_finite: The step lengths at which loss or gradient is not finite,
            with `nan` for each. It holds all of them if `g` is not finite.
        gradient_evaluations: At most `points + 1`.
    """

    loss: float
    gradient_norm: float
    loss_range: tuple[float, float]
    gradient_distance: tuple[float, float]
    effective_beta: float
    steps: np.ndarray
    losses: np.ndarray
    distances: np.ndarray
    betas: np.ndarray
    not_finite: tuple[float, ...]
    gradient_evaluations: int


def landscape(
    model: keras.Model,
    x: Data,
    y: Data,
    loss: Loss = None,
    *,
    learning_rate: float | None = None,
    step_range: tuple[float, float] = (0.5, 4.0),
    points: int = 8,
    direction: str = "gradient",
    seed: int = 0,
    training: bool = True,
) -> Landscape:
    """Measure the smoothness of the loss along a line through the weights.

    With the weights `W`, `g = grad L(W)` on this batch and a direction `d`, it looks at
    `W - s d` for each step length `s`. `Landscape` has the formulas.

    All points have the same dropout and noise. The model does not change. A step of SGD
    without momentum goes along this line; steps of Adam and others do not.

    Args:
        model, x, y, loss, training: See `Objective`.
        learning_rate: Positive. `None`: the optimizer's present one.
        step_range: `(least, largest)` step length, in units of `learning_rate`. The
            paper has (1/2, 4), and (1/100, 30) for the deep linear network.
        points: Number of step lengths, evenly spaced.
        direction: `"gradient"`: `d = g`. `"random"`: a Gaussian vector of the length of
            `g`.
        seed: Of the random direction.

    Reference:

    - Santurkar, Tsipras, Ilyas and Madry, How Does Batch Normalization Help
      Optimization?, NeurIPS 2018, Section 3.2, Appendix A.2.2, Figures 4, 9, 11.
      https://arxiv.org/abs/1805.11604
    """
    objective = Objective(model, x, y, loss, training=training)
    relative_steps = _relative_steps(step_range, points, direction, seed)
    steps = learning_rate_of(model, learning_rate) * relative_steps
    value, gradient = objective.value_and_grad()
    gradient = gradient.astype("float64")
    norm = float(np.linalg.norm(gradient))
    along = gradient
    if direction == "random":
        along = np.random.default_rng(seed).normal(size=gradient.shape)
        along = along * (norm / np.linalg.norm(along))
    measured = np.full((points, 3), np.nan)
    if np.isfinite(norm):  # Otherwise there is nowhere to go.
        measured[:] = [_measure(objective, gradient, s * along) for s in steps]
    finite = np.all(np.isfinite(measured[:, :2]), 1)
    measured[~finite] = np.nan
    losses, distances, lengths = measured.T
    with np.errstate(divide="ignore", invalid="ignore"):
        betas = distances / lengths
    return Landscape(
        loss=value,
        gradient_norm=norm,
        loss_range=_range(losses),
        gradient_distance=_range(distances),
        effective_beta=_range(betas)[1],
        steps=steps,
        losses=losses,
        distances=distances,
        betas=betas,
        not_finite=tuple(steps[~finite].tolist()),
        gradient_evaluations=objective.gradient_evaluations,
    )


def _measure(objective, gradient, displacement):
    """Compute loss, gradient distance and length of a displacement from the start."""
    point = objective._rounded(objective.start - displacement)
    loss, there = objective.value_and_grad(point)
    # The step after rounding.
    step = point.astype("float64") - objective.start
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.linalg.norm(there.astype("float64") - gradient)
    return loss, distance, np.linalg.norm(step)


def _range(values):
    values = values[~np.isnan(values)]
    return (float(min(values)), float(max(values))) if values.size else (np.nan, np.nan)


def _relative_steps(step_range, points, direction, seed):
    """Check where to measure; return the step lengths in units of the rate."""
    try:
        least, largest = map(arguments.real, step_range)
    except (TypeError, ValueError):  # No two of them.
        least = largest = np.nan
    if not 0 < least <= largest < np.inf:
        raise arguments.wrong("step_range", "two positive numbers in order", step_range)
    arguments.integer("points", points, at_least=1)
    arguments.choice("direction", direction, ("gradient", "random"))
    arguments.integer("seed", seed, at_least=0)
    return np.linspace(least, largest, points)


class LandscapeProbe(Probe):
    """Measures `landscape` in training: `fit(..., callbacks=[LandscapeProbe(batch)])`.

    Its numbers are `loss`, `gradient_norm`, `loss_min`, `loss_max`,
    `gradient_distance_min`, `gradient_distance_max`, `effective_beta` and `not_finite`,
    the number of points that are not finite. The bands of the paper's Figure 4 are
    between those that end in `_min` and `_max`.

    Args:
        batch: A batch `(x, y)`, or a function of the step that returns one.
        every, log_dir: See `Probe`.
        loss, learning_rate, step_range, points, direction, seed: See `landscape`.

    Example:

    >>> probe = LandscapeProbe((x[:128], y[:128]), every=200)
    >>> model.fit(x, y, callbacks=[AMAT(), probe])
    >>> probe.history["effective_beta"]
    """

    prefix = "landscape"

    def __init__(
        self,
        batch: BatchOrFunction,
        every: int = 200,
        log_dir: Directory | None = None,
        loss: Loss = None,
        learning_rate: float | None = None,
        step_range: tuple[float, float] = (0.5, 4.0),
        points: int = 8,
        direction: str = "gradient",
        seed: int = 0,
    ) -> None:
        super().__init__(every, log_dir)
        self._batch = batch_by_step(batch)
        check_loss(loss)
        if learning_rate is not None:
            arguments.number("learning_rate", learning_rate, above=0)
        _relative_steps(step_range, points, direction, seed)
        self._settings: dict[str, Any] = dict(
            loss=loss, learning_rate=learning_rate, step_range=step_range
        )
        self._settings |= dict(points=points, direction=direction, seed=seed)

    def measure(self) -> dict[str, float]:
        found = landscape(self.model, *self._batch(self._step), **self._settings)
        return {
            "loss": found.loss,
            "gradient_norm": found.gradient_norm,
            "loss_min": found.loss_range[0],
            "loss_max": found.loss_range[1],
            "gradient_distance_min": found.gradient_distance[0],
            "gradient_distance_max": found.gradient_distance[1],
            "effective_beta": found.effective_beta,
            "not_finite": len(found.not_finite),
        }
