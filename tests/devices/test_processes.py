"""Two JAX processes on this machine train as one does, also when one is killed.

They take minutes, and stand with the tests for TPUs.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(
        keras.backend.backend() != "jax", reason="Keras has many processes on JAX only"
    ),
]


def addresses():
    """Two free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)


def start(directory, network, epochs, *process):
    command = [sys.executable, "-m", "tests.programs.process", directory, network]
    with open(directory / f"{'-'.join(['log', *process[1:]])}.txt", "a") as log:
        return subprocess.Popen(
            [*map(str, command), str(epochs), *process], stdout=log, stderr=log
        )


def start_two(*arguments):
    both = addresses()
    return [start(*arguments, both, number) for number in ("0", "1")]


def finish(processes, directory):
    for process in processes:
        code = process.wait(600)
        logs = [path.read_text()[-2000:] for path in directory.glob("log*.txt")]
        assert code == 0, "\n".join(logs)


def assert_same_weights(a, b, tolerance):
    first, second = np.load(a), np.load(b)
    assert first.files == second.files
    for name in first.files:
        largest = max(np.abs(first[name]).max(initial=0), 1)
        np.testing.assert_allclose(first[name], second[name], atol=tolerance * largest)


def test_two_processes_train_resnet20_as_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    finish([start(one, "resnet20", 5)], one)
    finish(start_two(two, "resnet20", 5), two)
    # 50 steps.
    assert_same_weights(two / "process0.npz", one / "alone.npz", 1e-4)
    assert_same_weights(two / "process0.npz", two / "process1.npz", 0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The directory of one process that was not interrupted."""
    directory = tmp_path_factory.mktemp("alone")
    finish([start(directory, "resnet8", 8)], directory)
    return directory


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_costs_the_time_since_the_last_backup(tmp_path, alone, killed):
    two = tmp_path
    processes = start_two(two, "resnet8", 8)
    backup = two / "backup" / "training_metadata.json"
    try:
        while backed_up(backup) < 2:
            assert processes[killed].poll() is None
            time.sleep(0.05)
        processes[killed].kill()
        other = processes[1 - killed]
        # It cannot go on alone: it ends with an error, or whoever runs it ends it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert other.wait(30) != 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    saved = backed_up(backup)
    assert 2 <= saved < 8 and not (two / "process0.npz").exists()
    before = (two / f"log-{killed}.txt").read_text()
    finish(start_two(two, "resnet8", 8), two)
    after = (two / f"log-{killed}.txt").read_text().removeprefix(before)
    assert [line for line in after.splitlines() if line.startswith("epoch")] == [
        f"epoch {epoch}" for epoch in range(saved, 8)
    ]
    assert_same_weights(two / "process0.npz", alone / "alone.npz", 1e-4)


def backed_up(path):
    """Epochs behind the last backup; 0 if there is none, or it is being written."""
    try:
        return json.loads(path.read_text())["epoch"]
    except (FileNotFoundError, json.JSONDecodeError):
        return 0
