"""Callbacks that measure a model while it is trained, and leave it as it is."""

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_norms._checks import arguments
from keras_norms._checks.models import check_layers, check_loss, check_pair
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.probe import Probe
from keras_norms.diagnostics._engine.types import (
    Batch,
    BatchOrFunction,
    Directory,
    Layers,
    Loss,
)
from keras_norms.diagnostics.covariate_shift import shift_of, weights_of_layers
from keras_norms.diagnostics.gradient_noise import PAIRS, gradient_noise
from keras_norms.diagnostics.landscape import DIRECTIONS, landscape, step_lengths


class LandscapeProbe(Probe):
    """Measures `landscape` in training: `fit(..., callbacks=[LandscapeProbe(batch)])`.

    Its numbers are `loss`, `gradient_norm`, `loss_min`, `loss_max`,
    `gradient_distance_min`, `gradient_distance_max`, `effective_beta` and `not_finite`,
    the number of points that are not finite. For the bands of the paper's Figure 4,
    draw between `loss_min` and `loss_max` over `step`, and so on.

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
        self._batch = _batches(batch)
        check_loss(loss)
        if learning_rate is not None:
            arguments.number("learning_rate", learning_rate, above=0)
        step_lengths(1.0, step_range, points)
        arguments.choice("direction", direction, DIRECTIONS)
        arguments.integer("seed", seed, at_least=0)
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
            check_pair(None, batch, "batches", PAIRS)
        check_loss(loss)
        self._batches = batches
        self._loss = loss

    def measure(self) -> dict[str, float]:
        found = gradient_noise(self.model, self._batches, self._loss)
        return {
            "variance": found.variance,
            "squared_norm": found.squared_norm,
            "signal_to_noise": found.signal_to_noise,
            "loss": found.loss,
            "not_finite": len(found.not_finite),
        }


class CovariateShiftProbe(Probe):
    """Measures `covariate_shift` in training, for the steps that the optimizer takes.

    Its numbers are `<layer>_distance` and `<layer>_cosine` of each layer. A step is one
    execution: with `steps_per_execution=N` it is that of N batches.

    Args:
        batch: A batch `(x, y)`, or a function of the step that returns one: Definition
            2.1 takes the batch of the step itself.
        layers: See `covariate_shift`.
        every, log_dir: See `Probe`.
        loss: See `covariate_shift`.
    """

    prefix = "shift"

    def __init__(
        self,
        batch: BatchOrFunction,
        layers: Layers | None = None,
        every: int = 200,
        log_dir: Directory | None = None,
        loss: Loss = None,
    ) -> None:
        super().__init__(every, log_dir)
        check_layers(layers)
        check_loss(loss)
        self._batch = _batches(batch)
        self._layers = layers
        self._loss = loss

    def before_step(self):
        self._objective = Objective(
            self.model, *self._batch(self._step), loss=self._loss
        )

    def after_step(self):
        model, objective = self.model, self._objective
        self._objective = None
        updated = [ops.convert_to_numpy(v) for v in model.trainable_variables]
        places = weights_of_layers(model, self._layers)
        _, gradient = objective.value_and_grad()
        found = shift_of(objective, gradient, objective.flatten(updated), places)
        numbers = {}
        for name, distance, cosine in zip(found.layers, found.distances, found.cosines):
            numbers[f"{name}_distance"] = distance
            numbers[f"{name}_cosine"] = cosine
        self.record(numbers)


def _batches(batch):
    """Return a function of the step that returns a batch."""
    if callable(batch):
        return batch
    expected = "be a pair `(x, y)`, or a function of the step that returns one"
    check_pair(None, batch, "batch", expected)
    return lambda step: batch
