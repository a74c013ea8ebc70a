"""A run whose process ends, whose files are damaged, or that two processes want.

The same at length: `tests.recipes.forked`, `tests.recipes.killed`, and
`tests.recipes.damaged`.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from recipes import experiment, files, models, train
from tests.recipes import damaged, small
from tests.recipes.damaged import CONFIG, record
from tests.recipes.damaged import run_state as state

ROOT = pathlib.Path(__file__).parents[2]
TINY = {"model": "resnet8", "train_size": 48, "batch_size": 16, "epochs": 3}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_ended_at_any_moment_and_again():
    command = [sys.executable, "-m", "tests.recipes.forked", "--every=12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert counts[0] >= 4 and counts[1] == counts[2] >= 15


@pytest.mark.parametrize(
    "complete, name",
    [(complete, name) for complete, names in damaged.RUNS.items() for name in names],
)
def test_a_damaged_file_is_an_error_or_without_effect(complete, name, tmp_path):
    record(tmp_path / "run", complete)
    path = tmp_path / "run" / name
    step = 1 + path.stat().st_size // 100
    found = damaged.count(path, lambda: state(tmp_path / "run"), step, bits=[0])
    assert not found["wrong"]
    # The dates in an archive have no effect.
    assert found["errors"] > 0.7 * found.total()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.npz", "results.json"])
def test_a_file_of_another_run_is_an_error(name, tmp_path):
    complete = name != "checkpoint.npz"
    record(tmp_path / "run", complete)
    other = record(tmp_path / "other", complete, CONFIG | {"seed": 1})
    if name == "metrics.jsonl":
        other.log(epoch=4)
    shutil.copy(tmp_path / "other" / name, tmp_path / "run" / name)
    with pytest.raises(ValueError, match=r"(results.json|npz) is damaged, or does not"):
        state(tmp_path / "run")


def test_a_file_that_is_gone_is_an_error(tmp_path):
    record(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="results.json is damaged.*lines 3.*is 0"):
        state(tmp_path / "run")
    record(tmp_path / "part", complete=False)
    (tmp_path / "part" / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="checkpoint.npz is damaged.*lines 3.*is 0"):
        state(tmp_path / "part")
    # Neither does a checkpoint without a seal go on.
    with pytest.raises(ValueError, match="metrics.jsonl is damaged.*the checkpoint 3"):
        experiment.Run(tmp_path / "part", CONFIG).keep(3)


def test_what_earlier_versions_wrote_is_read(tmp_path):
    record(tmp_path / "run")
    expected = state(tmp_path / "run")
    path = tmp_path / "run" / "results.json"
    results = json.loads(path.read_text())
    del results["seal"]
    path.write_text(json.dumps(results))
    assert state(tmp_path / "run") == expected
    record(tmp_path / "part", complete=False)
    arrays = {"epoch": 2, "state": np.ones(3)}
    np.savez(tmp_path / "part" / "checkpoint.npz", **arrays)
    assert state(tmp_path / "part")[:2] == (2, [1.0, 1.0, 1.0])


@pytest.fixture
def holder(tmp_path):
    """A process that has the run in `tmp_path / "run"`."""
    code = (
        "import sys, time; from recipes import files\n"
        "files.lock(sys.argv[1]); print('locked', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"locked\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_one_process_at_a_time(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0)
    (tmp_path / "run" / "config.json").write_text(json.dumps(CONFIG))
    run = experiment.Run(tmp_path / "run", CONFIG)
    for use in (
        lambda: run.results,
        lambda: run.checkpoint,
        run.__enter__,
        lambda: train.train({}, "run", tmp_path),
    ):
        with pytest.raises((files.InUse, ValueError)) as error:
            use()
        if error.type is ValueError:  # train's settings are others
            assert "has other settings" in str(error.value)
        else:
            assert f"in use by process {holder.pid} on " in str(error.value)
            assert "give another --name" in str(error.value)
    # Others may use other runs.
    assert experiment.Run(tmp_path / "other", CONFIG).results is None
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    record(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("config.json", "metrics.jsonl", "results.json")
    }


def test_a_complete_run_can_be_read_while_another_process_has_it(holder, tmp_path):
    path = tmp_path / "run" / "results.json"
    path.write_text('{"accuracy": 0.5}')
    (tmp_path / "run" / "config.json").write_text(json.dumps(CONFIG))
    assert experiment.Run(tmp_path / "run", CONFIG).results == {"accuracy": 0.5}


def test_a_directory_that_was_deleted_is_locked_again(tmp_path):
    assert files.lock(tmp_path / "a") and not files.lock(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    assert files.lock(tmp_path / "a")
    files.unlock(tmp_path / "a")
    assert not list((tmp_path / "a").iterdir())
    files.unlock(tmp_path / "a")  # nothing to do


def test_what_killed_processes_left_is_removed(tmp_path):
    run = record(tmp_path / "run", complete=False)
    left = [".checkpoint-123.npz", ".results-7.json", ".metrics-8.jsonl"]
    for name in (*left, "notes-1.json", ".other-1.npz"):
        (run.directory / name).write_text("")
    assert experiment.Run(tmp_path / "run", CONFIG).results is None
    names = {path.name for path in run.directory.iterdir()}
    assert not names & {*left} and {"notes-1.json", ".other-1.npz"} <= names
    run.release()


@pytest.mark.parametrize("place", ["file", "nowhere"])
def test_a_directory_that_cannot_be_written(place, tmp_path):
    if place == "file":
        runs_dir = tmp_path / "runs"
        runs_dir.write_text("")
    else:
        runs_dir = pathlib.Path("/proc/runs")  # where root cannot write either
        if not runs_dir.parent.exists():
            pytest.skip("root may write everywhere but in /proc, which is not there")
    with pytest.raises(OSError, match=r"cannot be written: .*the same command goes on"):
        train.train(TINY, runs_dir=runs_dir)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    run = record(tmp_path / "run", complete=False)
    metrics = run.directory / "metrics.jsonl"
    metrics.unlink()
    metrics.symlink_to("/dev/full")
    with pytest.raises(OSError, match="metrics.jsonl cannot be written: No space left"):
        run.log(epoch=4)

    def save(temporary):
        temporary.symlink_to("/dev/full")
        with open(temporary, "wb") as file:
            np.savez(file, state=np.zeros(9000))

    with pytest.raises(OSError, match="state.npz cannot be written: No space left"):
        experiment.write(tmp_path / "state.npz", save)
    assert not [path for path in tmp_path.iterdir() if path.name[0] == "."]


class Killed(BaseException):
    pass


def outcome(tmp_path, results):
    lines = (tmp_path / "runs" / results["name"] / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in lines.splitlines()]
    model = train.keras.models.load_model(results["saved_model"])
    return (
        [array.tobytes() for array in model.get_weights()],
        [{k: v for k, v in line.items() if k[:7] != "seconds"} for line in lines],
        {k: v for k, v in results.items() if k[:5] not in ("secon", "saved")},
    )


def test_a_training_that_ends_at_a_write_goes_on_as_if_it_had_not(
    tmp_path, monkeypatch
):
    """Weights, metrics and results are the same to the last bit."""
    monkeypatch.setattr(models, "build", small.build)

    def run(place):
        places = {"runs_dir": place / "runs", "saved_models_dir": place / "models"}
        return train.train(TINY, verbose=0, **places)

    expected = outcome(tmp_path, run(tmp_path))
    replace = os.replace
    # Settings, metrics, a checkpoint for each epoch, the model, the results.
    for fatal, before in ((4, False), (6, True), (7, True)):
        place = tmp_path / f"{fatal}{before}"
        count = []

        def die(source, target, fatal=fatal, before=before, count=count):
            count.append(target)
            if len(count) == fatal and before:
                raise Killed
            replace(source, target)
            if len(count) == fatal:
                raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, "replace", die)
            run(place)
        assert outcome(place, run(place)) == expected
