"""A run: one directory that says what was asked, what happened, and what came out.

    config.json       the settings; the same directory takes no others
    metrics.jsonl     one line an epoch (or step), written as it happens
    checkpoint.npz    the state after the last whole epoch, until the run is complete
    results.json      the outcome; a run that has it is complete

Files that are read again are written beside themselves and renamed, so that a process
may die at any moment and the same command goes on where it was.
"""

import json
import os
import pathlib
import time

import keras
import numpy as np


def write(path, save):
    """Calls `save(temporary path)` and renames the file to `path`, whole or not at all.

    Args:
        path: Where the file is to be. Missing directories are made.
        save: Callable of one `pathlib.Path`, which has the suffix of `path`.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        save(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value):
    """Writes `value`, where NaN and infinities become null, as JSON cannot say them."""
    text = json.dumps(_finite(value), indent=2) + "\n"
    write(path, lambda temporary: temporary.write_text(text))


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


class Run:
    """The directory of a run.

    Args:
        directory: Where it is, or is to be.
        config: Dict of settings, each a string, a number, a boolean or `None`.
    """

    def __init__(self, directory, config):
        self.directory = pathlib.Path(directory)
        self.config = config
        path = self.directory / "config.json"
        if not path.exists():
            write_json(path, config)
        stored = json.loads(path.read_text())
        if differing := [
            f"{key}: {stored.get(key)!r} there, {config.get(key)!r} here"
            for key in sorted(stored.keys() | config.keys())
            if stored.get(key) != config.get(key)
        ]:
            raise ValueError(
                f"The run in {self.directory} has other settings: "
                f"{'; '.join(differing)}. Give another --name or --runs_dir, or delete "
                "that directory."
            )

    @property
    def checkpoint(self):
        """The path of the checkpoint."""
        return self.directory / "checkpoint.npz"

    @property
    def results(self):
        """The dict given to `finish`, or `None` as long as the run is not complete."""
        path = self.directory / "results.json"
        return json.loads(path.read_text()) if path.exists() else None

    def finish(self, results):
        """Declares the run complete."""
        write_json(self.directory / "results.json", results)
        self.checkpoint.unlink(missing_ok=True)

    @property
    def metrics(self):
        """A list with the dict of each line of metrics.jsonl."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # Without its end a line was being written when the process died.
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def log(self, **values):
        """Adds a line to metrics.jsonl."""
        with open(self.directory / "metrics.jsonl", "a") as file:
            file.write(json.dumps(_finite(values)) + "\n")

    def keep(self, count):
        """Keeps the first `count` lines of metrics.jsonl and drops the others."""
        text = "".join(json.dumps(line) + "\n" for line in self.metrics[:count])
        path = self.directory / "metrics.jsonl"
        write(path, lambda temporary: temporary.write_text(text))


class Recorder(keras.callbacks.Callback):
    """Logs and checkpoints each epoch of `fit`, and stops when the loss is not finite.

    Weights, moving statistics, the optimizer, the best weights so far and the epoch
    stand in one file, so that they cannot disagree (`BackupAndRestore` writes two files
    in place). The seconds of a step leave out the first step after a start, which
    compiles, and evaluation.

    Args:
        run: A `Run`.
        model: The compiled `keras.Model`. It is restored if `run` has a checkpoint.

    Attributes:
        epoch: Number of whole epochs behind us, the `initial_epoch` of `fit`.
        diverged: Whether the training loss was not finite.
        best: Dict from the path of each variable of the model to its value after the
            first of the epochs with the highest test accuracy, `None` before epoch 1.
    """

    def __init__(self, run, model):
        super().__init__()
        self.run = run
        self.epoch = 0
        self.diverged = False
        self.best = None
        if run.checkpoint.exists():
            self._restore(model)
        run.keep(self.epoch)
        self._compiled = False

    def _restore(self, model):
        model.optimizer.build(model.trainable_variables)
        with np.load(self.run.checkpoint) as file:
            arrays = dict(file)
        self.epoch = int(arrays["epoch"])
        # By path, for AMAT adds variables when training begins (and sets them itself).
        for variable in model.variables:
            variable.assign(arrays[f"model/{variable.path}"])
        for i, variable in enumerate(model.optimizer.variables):
            variable.assign(arrays[f"optimizer/{i}"])
        self.best = {
            key.removeprefix("best/"): array
            for key, array in arrays.items()
            if key.startswith("best/")
        }

    def _save(self, file):
        arrays = {f"model/{v.path}": numpy_copy(v) for v in self.model.variables}
        for i, variable in enumerate(self.model.optimizer.variables):
            arrays[f"optimizer/{i}"] = numpy_copy(variable)
        arrays |= {f"best/{path}": array for path, array in self.best.items()}
        np.savez(file, epoch=self.epoch, **arrays)

    def on_epoch_begin(self, epoch, logs=None):
        self._steps = 0
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if not self._compiled:
            self._compiled = True
            self._wait()
            self._start = time.perf_counter()
        else:
            self._steps += 1

    def on_test_begin(self, logs=None):
        self._wait()
        self._seconds = time.perf_counter() - self._start

    def _wait(self):
        # The step counter is there when the step that made it is done.
        numpy_copy(self.model.optimizer.iterations)

    def on_epoch_end(self, epoch, logs=None):
        self.epoch = epoch + 1
        self.diverged = not np.isfinite(logs["loss"])
        highest = max((m["test_accuracy"] for m in self.run.metrics), default=-1)
        self.run.log(
            epoch=self.epoch,
            train_loss=float(logs["loss"]),
            train_accuracy=float(logs["accuracy"]),
            test_loss=float(logs["val_loss"]),
            test_accuracy=float(logs["val_accuracy"]),
            seconds_per_step=self._seconds / self._steps if self._steps else None,
        )
        if self.diverged:
            self.model.stop_training = True
            return
        if logs["val_accuracy"] > highest:
            self.best = {v.path: numpy_copy(v) for v in self.model.variables}
        write(self.run.checkpoint, self._save)


def numpy_copy(variable):
    """The value of a Keras variable, which the next step does not overwrite."""
    return np.array(keras.ops.convert_to_numpy(variable))
