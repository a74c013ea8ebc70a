r"""Kills recipes (SIGKILL) at random moments, and compares with what nobody killed.

    python -m tests.programs.killed --times=20 --recipes=recipes.train,recipes.cbn.rho

Each of `RECIPES`, with a small network and many epochs, is killed up to 2 seconds after
it went on, and started again, until it was killed so often; a recipe that ends before
that is begun again in another directory. Then tables, results, metrics and the weights
of saved models must be those of the uninterrupted recipe, bit for bit, but for times;
no complete run may be written again; and no temporary file or checkpoint may be left.
"""

import argparse
import functools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

import keras

import keras_norms  # noqa: F401, for saved models

ROOT = pathlib.Path(__file__).parents[2]
IMAGES = "--train_size=96 --batch_size=32"
SAVED = f"{IMAGES} --saved_models_dir=models"
TANH = f"{IMAGES} --seeds=1 --activations=tanh"
TUNED = "--algorithm=random --trials=24 --epochs=5 --model=resnet8 --workers=1"
STEPS = "--steps=300 --every=2 --dtype=float32 --norms=bn,lp1 --workers=1"
RECIPES = {
    "recipes.train": f"{SAVED} --epochs=150 --norm=noisy_bn --augment",
    "recipes.cbn.rho": f"{TANH} --epochs=40 --rhos=1,2 --workers=1",
    # Processes import the recipe anew: it is a real network.
    "recipes.compare": f"{TANH} {SAVED} --models=resnet8 --epochs=12 --workers=2",
    "tuner.search": f"{IMAGES} {TUNED} --name=killed",
    "recipes.smoothness.landscape": f"{STEPS} --network=dln --depth=3",
}
# A recipe with the tests' network.
SMALL = """
import runpy, sys
from recipes import models
from tests.support import small
models.build = small.convolutions
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
# Times, places, and who asks KerasTuner for a trial next.
TIMES = "seconds|saved_model|run_times|display|ongoing_trials|retry_queue|tried_so"


def is_killed(recipe, directory, kills=True):
    """Starts a recipe; returns whether it was killed before its end."""

    def lines():
        paths = directory.rglob("metrics.jsonl")
        return sum(path.read_bytes().count(b"\n") for path in paths)

    directory.mkdir(exist_ok=True)
    before, arguments = lines(), RECIPES[recipe].split()
    complete = {p: p.stat().st_mtime_ns for p in directory.rglob("results.json")}
    process = subprocess.Popen(
        [sys.executable, "-c", SMALL, recipe, "--runs_dir=runs", *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"},
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None and lines() == before:
        time.sleep(0.002)
    try:
        assert process.wait(random.uniform(0, 2) if kills else None) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        assert all(p.stat().st_mtime_ns == written for p, written in complete.items())
    return process.returncode != 0


def without_times(pairs):
    return {key: value for key, value in pairs if not re.match(TIMES, key)}


load = functools.partial(json.loads, object_pairs_hook=without_times)
READERS = {
    ".json": lambda path: load(path.read_text()),
    ".jsonl": lambda path: [load(line) for line in path.read_text().splitlines()],
    ".keras": lambda path: [
        array.tobytes() for array in keras.models.load_model(path).get_weights()
    ],
    ".md": pathlib.Path.read_text,
}


def outcome(directory):
    """A dict from each file, pictures too, to what is in it, without times."""
    return {
        str(path.relative_to(directory)): READERS.get(path.suffix, bool)(path)
        for path in directory.rglob("*")
        if path.is_file() and path.name not in (".lock", "details.md")  # with times
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    arguments = parser.parse_args()
    wrong = []
    for recipe in arguments.recipes.split(","):
        kills, rounds, different = 0, 0, []
        with tempfile.TemporaryDirectory() as root:
            whole = pathlib.Path(root, "whole")
            is_killed(recipe, whole, kills=False)
            expected = outcome(whole)
            while kills < arguments.times:
                directory = pathlib.Path(root, f"round{rounds}")
                rounds += 1
                while is_killed(recipe, directory, kills < arguments.times):
                    kills += 1
                found = outcome(directory)
                names = expected.keys() | found.keys()
                different += [n for n in names if found.get(n, 0) != expected.get(n, 0)]
        files = f"{len(different)} of {len(expected) * rounds} files differ"
        print(f"{recipe}: {kills} kills in {rounds} trainings, {files}", *different)
        wrong += different
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
