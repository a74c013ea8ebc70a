"""Kills a search (SIGKILL) at random moments, starts it again, and counts its trials.

    python -m tests.programs.tuner_killed --times=10 --most=10 --trials=40 ..

Other flags are those of `tuner.search`. A search is killed up to `--most` seconds after
its first epoch, so not while it starts. With `--small`, its networks are two Dense
layers, so that many trials end between two kills.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--most", type=float, default=45.0, help="Seconds of a start.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    arguments, flags = parser.parse_known_args()
    random.seed(arguments.seed)
    with tempfile.TemporaryDirectory() as directory:
        runs_dir = pathlib.Path(directory)
        module = "tests.programs.small_search" if arguments.small else "tuner.search"
        command = [sys.executable, "-m", module, "--name=killed"]
        command += [f"--runs_dir={runs_dir}", "--workers=1", *flags]
        written, again, kills = {}, 0, 0
        while kills < arguments.times:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            before = _epochs(runs_dir)
            while process.poll() is None and _epochs(runs_dir) == before:
                time.sleep(0.05)
            seconds = random.uniform(0, arguments.most)
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if process.poll() is not None:
                break  # the search was complete
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            ended = _ended(runs_dir)
            again += _look(runs_dir, written)
            print(f"killed after {seconds:.2f} s: {len(ended)} ended", flush=True)
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        again += _look(runs_dir, written)
        ended = collections.Counter(_ended(runs_dir))
        lines = [
            [json.loads(line)["epoch"] for line in path.read_text().splitlines()]
            for path in runs_dir.glob("killed/runs/*/metrics.jsonl")
        ]
        torn = [epochs for epochs in lines if epochs != list(range(1, len(epochs) + 1))]
        print(f"{kills} kills, {len(ended)} trials ended")
        print(f"{sum(n > 1 for n in ended.values())} trials ended twice")
        print(
            f"{again} finished runs were written again, {len(torn)} have torn metrics"
        )


def _epochs(runs_dir):
    """How many epochs all runs have recorded."""
    paths = runs_dir.glob("killed/runs/*/metrics.jsonl")
    return sum(path.read_text().count("\n") for path in paths)


def _ended(runs_dir):
    path = runs_dir / "killed" / "oracle.json"
    return json.loads(path.read_text())["end_order"] if path.exists() else []


def _look(runs_dir, written):
    """Counts the finished runs that changed since the last time."""
    again = 0
    for path in runs_dir.glob("killed/runs/*/results.json"):
        stamp = path.stat().st_mtime_ns
        again += written.get(path, stamp) != stamp
        written[path] = stamp
    return again


if __name__ == "__main__":
    main()
