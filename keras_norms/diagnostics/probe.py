"""The base of callbacks that measure a model in training without changing it."""

import functools
import os
import warnings

import keras
from keras import ops

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_pair
from keras_norms._types import Directory, Logs
from keras_norms.diagnostics._engine.optional import optional


class Probe(keras.callbacks.Callback):
    """Base of callbacks that measure every so many steps.

    A subclass defines `measure`, which returns a dict of numbers, or `before_step` and
    `after_step`, which record one. Each number goes into `history`, to TensorBoard if
    there is a `log_dir`, and into the `logs` of the step and the epoch as
    `<prefix>_<key>`: Keras shows it and keeps it in the `History`.

    It measures on given batches, because Keras does not show the batch of a step to
    callbacks. Put a probe after `AMAT`.

    Args:
        every: Positive: measure before steps 0, `every`, 2 `every` ... A step is a
            batch, even if the optimizer accumulates the gradients of several. With
            `steps_per_execution` it is the first execution that reaches such a step.
        log_dir: Directory for an event file for TensorBoard, or `None`. The package
            `tensorboard` must be installed; TensorFlow need not.

    Attributes:
        history: Dict of lists: `"step"`, and one for each number. Several `fit`s add to
            the same lists.
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
            # Here: the error should not come only when training begins.
            summary = optional("tensorboard.summary", "`log_dir`", "TensorBoard")
            self._open_writer = summary.Writer

    def measure(self) -> dict[str, float]:
        """Measure `self.model`."""
        raise NotImplementedError

    def on_train_begin(self, logs: Logs = None) -> None:
        optimizer = self.model.optimizer
        # Not `iterations`, which counts updates if gradients are accumulated.
        done = 0 if optimizer is None else _keras.step_counter(optimizer)
        self._step = int(ops.convert_to_numpy(done))
        self._next = -(-self._step // self.every) * self.every
        self._steps_of_epoch = 0
        self._latest = {}
        if self.log_dir is not None:
            self._writer = self._open_writer(str(self.log_dir))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._steps_of_epoch = 0

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._is_due = self._step >= self._next
        if self._is_due:
            # The first touch of `self.model` in a step brings the state from JAX.
            self.before_step()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._is_due:
            self.after_step()
            self._next = (self._step // self.every + 1) * self.every
        # Keras counts the batches of an execution that has fewer as if it had all.
        steps = (self.params or {}).get("steps") or batch + 1
        done = min(batch + 1, steps)
        self._step += done - self._steps_of_epoch
        self._steps_of_epoch = done
        if logs is not None:
            logs.update(self._latest)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs.update(self._latest)

    def on_train_end(self, logs: Logs = None) -> None:
        if self._steps_of_epoch and not self._latest:
            warnings.warn(
                f"{type(self).__name__} has measured nothing: no step of this "
                f"training, up to {self._step - 1}, is a multiple of "
                f"every={self.every}. Pass a smaller `every`.",
                stacklevel=2,
            )
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def before_step(self) -> None:
        """Called with the weights before a step."""
        self.record(self.measure())

    def after_step(self) -> None:
        """Called with the weights after it."""

    def record(self, numbers: dict[str, float]) -> None:
        """Add numbers to `history`, to the `logs` and to TensorBoard."""
        numbers = {key: float(value) for key, value in numbers.items()}
        for key, value in {"step": self._step, **numbers}.items():
            self.history.setdefault(key, []).append(value)
        self._latest = {f"{self.prefix}_{key}": value for key, value in numbers.items()}
        if self._writer is not None:
            for key, value in self._latest.items():
                self._writer.add_scalar(key, value, self._step)
            self._writer.flush()


def batch_by_step(batch):
    """Return a function of the step that returns a batch."""
    must = "be a pair `(x, y)`, or a function of the step that returns one"
    checked = functools.partial(check_pair, None, name="batch", must=must)
    # No functions in here: a probe can be pickled.
    if callable(batch):
        return functools.partial(_checked_batch, checked, batch)
    return functools.partial(same_batch, checked(batch))


def _checked_batch(checked, batch, step):
    return checked(batch(step))


def same_batch(batch, step):
    """Return `batch` in every step."""
    return batch
