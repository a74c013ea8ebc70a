"""Candidates that take turns, the ratios of their times, and reports."""

import functools
import json
import math
import os
import statistics
import time

import keras
from absl import flags

from benchmarks import machine, tables
from recipes.engine import files


def define_names(flag, default, names, help=""):
    """Define a flag of names separated by commas; unknown names are an error."""
    listed = ", ".join(names)
    holder = flags.DEFINE_list(flag, default, f"{help} Of {listed}.".strip())
    flags.register_validator(
        flag, lambda given: {*(given or ())} <= {*names}, f"must be of {listed}"
    )
    return holder


def timer(run, at_least=0.0):
    """A function that calls `run` and returns the seconds it took.

    Args:
        run: A function without arguments, called three times here to warm up.
        at_least: Seconds. A shorter `run` is repeated until the repetitions take this
            long; the time is that of one. One call here measures how often to repeat.
    """

    def timed(number):
        start = time.perf_counter()
        for _ in range(number):
            run()
        return (time.perf_counter() - start) / number

    timed(3)
    number = math.ceil(at_least / timed(1)) if at_least else 1
    return functools.partial(timed, number)


def take_turns(timers, rounds):
    """Time all candidates in every round: a slow moment then affects all of them.

    Args:
        timers: Dict from names to functions that return seconds.
        rounds: How often each is called.

    Returns:
        Dict from names to lists of seconds.
    """
    times = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timed in timers.items():
            times[name].append(timed())
    return times


def ratio(times, yardstick):
    """Median and quartiles of time / the yardstick's time in the same round.

    Returns:
        Dict with `ratio`, and `ratio_quartiles`, a list of two.
    """
    ratios = [t / y for t, y in zip(times, yardstick, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": middle, "ratio_quartiles": [low, high]}


def report(output, benchmark, rows, **settings):
    """Print the table of rows; write them to the JSON file `output` if given."""
    found = described(benchmark, rows, **settings)
    print(tables.of(found))
    if output:
        files.write_json(output, found)


def described(benchmark, rows, **settings):
    """A report: rows with settings, versions and machine."""
    return {"benchmark": benchmark, **settings, **machine.describe(), "rows": rows}


def report_steps(steps, settings, output):
    """Like `report`, for long steps: the results of each are written when it ends.

    Args:
        steps: Iterable of dicts that name a step, each with a function that returns
            its results, a dict.
        settings: Dict of what all steps have in common, with the name of the benchmark.
        output: Path of a JSON file, or `None`. Steps it has with the same settings,
            backend and versions are not repeated; those with others are dropped.
    """
    rows = []
    if output and os.path.exists(output):
        with open(output) as file:
            report = json.load(file)
        now = described(rows=[], **settings)
        same = {*settings, "backend", "versions"}
        if all(report.get(key) == now[key] for key in same):
            rows = report["rows"]
    for row, results in steps:
        if any(row.items() <= other.items() for other in rows):
            continue
        keras.utils.clear_session()
        row |= results()
        rows.append(row)
        print(row, flush=True)
        if output:
            files.write_json(output, described(rows=rows, **settings))
    print(tables.of({**settings, "rows": rows}))
