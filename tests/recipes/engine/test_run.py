import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from recipes.engine import run
from tests.programs import damaged
from tests.programs.damaged import CONFIG, record
from tests.support import processes
from tests.support.backend import later

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
    with pytest.raises(ValueError, match="another version.*cannot go on.*delete that"):
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize("every", [21, *later(3)])
def test_ended_at_any_moment_and_again(every):
    printed = processes.run("-m", "tests.programs.forked", f"--every={every}")
    counts = [int(line.split()[1]) for line in printed.splitlines()]
    assert counts[0] >= 42 // every and counts[1] == counts[2] >= 180 // every


@pytest.mark.parametrize("count", [20, *later(300)])
@pytest.mark.parametrize("name", ["config.json", "results.json", "checkpoint.npz"])
def test_a_damaged_file_is_an_error_that_names_it(name, count, tmp_path):
    """Or of a text, which is still JSON, another text."""
    record(tmp_path / "run", complete=name != "checkpoint.npz")
    path = tmp_path / "run" / name
    step, read = 1 + path.stat().st_size // count, damaged.run_state
    found = damaged.count(path, lambda: read(tmp_path / "run"), step, [0])
    assert not found["wrong"] and found["errors"] > 0.5 * found.total()


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
        with pytest.raises(OSError, match="cannot be written: .*the same command goes"):
            run.Run(path / "a", CONFIG).__enter__()
    with run.Run(tmp_path / "run", CONFIG) as one:
        (one.directory / "metrics.jsonl").mkdir()
        with pytest.raises(OSError, match="metrics.jsonl cannot be written: Is a dir"):
            one.log(epoch=4)
