"""Damages every byte of the files of a run, a search and a saved model.

    python -m tests.programs.damaged

Each bit is flipped in turn, and the file is cut short at each byte. Whoever reads it
then must get an error that names the file, or what was there. A text with another
letter or digit in it is still JSON: these are counted as changed, and only what crashes
without naming the file is wrong. In a checkpoint nothing may change.
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

CONFIG = {"norm": "cbn", "seed": 0}


def record(directory, complete=True, config=CONFIG):
    """A run of three epochs, in which nothing is trained."""
    with run.Run(directory, config) as one:
        for epoch in (1, 2, 3):
            one.log(epoch=epoch, test_accuracy=0.9 + epoch / 64)
            one.save(epoch=epoch, state=np.arange(9.0) * epoch)
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
    from tests.support import synthetic_search as synthetic

    synthetic.Tuner(synthetic.oracle("random", 4), directory).search()


def search_state(directory):
    """All that a search goes on with, and its table is made of."""
    from tests.support import synthetic_search as synthetic

    oracle = synthetic.oracle("random", 4)
    oracle._set_project_dir(str(directory.parent), directory.name)
    oracle.reload()
    trials = [oracle.trials[key].get_state() for key in oracle.start_order]
    return oracle.get_state(), trials


def model_state(path):
    """The outputs of a golden model."""
    with np.load(golden.DIRECTORY / "0.1.0-jax" / "cbn_plain.npz") as file:
        return golden.outputs(keras.models.load_model(path), file["x"])["inference"]


def damages(content, step=1, bits=range(8)):
    """Yields what becomes of every `step`-th byte: each bit flipped, and cut there."""
    for place in range(0, len(content), step):
        for bit in bits:
            flipped = bytearray(content)
            flipped[place] ^= 1 << (bit + place) % 8
            yield bytes(flipped)
        yield content[:place]


def count(path, read, step=1, bits=range(8), named=True):
    """Damages a file, and counts what `read` does with it.

    Returns:
        Counter of `"errors"`, `"without effect"`, `"changed"` (another value in a text)
        and `"wrong"`: another value in an archive, or an error that does not say which
        file it is about, and what to do.
    """
    content = path.read_bytes()
    expected = read()
    found = collections.Counter()
    for damaged in damages(content, step, bits):
        path.write_bytes(damaged)
        try:
            same = np.all(read() == expected)
        except ValueError as error:
            clear = str(path.parent) in str(error) and "delete" in str(error)
            clear = clear and error.__cause__ is None
            found["errors" if clear or not named else "wrong"] += 1
        except Exception:
            found["wrong" if named else "errors"] += 1
        else:
            changed = "wrong" if path.suffix == ".npz" else "changed"
            found["without effect" if same else changed] += 1
        path.write_bytes(content)
    assert np.all(read() == expected)
    return found


RUNS = {True: ("config.json", "metrics.jsonl", "results.json")}
RUNS[False] = ("config.json", "metrics.jsonl", "checkpoint.npz")
SEARCH = ("oracle.json", "trial_2/trial.json")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="Of so many bytes one.")
    step = parser.parse_args().every
    wrong = 0

    def show(what, path, read, **arguments):
        nonlocal wrong
        size = path.stat().st_size
        found = count(path, read, **arguments)
        wrong += found["wrong"]
        counts = ", ".join(
            f"{found[key]} {key}"
            for key in ("errors", "without effect", "changed", "wrong")
        )
        print(f"{what} {path.name}, {size} bytes: {found.total()} times, {counts}")

    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        for complete, names in RUNS.items():
            directory = root / f"run{complete}"
            record(directory, complete)
            what = "complete run:" if complete else "run:"
            for name in names:
                show(
                    what, directory / name, lambda d=directory: run_state(d), step=step
                )
        search(root / "search")
        for name in SEARCH:
            path = root / "search" / name
            show("search:", path, lambda: search_state(root / "search"), step=3 * step)
        model = root / "cbn_plain.keras"
        golden_model = golden.DIRECTORY / "0.1.0-jax" / "cbn_plain.keras"
        model.write_bytes(golden_model.read_bytes())
        # Keras' errors name the member of the archive.
        show(
            "saved model:",
            model,
            lambda: model_state(model),
            step=20 * step,
            bits=[0],
            named=False,
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
