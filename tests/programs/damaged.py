"""Damage to the files of a run, a search and a saved model.

Each bit is flipped in turn, and the file is cut short at each byte, or at some. Whoever
reads it must get an error that names the file, or what was there; of a text, which is
still JSON with another digit, also what is changed. In a checkpoint nothing may change.
"""

import collections

import keras
import numpy as np

from recipes.engine import run
from tests.programs import golden
from tests.support import synthetic_search as synthetic

CONFIG = {"norm": "cbn", "seed": 0}
SEARCH = ("oracle.json", "trial_2/trial.json")
MODEL = golden.DIRECTORY / "0.1.0-jax" / "cbn_plain.keras"


def record(directory, complete=True):
    """A run of three epochs, of which each multiplies an array; it may go on."""
    one = run.Run(directory, CONFIG)
    if one.results is not None:
        return one
    with one:
        epoch, state = 0, np.linspace(0, 1, 9)
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
    oracle = synthetic.oracle("random", 4, directory=directory)
    oracle.reload()
    trials = [oracle.trials[key].get_state() for key in oracle.start_order]
    return oracle.get_state(), trials


def model_state(directory):
    """The outputs of a golden model."""
    with np.load(MODEL.with_suffix(".npz")) as file:
        x = file["x"]
    model = keras.models.load_model(directory / "model.keras")
    return golden.outputs(model, x)["inference"]


def count(path, read, step=1, bits=range(8)):
    """Damages a file; returns a Counter of what `read` does with it.

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
                # Keras' errors name the member of the archive.
                kind = "errors" if clear or path.suffix == ".keras" else "wrong"
            found[kind] += 1
    path.write_bytes(content)
    assert np.all(read() == expected)
    return found
