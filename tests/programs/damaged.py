"""Damages every byte of the files of a run, a search and a saved model.

    python -m tests.programs.damaged

Each bit is flipped in turn, and the file is cut short at each byte. Whoever reads it
must get an error that names the file, or what was there; of a text, which is still JSON
with another digit, also what is changed. In a checkpoint nothing may change.
"""

import argparse
import collections
import pathlib
import sys
import tempfile

import keras
import numpy as np

from recipes.engine import run
from tests.programs import golden
from tests.support import synthetic_search as synthetic

CONFIG = {"norm": "cbn", "seed": 0}


def record(directory, complete=True, size=9):
    """A run of three epochs, of which each multiplies an array; it may go on."""
    one = run.Run(directory, CONFIG)
    if one.results is not None:
        return one
    with one:
        epoch, state = 0, np.linspace(0, 1, size)
        if (arrays := one.load()) is not None:
            epoch, state = int(arrays["epoch"]), arrays["state"]
        one.keep(epoch)
        while epoch < 3:
            epoch, state = epoch + 1, state * 1.1 + epoch
            one.log(epoch=epoch, test_accuracy=0.9 + epoch / 64)
            one.save(epoch=epoch, state=state)
        if complete:
            one.finish({"test_accuracy": 0.9 + 3 / 64, "name": "a"})
    return one


def run_state(directory):
    """All that a recipe reads of a run."""
    one = run.Run(directory, CONFIG)
    if one.results is not None:
        return one.results, one.metrics
    with one:
        arrays = one.load()
        return int(arrays["epoch"]), arrays["state"].tolist(), one.metrics


def search(directory):
    """A search of four trials, in which nothing is trained."""
    synthetic.Tuner(synthetic.oracle("random", 4), directory).search()


def search_state(directory):
    """All that a search goes on with, and its table is made of."""
    oracle = synthetic.oracle("random", 4)
    oracle._set_project_dir(str(directory.parent), directory.name)
    oracle.reload()
    trials = [oracle.trials[key].get_state() for key in oracle.start_order]
    return oracle.get_state(), trials


def model_state(path):
    """The outputs of a golden model."""
    with np.load(golden.DIRECTORY / "0.1.0-jax" / "cbn_plain.npz") as file:
        return golden.outputs(keras.models.load_model(path), file["x"])["inference"]


def count(path, read, step=1, bits=range(8), named=True):
    """Damages a file; returns a Counter of `KINDS` of what `read` does with it.

    Of every `step`-th byte each of `bits` is flipped, and the file is cut there. Wrong
    is another value from an archive, or an error that does not name the file.
    """
    content, expected = path.read_bytes(), read()
    found = collections.Counter()
    for place in range(0, len(content), step):
        flipped = [content[place] ^ 1 << (bit + place) % 8 for bit in bits]
        for byte in (*([b] for b in flipped), None):
            rest = b"" if byte is None else bytes(byte) + content[place + 1 :]
            path.write_bytes(content[:place] + rest)
            try:
                same = np.all(read() == expected)
                other = "wrong" if path.suffix == ".npz" else "changed"
                kind = "without effect" if same else other
            except Exception as error:
                clear = isinstance(error, ValueError) and error.__cause__ is None
                clear &= str(path.parent) in str(error) and "delete" in str(error)
                kind = "errors" if clear or not named else "wrong"
            found[kind] += 1
    path.write_bytes(content)
    assert np.all(read() == expected)
    return found


KINDS = ("errors", "without effect", "changed", "wrong")
SEARCH = ("oracle.json", "trial_2/trial.json")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="Of so many bytes one.")
    step = parser.parse_args().every
    wrong = 0

    def show(path, read, step, **more):
        nonlocal wrong
        found = count(path, read, step, **more)
        wrong += found["wrong"]
        counts = [f"{found[key]} {key}" for key in KINDS]
        about = f"{path.relative_to(root)}, {path.stat().st_size} bytes"
        print(f"{about}: {found.total()} times, {', '.join(counts)}")

    with tempfile.TemporaryDirectory() as root:
        for complete in (True, False):
            directory = pathlib.Path(root, "complete_run" if complete else "run")
            record(directory, complete)
            last = "results.json" if complete else "checkpoint.npz"
            for name in ("config.json", "metrics.jsonl", last):
                show(directory / name, lambda d=directory: run_state(d), step)
        directory = pathlib.Path(root, "search")
        search(directory)
        for name in SEARCH:
            show(directory / name, lambda: search_state(directory), 3 * step)
        path = pathlib.Path(root, "model.keras")
        golden_model = golden.DIRECTORY / "0.1.0-jax" / "cbn_plain.keras"
        path.write_bytes(golden_model.read_bytes())
        # Keras' errors name the member of the archive.
        show(path, lambda: model_state(path), 20 * step, bits=[0], named=False)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
