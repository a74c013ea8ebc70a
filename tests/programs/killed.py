r"""Kills recipes (SIGKILL) at random moments, and compares with what nobody killed.

    python -m tests.programs.killed --times=20
    python -m tests.programs.killed --recipes=recipes.train \
        --disk=<an empty directory on a disk of 256 kB>

Each of `RECIPES`, with a small network and many epochs, is killed up to `--most`
seconds after it went on, and started again, until it was killed so often; a recipe that
ends before that is begun again in another directory. Then tables, results, metrics and
the weights of saved models must be those of the uninterrupted recipe, bit for bit, but
for times; and no temporary file, lock or checkpoint may be left.

With `--disk`, nothing is killed: the recipe starts on a disk that has no space, and as
often as it ends with the error that says so, again with 16 kB more.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import keras

import keras_norms  # noqa: F401, for saved models

IMAGES = ["--train_size=96", "--batch_size=32"]
RECIPES = {
    "recipes.train": [*IMAGES, "--epochs=150", "--norm=noisy_bn", "--augment"],
    "recipes.cbn.rho": [
        *[*IMAGES, "--epochs=40", "--workers=1", "--seeds=1"],
        *["--activations=tanh", "--rhos=1,2"],
    ],
    "recipes.compare": [  # processes import the recipe anew: it is a real network
        *[*IMAGES, "--models=resnet8", "--activations=tanh", "--epochs=12"],
        *["--seeds=1", "--workers=2"],
    ],
    "recipes.smoothness.landscape": [
        *["--network=dln", "--depth=3", "--dtype=float32", "--steps=300", "--every=2"],
        *["--norms=bn,lp1", "--workers=1"],
    ],
}


def command(recipe, directory):
    places = [f"--runs_dir={directory}/runs"]
    if recipe in ("recipes.train", "recipes.compare"):
        places.append(f"--saved_models_dir={directory}/models")
    return [
        *[sys.executable, "-m", "tests.programs.small_recipe", recipe],
        *RECIPES[recipe],
        *places,
    ]


def start(recipe, directory):
    return subprocess.Popen(
        command(recipe, directory),
        stdout=subprocess.DEVNULL,
        stderr=open(directory / "stderr", "ab"),
    )


def lines(directory):
    paths = directory.glob("runs/*/metrics.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in paths)


def killed_once(recipe, directory, most):
    """Starts a recipe and kills it; returns whether it was not complete before."""
    process = start(recipe, directory)
    before = lines(directory)
    deadline = None
    seconds = random.uniform(0, most)
    while process.poll() is None:
        if deadline is None and lines(directory) != before:
            deadline = time.monotonic() + seconds
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.002)
    if process.returncode:
        raise RuntimeError((directory / "stderr").read_text()[-3000:])
    return False


def filled(recipe, disk):
    """Runs a recipe on a disk with ever more space; returns how often that was full."""
    filling = disk / "filling"
    space = os.statvfs(disk)
    filling.write_bytes(bytes(space.f_bavail * space.f_frsize))
    times = 0
    while True:
        done = subprocess.run(
            command(recipe, disk), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if not done.returncode:
            filling.unlink()
            return times
        if b"cannot be written: No space left on device" not in done.stderr:
            raise RuntimeError(done.stderr.decode()[-3000:])
        times += 1
        os.truncate(filling, max(filling.stat().st_size - 16384, 0))


def outcome(directory):
    """A dict from each file to what is in it, without times and places."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.suffix == ".json":
            found[name] = _without_times(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            text = path.read_text().splitlines()
            found[name] = [_without_times(json.loads(line)) for line in text]
        elif path.suffix == ".keras":
            weights = keras.models.load_model(path).get_weights()
            found[name] = [array.tobytes() for array in weights]
        elif path.suffix == ".md":
            found[name] = path.read_text()
        elif path.is_file() and path.name not in ("stderr", ".lock"):
            found[name] = None  # pictures are there
    return found


def _without_times(value):
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_times(item)
        for key, item in value.items()
        if not re.match("seconds|saved_model", key)
    }


def differing(expected, found):
    """The names of files that are not the same."""
    names = expected.keys() | found.keys()
    return [name for name in names if found.get(name, 0) != expected.get(name, 0)]


def killed(recipe, root, expected, arguments):
    """Kills a recipe; returns how often, in how many trainings, and what differed."""
    kills, rounds, different = 0, 0, []
    while kills < arguments.times:
        directory = root / f"round{rounds}"
        directory.mkdir()
        rounds += 1
        while kills < arguments.times and killed_once(
            recipe, directory, arguments.most
        ):
            kills += 1
        if start(recipe, directory).wait():
            raise RuntimeError((directory / "stderr").read_text()[-3000:])
        different += differing(expected, outcome(directory))
    return kills, rounds, different


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--most", type=float, default=2.0, help="Seconds of a start.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--disk", type=pathlib.Path)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    wrong = 0
    for recipe in arguments.recipes.split(","):
        with tempfile.TemporaryDirectory() as root:
            root = pathlib.Path(root)
            whole = root / "whole"
            whole.mkdir()
            subprocess.run(command(recipe, whole), check=True, capture_output=True)
            expected = outcome(whole)
            if arguments.disk:
                full, rounds = filled(recipe, arguments.disk), 1
                different = differing(expected, outcome(arguments.disk))
                what = f"{full} times without space"
            else:
                kills, rounds, different = killed(recipe, root, expected, arguments)
                what = f"{kills} kills"
            epochs = sum(len(v) for k, v in expected.items() if k[-5:] == "jsonl")
            print(
                f"{recipe}: {what} in {rounds} trainings of {epochs} lines of metrics, "
                f"{len(different)} of {len(expected) * rounds} files differ",
                *different,
                flush=True,
            )
            wrong += len(different)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
