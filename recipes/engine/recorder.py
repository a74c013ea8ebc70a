"""What is measured, logged and checkpointed in `fit`."""

import time
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

from recipes.engine import files
from recipes.engine.run import CHECKPOINT

CHECKPOINT_SECONDS = 5.0  # at most this much, and the last epoch, is trained again
SCORES = {
    "train_loss": "loss",
    "train_accuracy": "accuracy",
    "test_loss": "val_loss",
    "test_accuracy": "val_accuracy",
}


def scores(logs):
    """The line of an epoch: losses (nats), accuracies, and what callbacks measured."""
    line = {key: float(logs[name]) for key, name in SCORES.items() if name in logs}
    return line | {k: v for k, v in logs.items() if k not in SCORES.values()}


class Hooks(NamedTuple):
    """What a recipe measures. Hooks must not change the model.

    Attributes:
        before, after: Callables of the model, the `Problem` and the settings, at the
            start and at the end of an epoch; `before` also gets the epoch, from 0. Each
            returns a dict for the line of the epoch. Nothing is measured after an epoch
            whose loss is not finite.
        at_end: Callable of the trained model, the `Problem`, the settings and the run.
            It returns a dict of more results, and is not called if training diverged.
        callbacks: Callables of the `Problem` and the settings, each of which returns a
            Keras callback. What it adds to the logs of an epoch goes into the line.
        keep_best: Whether `at_end` is about the weights after the first epoch with the
            highest test accuracy. It is then also called for a training that diverged
            after such an epoch.
    """

    before: Callable | None = None
    after: Callable | None = None
    at_end: Callable | None = None
    callbacks: tuple = ()
    keep_best: bool = False


class Recorder(keras.callbacks.Callback):
    """Logs and checkpoints epochs of `fit`, and stops when the loss is not finite.

    Weights, moving statistics, the optimizer, the best weights so far and the epoch
    are in one file, and therefore cannot disagree (`BackupAndRestore` writes two files
    in place). The seconds of a step exclude evaluation, and the first step after a
    start, which compiles.

    Attributes:
        epoch: Number of complete epochs, the `initial_epoch` of `fit`.
        last: The epoch after which `fit` ends.
        best: Dict from the path of each variable of the model to its value after the
            first epoch with the highest test accuracy, or `None`.
    """

    def __init__(self, recorded, model, problem, settings, hooks, last):
        super().__init__()
        self.run, self.hooks, self.last = recorded, hooks, last
        self.about = problem, settings
        self.epoch, self.best = 0, None
        if (arrays := recorded.load()) is not None:
            self._restore(model, arrays)
        recorded.keep(self.epoch)
        self._compiled, self._saved = False, time.monotonic()

    def _restore(self, model, arrays):
        self.epoch = int(arrays["epoch"])
        try:
            for name, variable in _named(model).items():
                variable.assign(arrays[name])
        except (KeyError, ValueError) as error:
            reason = f"it is not of this network ({error})"
            path = self.run.directory / CHECKPOINT
            raise files.damaged(path, reason) from None
        best = {k[5:]: v for k, v in arrays.items() if k[:5] == "best/"}
        self.best = best or None

    def _save(self):
        arrays = {name: numpy_copy(v) for name, v in _named(self.model).items()}
        arrays |= {f"best/{path}": array for path, array in (self.best or {}).items()}
        self.run.save(epoch=self.epoch, **arrays)
        self._saved = time.monotonic()

    def on_epoch_begin(self, epoch, logs=None):
        self._measured = {}
        if self.hooks.before is not None:
            self._measured = self.hooks.before(self.model, *self.about, epoch)
        self._steps, self._seconds = 0, None
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if self._compiled:
            self._steps += self.model.steps_per_execution
        else:
            self._compiled = True
            self._wait()
            self._start = time.perf_counter()

    def on_test_begin(self, logs=None):
        self._stop_clock()

    def _stop_clock(self):
        if self._seconds is None:
            self._wait()
            self._seconds = time.perf_counter() - self._start

    def _wait(self):
        # The step counter is available once its step is done.
        numpy_copy(self.model.optimizer.iterations)

    def on_epoch_end(self, epoch, logs=None):
        self._stop_clock()
        self.epoch = epoch + 1
        finite = np.isfinite(logs["loss"])
        if finite and self.hooks.after is not None:
            self._measured |= self.hooks.after(self.model, *self.about)
        self.run.log(
            epoch=self.epoch,
            **scores(logs),
            seconds_per_step=self._seconds / self._steps if self._steps else None,
            **self._measured,
        )
        if not finite:
            self.model.stop_training = True
            return
        if self.hooks.keep_best:
            earlier = (line["test_accuracy"] for line in self.run.metrics[:-1])
            if logs["val_accuracy"] > max(earlier, default=-1):
                self.best = {v.path: numpy_copy(v) for v in self.model.variables}
        late = time.monotonic() - self._saved >= CHECKPOINT_SECONDS
        if late or self.epoch == self.last:
            self._save()


def _named(model):
    """The variables of a model and its optimizer by their names in a checkpoint."""
    named = {f"model/{v.path}": v for v in model.variables}
    numbered = enumerate(model.optimizer.variables)
    return named | {f"optimizer/{i}": v for i, v in numbered}


def numpy_copy(variable):
    """The value of a Keras variable, safe from being overwritten by the next step."""
    array = np.array(keras.ops.convert_to_numpy(variable))
    # Files of NumPy do not know bfloat16; float32 holds it exactly.
    return array.astype("float32") if array.dtype.name == "bfloat16" else array
