"""What the benchmarks make of their times."""

import itertools
import json
import os
import pathlib
import time

import pytest

from benchmarks import compare
from recipes.engine.errors import UserError
from tests.support.backend import thorough_on

pytestmark = thorough_on("jax")


def test_candidates_take_turns():
    timers = dict.fromkeys("ab", itertools.count(1).__next__)
    times = compare.take_turns(timers, rounds=3)
    assert times == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_what_is_short_is_repeated(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    calls = []
    timed = compare.timer(lambda: calls.append("once"), at_least=3)
    assert len(calls) == 4 and timed() == 1 / 3 and len(calls) == 7
    assert compare.timer(lambda: calls.append("once"))() == 1 and len(calls) == 11


def test_ratio_compares_within_a_round():
    # Every round is slower than the one before, for both.
    found = compare.ratio([2, 20, 200, 2000, 20000], [1, 10, 100, 1000, 10000])
    assert found == {"ratio": 2, "ratio_quartiles": [2, 2]}
    found = compare.ratio([1, 2, 3, 4, 5, 6, 7], [1] * 7)
    assert found == {"ratio": 4, "ratio_quartiles": [2, 6]}
    with pytest.raises(ValueError):
        compare.ratio([1, 2], [1])


@pytest.mark.parametrize("device, floor", [("cpu", True), ("NVIDIA H200", False)])
def test_a_layer_has_a_floor_where_the_bandwidth_is_that_of_its_device(device, floor):
    row = {"shape": "2x3", "dtype": "float32", "layer": "BN", "milliseconds": 0.5}
    row |= {"floor_milliseconds": 0.25, "ratio": 1, "ratio_quartiles": [1, 1]}
    report = {"benchmark": "layer", "backend": "jax", "device": device, "rows": [row]}
    assert ("| floor, ms |" in compare.tables.of(report)) == floor


def test_a_report_is_printed_where_nothing_can_be_read_or_written(
    tmp_path, monkeypatch, capsys
):
    """Not on Linux; and a path that is none."""

    def not_there(path, *args, _read_text=pathlib.Path.read_text, **kwargs):
        if str(path) == "/proc/cpuinfo":
            raise FileNotFoundError(path)
        return _read_text(path, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "read_text", not_there)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(compare.tables, "of", lambda report: report["benchmark"])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/a.json cannot be written"):
        compare.report(tmp_path / "file/a.json", "any", [])
    assert capsys.readouterr().out == "any\n"


def test_long_steps_go_on(tmp_path, monkeypatch):
    output, taken = tmp_path / "report.json", []

    def rows(*names, rounds=3):
        steps = (
            ({"name": name}, lambda name=name: taken.append(name) or {"value": 1})
            for name in names
        )
        settings = {"benchmark": "any", "rounds": rounds}
        compare.report_steps(steps, settings, output)
        return json.loads(output.read_text())["rows"]

    monkeypatch.setattr(compare.tables, "of", lambda report: report["benchmark"])
    assert rows("a") == [{"name": "a", "value": 1}]
    found = rows("a", "b")
    assert taken == ["a", "b"] and [row["name"] for row in found] == taken
    report = json.loads(output.read_text())
    assert report["rows"] == found and report["rounds"] == 3
    assert report["versions"]["keras"] and report["cores"] >= 1
    rows("a", rounds=4)  # which is another report
    assert taken == ["a", "b", "a"]
    monkeypatch.setattr(compare.machine.platform, "python_version", lambda: "4.0")
    rows("a", rounds=4)
    assert taken == ["a", "b", "a", "a"]
