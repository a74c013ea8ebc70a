import builtins
import contextlib
import io
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from recipes.engine import run
from recipes.engine.errors import UserError
from tests.programs import damaged
from tests.programs.damaged import CONFIG, record
from tests.support.backend import later, once

ROOT = pathlib.Path(__file__).parents[3]


def test_the_same_settings_open_the_same_run_and_others_are_refused(tmp_path):
    path = tmp_path / "runs" / "a"
    with run.Run(path, CONFIG) as first:
        assert first.results is None and first.metrics == []
        first.log(epoch=1, loss=0.5)
        first.finish({"accuracy": 0.9})
    again = run.Run(path, dict(CONFIG))
    assert again.name == "a" and again.results == {"accuracy": 0.9}
    assert again.metrics == [{"epoch": 1, "loss": 0.5}]
    stored = json.loads((path / "config.json").read_text())
    assert stored == {"format": run.FORMAT, **CONFIG}
    message = "epochs: None there, 3 here; norm: 'cbn' there, 'bn' here. Give"
    with pytest.raises(ValueError, match=message):
        run.Run(path, {"norm": "bn", "seed": 0, "epochs": 3})
    # An earlier version wrote no format.
    (path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="another version.*cannot read.*delete that"):
        run.Run(path, CONFIG)


def test_metrics_and_a_checkpoint(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    with run.Run(tmp_path / "a", CONFIG) as one:
        assert one.load() is None
        for epoch in (1, 2, 3):
            one.log(epoch=epoch)
        monkeypatch.setattr(os, "fsync", lambda file: synced.append(sync(file)))
        one.save(epoch=2, state=np.arange(3.0))
        assert len(synced) == 2  # the metrics, before the checkpoint
        # A line that is cut by the end of the process is dropped.
        with open(one.directory / "metrics.jsonl", "a") as file:
            file.write('{"epoch"')
        assert [line["epoch"] for line in one.metrics] == [1, 2, 3]
    with run.Run(tmp_path / "a", CONFIG) as one:
        np.testing.assert_array_equal(one.load()["state"], [0, 1, 2])
        one.log(epoch=4)
        one.keep(2)
        one.log(epoch=3, loss=float("nan"))
        assert one.metrics == [{"epoch": 1}, {"epoch": 2}, {"epoch": 3, "loss": None}]
        with pytest.raises(ValueError, match="metrics.jsonl is damaged.*checkpoint 4"):
            one.keep(4)
        np.savez(one.directory / "checkpoint.npz", members=2, epoch=1)
        with pytest.raises(ValueError, match="checkpoint.npz is damaged.*not all of"):
            one.load()
        one.finish({})
        assert one.load() is None


def go_on(directory):
    """Records a run once more. Returns its files, temporary ones too."""
    record(directory)
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != ".lock"}


# On files; writes into an open one have a test of their own.
OPERATIONS = [(builtins, "open"), (io, "open"), (os, "mkdir"), (os, "replace")]
OPERATIONS += [(os, "truncate"), (os, "unlink")]


def test_killed_before_any_operation_and_again(tmp_path):
    for fatal in itertools.count():
        left = itertools.count(fatal, -1)

        def ending(function, left=left):
            def call(*arguments, **more):
                if next(left) <= 0:  # Nor does a killed process clean up.
                    raise KeyboardInterrupt
                return function(*arguments, **more)

            return call

        directory = tmp_path / str(fatal)
        with pytest.MonkeyPatch.context() as patch:
            for module, name in OPERATIONS:
                patch.setattr(module, name, ending(getattr(module, name)))
            with contextlib.suppress(KeyboardInterrupt):
                record(directory)
                break
        assert go_on(directory) == go_on(tmp_path / "whole")
    assert fatal > 30


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("step", [30, *later(7, marks=[once])])
def test_a_write_that_ends_at_any_byte_and_again(step, killed, tmp_path):
    """It fails, as on a full disk; who is killed there leaves what was written."""
    resource = pytest.importorskip("resource")
    limit, bounds = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in range(0, 800, step):  # bytes of a file; a checkpoint has more
        directory = tmp_path / str(size)
        with run.Run(directory, CONFIG):  # whose next write is a line of metrics
            pass
        with pytest.MonkeyPatch.context() as patch:
            if killed:
                patch.setattr(os, "unlink", lambda path: None)
            resource.setrlimit(limit, (size, bounds[1]))
            try:
                with pytest.raises(UserError, match="cannot be written: File too larg"):
                    record(directory)
            finally:
                resource.setrlimit(limit, bounds)
        assert go_on(directory) == go_on(tmp_path / "whole")


@pytest.mark.parametrize("every", [False, *later(True, marks=[once])])
@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "results.json", "checkpoint.npz"]
)
def test_a_damaged_file_is_an_error_that_names_it(name, every, tmp_path):
    """Or of a text, which is still JSON, another text."""
    record(tmp_path / "run", complete=name != "checkpoint.npz")
    path = tmp_path / "run" / name
    step, bits = (1, range(8)) if every else (1 + path.stat().st_size // 20, [0])
    found = damaged.count(path, lambda: damaged.run_state(tmp_path / "run"), step, bits)
    assert not found["wrong"]
    # A line that was cut was being written.
    if name != "metrics.jsonl":
        assert found["errors"] > found.total() / (1 + len(bits))


HOLDER = """
import sys, time
from recipes.engine import run
with run.Run(sys.argv[1], {}):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PATIENCE", 0)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"locked\n"
        one = run.Run(tmp_path / "run", {})
        with pytest.raises(run.InUse, match="in use by another process.*another --nam"):
            one.__enter__()
        # Others may use other runs.
        with run.Run(tmp_path / "other", CONFIG) as other:
            assert other.results is None
    finally:
        holder.kill()
        holder.communicate()
    # What killed processes left of its files is removed.
    for name in (".checkpoint-123.npz", ".metrics-8.jsonl", ".other-1.npz"):
        (tmp_path / "run" / name).write_text("")
    with one:
        left = {path.name for path in one.directory.iterdir()}
    assert left - {".lock"} == {"config.json", ".other-1.npz"}


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "runs").write_text("")
    for path in (tmp_path / "runs", pathlib.Path("/proc/runs")):  # for root, too
        with pytest.raises(UserError, match="cannot be written.*same command again"):
            run.Run(path / "a", CONFIG).__enter__()
