r"""Kills recipes (SIGKILL) at random moments, and compares with what nobody killed.

    python -m tests.programs.killed --times=20 --recipes=recipes.train,recipes.cbn.rho

Each of `RECIPES`, with a small network and many epochs, is killed up to `--most`
seconds after it went on, and started again, until it was killed so often; a recipe that
ends before that is begun again in another directory. Then tables, results, metrics and
the weights of saved models must be those of the uninterrupted recipe, bit for bit, but
for times; no complete run may be written again; and no temporary file, lock or
checkpoint may be left.
"""

import argparse
import functools
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

import keras

import keras_norms  # noqa: F401, for saved models

RECIPES = {
    "recipes.train": "--epochs=150 --norm=noisy_bn --augment",
    "recipes.cbn.rho": "--epochs=40 --seeds=1 --activations=tanh --rhos=1,2 "
    "--workers=1",
    # Processes import the recipe anew: it is a real network.
    "recipes.compare": "--models=resnet8 --activations=tanh --epochs=12 --seeds=1 "
    "--workers=2",
    "tuner.search": "--model=resnet8 --epochs=5 --trials=24 --algorithm=random "
    "--workers=1 --name=killed",
    "recipes.smoothness.landscape": "--network=dln --depth=3 --dtype=float32 "
    "--steps=300 --every=2 --norms=bn,lp1 --workers=1",
}
# Times, places, and who asks KerasTuner for a trial next.
TIMES = "seconds|saved_model|run_times|display|ongoing_trials|retry_queue|tried_so"
SMALL = [sys.executable, "-m", "tests.programs.small_recipe"]


def command(recipe, directory):
    words = [*SMALL, recipe, *RECIPES[recipe].split(), f"--runs_dir={directory}/runs"]
    if recipe in ("recipes.train", "recipes.compare"):
        words.append(f"--saved_models_dir={directory}/models")
    if recipe != "recipes.smoothness.landscape":
        words += ["--train_size=96", "--batch_size=32"]
    return words


def killed_once(words, directory, most):
    """Starts a command and kills it; returns whether it was not complete before."""

    def lines():
        paths = directory.rglob("metrics.jsonl")
        return sum(path.read_bytes().count(b"\n") for path in paths)

    def written():
        return {p: p.stat().st_mtime_ns for p in directory.rglob("results.json")}

    complete, before, deadline = written(), lines(), None
    with open(directory / "stderr", "ab") as errors:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=errors)
    while process.poll() is None:
        if deadline is None and lines() != before:
            deadline = time.monotonic() + random.uniform(0, most)
        if deadline is not None and time.monotonic() >= deadline:
            process.kill()
            process.wait()
            if not complete.items() <= written().items():
                raise RuntimeError("What was complete was written again")
            return True
        time.sleep(0.002)
    if process.returncode:
        raise RuntimeError((directory / "stderr").read_text()[-3000:])
    return False


def outcome(directory):
    """A dict from each file to what is in it, without times and places."""

    def without_times(pairs):
        return {key: value for key, value in pairs if not re.match(TIMES, key)}

    found = {}
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.suffix in (".json", ".jsonl"):
            text = path.read_text()
            texts = [text] if path.suffix == ".json" else text.splitlines()
            load = functools.partial(json.loads, object_pairs_hook=without_times)
            found[name] = [load(text) for text in texts]
        elif path.suffix == ".keras":
            weights = keras.models.load_model(path).get_weights()
            found[name] = [array.tobytes() for array in weights]
        elif path.is_file() and path.name not in ("stderr", ".lock"):
            found[name] = path.suffix == ".md" and path.read_text()  # or a picture
    return found


def killed(recipe, root, expected, times, most):
    """Kills a recipe; returns in how many trainings, and which files differed."""
    kills, rounds, different = 0, 0, []
    while kills < times:
        directory = root / f"round{rounds}"
        directory.mkdir()
        rounds += 1
        words = command(recipe, directory)
        while kills < times and killed_once(words, directory, most):
            kills += 1
        subprocess.run(words, check=True, capture_output=True)
        found = outcome(directory)
        names = expected.keys() | found.keys()
        different += [n for n in names if found.get(n, 0) != expected.get(n, 0)]
    return rounds, different


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--most", type=float, default=2.0, help="Seconds of a start.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    wrong = []
    for recipe in arguments.recipes.split(","):
        with tempfile.TemporaryDirectory() as root:
            whole = pathlib.Path(root, "whole")
            subprocess.run(command(recipe, whole), check=True, capture_output=True)
            expected, limits = outcome(whole), (arguments.times, arguments.most)
            rounds, different = killed(recipe, whole.parent, expected, *limits)
        files = f"{len(different)} of {len(expected) * rounds} files differ"
        kills = f"{arguments.times} kills in {rounds} trainings"
        print(f"{recipe}: {kills}, {files}", *different, flush=True)
        wrong += different
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
