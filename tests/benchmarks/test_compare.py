"""What the benchmarks make of their times."""

import json

import pytest

from benchmarks import compare


def test_candidates_take_turns():
    calls = []

    def timer(name):
        def timed():
            calls.append(name)
            return float(len(calls))

        return timed

    times = compare.take_turns({"a": timer("a"), "b": timer("b")}, rounds=3)
    assert "".join(calls) == "ababab"
    assert times == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_timer_runs_once_and_counts_seconds():
    calls = []
    assert compare.timer(lambda: calls.append(1))() >= 0
    assert calls == [1]


def test_ratio_compares_within_a_round():
    # Every round is slower than the one before, for both.
    yardstick = [1.0, 10.0, 100.0, 1000.0, 10000.0]
    result = compare.ratio([2 * t for t in yardstick], yardstick)
    assert result == {"ratio": 2, "ratio_quartiles": [2, 2]}


def test_ratio_quartiles():
    result = compare.ratio([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [1.0] * 7)
    assert result == {"ratio": 4, "ratio_quartiles": [2, 6]}


def test_ratio_needs_as_many_times_of_both():
    with pytest.raises(ValueError):
        compare.ratio([1.0, 2.0], [1.0])


def test_table():
    text = compare.table(["norm", "s"], [["bn", 1], ["cbn", 2]])
    assert text == "| norm | s |\n| --- | --- |\n| bn | 1 |\n| cbn | 2 |"


def test_report_holds_rows_settings_and_machine(tmp_path):
    path = tmp_path / "report.json"
    compare.write_report(path, "network", [{"ratio": 0.5}], rounds=3)
    report = json.loads(path.read_text())
    assert report["benchmark"] == "network"
    assert report["rows"] == [{"ratio": 0.5}]
    assert report["rounds"] == 3
    assert report["versions"]["keras"]
    assert report["cores"] >= 1
