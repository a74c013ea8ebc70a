"""Two JAX processes on this machine train as one does, also when one is killed."""

import contextlib
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support.backend import jax_only
from tests.support.processes import free_port

# Keras has many processes on JAX only. They take minutes.
pytestmark = [pytest.mark.thorough, jax_only]


def start(directory, *process):
    command = [sys.executable, "-m", "tests.programs.process", str(directory)]
    with open(directory / f"{'-'.join(['log', *process[1:]])}.txt", "a") as log:
        return subprocess.Popen([*command, *process], stdout=log, stderr=log)


def start_two(directory):
    both = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    return [start(directory, both, number) for number in ("0", "1")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights of one process that was not interrupted."""
    directory = tmp_path_factory.mktemp("alone")
    assert start(directory).wait(600) == 0, (directory / "log.txt").read_text()
    return np.load(directory / "weights.npz")


def test_a_killed_process_costs_the_time_since_the_last_backup(tmp_path, alone):
    other, killed = processes = start_two(tmp_path)  # the first one writes the backups
    backup = tmp_path / "backup" / "training_metadata.json"
    try:
        while backed_up(backup) < 2:
            assert killed.poll() is None
            time.sleep(0.05)
        killed.kill()
        # It cannot go on alone: it ends with an error, or whoever runs it ends it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert other.wait(10) != 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    saved = backed_up(backup)
    assert 2 <= saved < 8 and not (tmp_path / "weights0.npz").exists()
    logs = [tmp_path / f"log-{number}.txt" for number in (0, 1)]
    before = [log.read_text() for log in logs]
    codes = [process.wait(600) for process in start_two(tmp_path)]
    after = [log.read_text().removeprefix(old) for log, old in zip(logs, before)]
    assert codes == [0, 0], after
    for log in after:
        epochs = [line for line in log.splitlines() if line.startswith("epoch")]
        assert epochs == [f"epoch {epoch}" for epoch in range(saved, 8)]
    first, second = (np.load(tmp_path / f"weights{i}.npz") for i in (0, 1))
    assert first.files == second.files == alone.files
    for name in alone.files:
        np.testing.assert_array_equal(first[name], second[name])
        tolerance = 1e-4 * max(np.abs(alone[name]).max(initial=0), 1)
        np.testing.assert_allclose(first[name], alone[name], rtol=0, atol=tolerance)


def backed_up(path):
    """Epochs behind the last backup; 0 if there is none, or it is being written."""
    try:
        return json.loads(path.read_text())["epoch"]
    except (FileNotFoundError, json.JSONDecodeError):
        return 0
