"""A run: one directory that says what was asked, what happened, and what came out.

    config.json       the settings; the same directory takes no others
    metrics.jsonl     one line an epoch (or step), written as it happens
    checkpoint.npz    the state after the last whole epoch, until the run is complete
    results.json      the outcome; a run that has it is complete
    .lock             of the process that trains it, while it does

Files that are read again are written beside themselves and renamed, so that a process
may die at any moment and the same command goes on where it was. The checkpoint and the
results have a seal: checksums of themselves, of the settings, and of the lines of
metrics.jsonl until then. What does not agree is an error, and never another table.
"""

import contextlib
import json
import os
import pathlib
import time
import zipfile

import keras
import numpy as np

from recipes import files
from recipes.files import read_json, write_json

CHECKPOINT, RESULTS, METRICS = "checkpoint.npz", "results.json", "metrics.jsonl"
SEAL = "seal.json"  # the member of a checkpoint
END = 22  # bytes, the end record of a ZIP archive


def write(path, save):
    """Does what `recipes.files.write` does, and seals a checkpoint."""
    path = pathlib.Path(path)

    def save_and_seal(temporary):
        save(temporary)
        with zipfile.ZipFile(temporary, "a") as archive:
            members = {"members": len(archive.namelist())}
            archive.writestr(SEAL, json.dumps(_seal(path.parent) | members))

    files.write(path, save_and_seal if path.name == CHECKPOINT else save)


def _seal(directory, count=None):
    """Checksums of the settings and of the first `count` lines of metrics, or all."""
    path = directory / "config.json"
    config = read_json(path) if path.exists() else {}
    lines = _lines(directory / METRICS)[:count]
    return {
        "settings": files.digest(dict(sorted(config.items()))),
        "lines": len(lines),
        METRICS: files.digest(b"".join(lines)),
    }


def _lines(path):
    """The whole lines of a file, bytes."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    # Without its end a line was being written when the process died.
    return [line for line in lines if line.endswith(b"\n")]


def _check_checkpoint(path):
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            members = set(archive.namelist())
            # zipfile may skip entries of a damaged directory, whose end counts them.
            archive.fp.seek(-END, os.SEEK_END)
            count = int.from_bytes(archive.fp.read(END)[10:12], "little")
            if count not in (len(members), 0xFFFF):
                raise ValueError(f"{len(members)} of {count} members are found")
            seal = dict(json.loads(archive.read(SEAL))) if SEAL in members else None
    except Exception as error:  # of the many kinds of zipfile
        raise files.damaged(path, f"it is no whole archive ({error})") from None
    if bad is not None:
        raise files.damaged(path, f"the checksum of {bad} in it is wrong")
    if seal is not None:  # earlier versions wrote none
        expected = {"members": len(members) - 1}
        expected |= _seal(path.parent, int(seal.get("lines", 0)))
        files.compare_seals(path, seal, expected)


class Run:
    """The directory of a run.

    It is one process's alone from the moment in which `results` is `None`, until
    `finish`, `release`, or the end of the process. In `with run:` it is too.

    Args:
        directory: Where it is, or is to be.
        config: Dict of settings, each a string, a number, a boolean or `None`.

    Raises:
        ValueError: If the directory has other settings; and, here and in all methods,
            if a file is damaged.
        OSError: If a file cannot be written.
        files.InUse: From `results` or `with` on, if another process has the run.
    """

    def __init__(self, directory, config):
        self.directory = pathlib.Path(directory)
        self.config = config
        self._checked = False
        path = self.directory / "config.json"
        if not path.exists():
            with self:
                write_json(path, config)
        stored = read_json(path)
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

    def __enter__(self):
        self._lock()
        return self

    def __exit__(self, *_):
        self.release()

    def _lock(self):
        if files.lock(self.directory):
            # What is left of a killed process.
            for name in ("config.json", CHECKPOINT, RESULTS, METRICS):
                files.sweep(self.directory / name)
            path = self.directory / METRICS
            whole = sum(map(len, _lines(path)))
            if path.exists() and path.stat().st_size > whole:
                os.truncate(path, whole)

    def release(self):
        """Leaves the run to other processes."""
        files.unlock(self.directory)

    @property
    def checkpoint(self):
        """The path of the checkpoint. If there is one, it is whole and of this run."""
        path = self.directory / CHECKPOINT
        if not self._checked:
            self._lock()
            if path.exists():
                _check_checkpoint(path)
            self._checked = True
        return path

    @property
    def results(self):
        """The dict given to `finish`, or `None` as long as the run is not complete."""
        path = self.directory / RESULTS
        if not path.exists():
            self._lock()
            if not path.exists():
                return None
            self.release()  # another process completed it just now
        results = read_json(path, _seal(self.directory))
        with contextlib.suppress(OSError):  # where a process died before it did this
            (self.directory / CHECKPOINT).unlink(missing_ok=True)
            (self.directory / ".lock").unlink(missing_ok=True)
        return results

    def finish(self, results):
        """Declares the run complete."""
        write_json(self.directory / RESULTS, results, _seal(self.directory))
        (self.directory / CHECKPOINT).unlink(missing_ok=True)
        self.release()

    @property
    def metrics(self):
        """A list with the dict of each line of metrics.jsonl."""
        path = self.directory / METRICS
        if (results := self.directory / RESULTS).exists():
            read_json(results, _seal(self.directory))
        metrics = []
        for number, line in enumerate(_lines(path), 1):
            try:
                metrics.append(json.loads(line))
            except ValueError as error:
                reason = f"line {number} is not JSON ({error})"
                raise files.damaged(path, reason) from None
        return metrics

    def log(self, **values):
        """Adds a line to metrics.jsonl."""
        path = self.directory / METRICS
        try:
            with open(path, "a") as file:
                file.write(json.dumps(files.finite(values)) + "\n")
        except OSError as error:
            raise files.unwritable(path, error) from error

    def keep(self, count):
        """Keeps the first `count` lines of metrics.jsonl and drops the others."""
        path = self.directory / METRICS
        lines = _lines(path)
        if len(lines) < count:
            reason = f"it has {len(lines)} lines, the checkpoint {count}"
            raise files.damaged(path, reason)
        files.write(path, lambda file: file.write_bytes(b"".join(lines[:count])))


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
        try:
            self.epoch = int(arrays["epoch"])
            # By path, for AMAT adds variables when training begins, and sets them.
            for variable in model.variables:
                variable.assign(arrays[f"model/{variable.path}"])
            for i, variable in enumerate(model.optimizer.variables):
                variable.assign(arrays[f"optimizer/{i}"])
        except (KeyError, ValueError) as error:
            reason = f"it is not of this network ({error})"
            raise files.damaged(self.run.checkpoint, reason) from None
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


def load_model(path):
    """Loads the saved model of a run, or raises a ValueError that names the file."""
    try:
        return keras.saving.load_model(path)
    except Exception as error:  # of the many kinds of zipfile, Keras and h5py
        raise ValueError(
            f"{path} cannot be loaded: {error}. Restore it from a copy; or delete it "
            "and the directory of its run, and the same command makes both anew."
        ) from None


def numpy_copy(variable):
    """The value of a Keras variable, which the next step does not overwrite."""
    return np.array(keras.ops.convert_to_numpy(variable))
