"""What the benchmarks make of their times."""

import functools
import itertools
import json
import time

import pytest

from benchmarks import compare, tables
from tests.support.backend import thorough_on

pytestmark = thorough_on("jax")


def test_candidates_take_turns():
    calls = []

    def timed(name):
        calls.append(name)
        return float(len(calls))

    timers = {name: functools.partial(timed, name) for name in "ab"}
    times = compare.take_turns(timers, rounds=3)
    assert "".join(calls) == "ababab"
    assert times == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert compare.timer(lambda: calls.append("once"))() >= 0
    assert calls[6:] == ["once"]


def test_what_is_short_is_repeated(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    calls = []
    timed = compare.timer(lambda: calls.append("once"), at_least=3)
    assert len(calls) == 1 and timed() == 1 / 3 and len(calls) == 4


@pytest.mark.parametrize(
    "times, yardstick, ratio, quartiles",
    [
        # Every round is slower than the one before, for both.
        ([2, 20, 200, 2000, 20000], [1, 10, 100, 1000, 10000], 2, [2, 2]),
        ([1, 2, 3, 4, 5, 6, 7], [1] * 7, 4, [2, 6]),
    ],
)
def test_ratio_compares_within_a_round(times, yardstick, ratio, quartiles):
    found = compare.ratio(times, yardstick)
    assert found == {"ratio": ratio, "ratio_quartiles": quartiles}


def test_ratio_needs_as_many_times_of_both():
    with pytest.raises(ValueError):
        compare.ratio([1.0, 2.0], [1.0])


def test_table():
    text = tables.markdown(["norm", "empty", "s"], [["bn", "", 1], ["cbn", "", 2]])
    assert text == "| norm | s |\n| --- | --: |\n| bn | 1 |\n| cbn | 2 |"


def test_report_holds_rows_settings_and_machine(tmp_path):
    path = tmp_path / "report.json"
    compare.write_report(path, "network", [{"ratio": 0.5}], rounds=3)
    report = json.loads(path.read_text())
    assert (report["benchmark"], report["rounds"]) == ("network", 3)
    assert report["rows"] == [{"ratio": 0.5}]
    assert report["versions"]["keras"] and report["cores"] >= 1
