"""A run: one directory with what was asked, what happened, and the results.

    config.json       the settings; the same directory takes no others
    metrics.jsonl     one line per epoch (or measurement), written as it happens
    checkpoint.npz    named arrays: the state after an epoch, until the run is complete
    results.json      the outcome; a run that has it is complete
    .lock             held by the process that trains it, while it does

Files that are read again are written under another name, forced to the disk and
renamed. A process may therefore die at any moment, and the same command continues.
"""

import json
import os
import pathlib

import filelock
import numpy as np

from recipes.engine import files
from recipes.engine.errors import UserError

FORMAT = 2  # of the directory; runs with another format are refused
PATIENCE = 2.0  # seconds, for the children of a killed process to end too
CONFIG, METRICS = "config.json", "metrics.jsonl"
CHECKPOINT, RESULTS = "checkpoint.npz", "results.json"


def differences(there, here):
    """The settings in which two dicts differ, as a text; it is empty if in none."""
    return "; ".join(
        f"{key}: {there.get(key)!r} there, {here.get(key)!r} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    )


class InUse(UserError):
    """Another process has the run."""


class Run:
    """The directory of a run. Inside `with run:`, only this process has it.

    Args:
        directory: Its path; it need not exist.
        config: Dict of settings, in a form JSON can hold.

    Raises:
        UserError: If the directory has other settings, or is of another version; and,
            in all methods, if a file is damaged or cannot be written.
        InUse: From `with`, if another process has the run.
    """

    def __init__(self, directory, config):
        self.directory = pathlib.Path(directory)
        self.name = self.directory.name
        self.config = files.finite(config)
        self._lock = filelock.FileLock(self.directory / ".lock", timeout=PATIENCE)
        if (self.directory / CONFIG).exists():
            self._check()

    def _check(self):
        stored = files.read_json(self.directory / CONFIG)
        if stored.pop("format", 1) != FORMAT:
            raise UserError(
                f"The run in {self.directory} was recorded by another version of the "
                "recipes, whose checkpoints this one cannot read. Give another "
                "--runs_dir, or delete that directory."
            )
        if differing := differences(stored, self.config):
            raise UserError(
                f"The run in {self.directory} has other settings: {differing}. "
                "Give another --name or --runs_dir, or delete that directory."
            )

    def __enter__(self):
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except filelock.Timeout:
            raise InUse(
                f"{self.directory} is in use by another process. Wait until that ends, "
                "or give another --name or --runs_dir."
            ) from None
        except OSError as error:
            raise files.unwritable(self.directory / ".lock", error) from error
        try:
            self._clean()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_):
        self._lock.release()

    def _clean(self):
        # What is left of a killed process.
        for name in (CONFIG, CHECKPOINT, RESULTS, METRICS):
            files.sweep(self.directory / name)
        path = self.directory / CONFIG
        if path.exists():
            self._check()
        else:
            files.write_json(path, {"format": FORMAT, **self.config})
        path = self.directory / METRICS
        whole = sum(map(len, self._lines()))
        if path.exists() and path.stat().st_size > whole:
            os.truncate(path, whole)

    @property
    def results(self):
        """The dict given to `finish`, or `None` while the run is incomplete."""
        path, checkpoint = self.directory / RESULTS, self.directory / CHECKPOINT
        results = files.read_json(path) if path.exists() else None
        if results is not None and checkpoint.exists():
            checkpoint.unlink(missing_ok=True)  # no longer needed
        return results

    def finish(self, results):
        """Declares the run complete, and returns its results as they are stored."""
        files.write_json(self.directory / RESULTS, results)
        return self.results

    @property
    def metrics(self):
        """A list with the dict of each line of metrics.jsonl."""
        metrics = []
        try:
            for line in self._lines():
                metrics.append(json.loads(line))
        except ValueError as error:
            reason = f"line {len(metrics) + 1} is not JSON ({error})"
            raise files.damaged(self.directory / METRICS, reason) from None
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
        path, lines = self.directory / METRICS, self._lines()
        if len(lines) < count:
            reason = f"it has {len(lines)} lines, the checkpoint {count}"
            raise files.damaged(path, reason)
        if len(lines) > count:
            files.write(path, lambda file: file.write_bytes(b"".join(lines[:count])))

    def _lines(self):
        path = self.directory / METRICS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        # An unfinished line was being written when the process died.
        return [line for line in lines if line.endswith(b"\n")]

    def save(self, **arrays):
        """Writes the checkpoint: arrays by name, `epoch` among them.

        Before that, the lines of metrics are forced to the disk.
        """
        path = self.directory / METRICS
        if path.exists():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        files.write(
            self.directory / CHECKPOINT,
            lambda path: np.savez(path, members=len(arrays), **arrays),
        )

    def load(self):
        """The arrays of the checkpoint, a dict; `None` if there is none."""
        path = self.directory / CHECKPOINT
        if not path.exists():
            return None
        try:
            with np.load(path) as file:  # which verifies the checksums
                arrays = dict(file)
        except Exception as error:  # zipfile and NumPy raise many kinds
            raise files.damaged(path, f"it is no whole archive ({error})") from None
        # In a damaged directory, zipfile may skip entries.
        if arrays.pop("members", None) != len(arrays) or "epoch" not in arrays:
            raise files.damaged(path, "not all of its arrays are there")
        return arrays
