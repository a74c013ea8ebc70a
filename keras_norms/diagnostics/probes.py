"""Callbacks that measure a model while it is trained, and leave it as it is."""

import os
from collections.abc import Sequence

import keras
from keras import ops

from keras_norms._checks import arguments
from keras_norms._checks.models import check_layers, check_loss, check_pair
from keras_norms.diagnostics._engine.objective import Objective
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


class Probe(keras.callbacks.Callback):
    """Base of callbacks that measure every so many steps.

    A subclass defines `measure`, which returns a dict of numbers, or `before_step` and
    `after_step`, which record one. Each number goes into the `logs` of the step and of
    the epoch under `<prefix>_<key>`, so that it is shown and kept in the `History`; to
    TensorBoard, if there is a `log_dir`; and into `history`.

    It measures on batches that it is given: Keras does not show the batch of a step to
    callbacks. Put a probe after `AMAT`.

    Args:
        every: Positive: measure before steps 0, `every`, 2 `every` ... of the
            optimizer. With `steps_per_execution` it is the first execution that reaches
            such a step.
        log_dir: Directory where an event file for TensorBoard is written, or `None`.
            The package `tensorboard` must be installed; TensorFlow need not.

    Attributes:
        history: Dict of lists of equal length: `"step"`, and one for each number. A
            band is drawn between a pair of lists that end in `_min` and `_max`.
    """

    prefix: str | None = None

    def __init__(self, every: int, log_dir: Directory | None = None) -> None:
        super().__init__()
        self.every = arguments.integer("every", every, at_least=1)
        if not isinstance(log_dir, (str, os.PathLike, type(None))):
            raise arguments.wrong("log_dir", "a path, or None", log_dir)
        self.log_dir = log_dir
        self.history: dict[str, list[float]] = {}
        self._writer = None
        self._latest: dict[str, float] = {}
        if log_dir is not None:
            # Here, so that it is not missing only when training begins.
            from tensorboard.summary import Writer

            self._open_writer = Writer

    def measure(self) -> dict[str, float]:
        """Measure `self.model`."""
        raise NotImplementedError

    def on_train_begin(self, logs=None):
        iterations = getattr(self.model.optimizer, "iterations", 0)
        self._step = int(ops.convert_to_numpy(iterations))
        self._next = -(-self._step // self.every) * self.every
        self._latest = {}
        if self.log_dir is not None:
            self._writer = self._open_writer(str(self.log_dir))

    def on_epoch_begin(self, epoch, logs=None):
        self._steps_of_epoch = 0

    def on_train_batch_begin(self, batch, logs=None):
        self._is_due = self._step >= self._next
        if self._is_due:
            # The first touch of `self.model` in a step brings the state from JAX.
            self.before_step()

    def on_train_batch_end(self, batch, logs=None):
        if self._is_due:
            self.after_step()
            self._next = (self._step // self.every + 1) * self.every
        self._step += batch + 1 - self._steps_of_epoch
        self._steps_of_epoch = batch + 1
        if logs is not None:
            logs.update(self._latest)

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs.update(self._latest)

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def before_step(self):
        """Called with the weights that a step starts from."""
        self.record(self.measure())

    def after_step(self):
        """Called with the weights that the step has made."""

    def record(self, numbers: dict[str, float]) -> None:
        """Put a dict of numbers where they belong."""
        self.history.setdefault("step", []).append(self._step)
        for key, value in numbers.items():
            self.history.setdefault(key, []).append(float(value))
        self._latest = {
            f"{self.prefix}_{key}": float(value) for key, value in numbers.items()
        }
        if self._writer is not None:
            for key, value in self._latest.items():
                self._writer.add_scalar(key, value, self._step)
            self._writer.flush()


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
        self._settings = {
            "loss": loss,
            "learning_rate": learning_rate,
            "step_range": step_range,
            "points": points,
            "direction": direction,
            "seed": seed,
        }

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
        _, gradient = objective.value_and_grad()
        found = shift_of(
            objective,
            gradient,
            objective.flatten(updated),
            weights_of_layers(model, self._layers),
        )
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
