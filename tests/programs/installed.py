"""What an installed package must do with nothing beside it but one backend.

KERAS_BACKEND=jax python tests/programs/installed.py       # `make test-dist`
"""

import importlib.metadata
import importlib.util
import pathlib
import tempfile

import keras
import numpy as np
from keras import layers

import keras_norms
from keras_norms import AMAT, CBN, WS, convert, diagnostics, fold, prune, recalibrate

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
BACKENDS = "tensorflow", "jax", "torch"


def check_installation():
    """The package that runs is the installed one, and there is one backend."""
    package = pathlib.Path(keras_norms.__file__).parent
    assert package.parent != CHECKOUT, package
    assert (package / "py.typed").exists()
    metadata = importlib.metadata.metadata("keras-norms")
    assert metadata["Version"] == keras_norms.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    there = [name for name in BACKENDS if importlib.util.find_spec(name)]
    assert there == [keras.backend.backend()], there


def check_use():
    """Train, convert, measure, prune, save, load, fold."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8, 8, 3)).astype("float32")
    y = rng.integers(0, 4, 64)
    stack = [keras.Input((8, 8, 3))]
    for conv in layers.Conv2D(8, 3, padding="same"), layers.Conv2D(8, 3):
        stack += [conv, layers.BatchNormalization(), layers.ReLU()]
    stack += [WS(layers.Conv2D(8, 3)), layers.GlobalAveragePooling2D(), layers.Dense(4)]
    model = convert(keras.Sequential(stack), CBN(rho=2), data=x)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    model.fit(x, y, 16, epochs=2, verbose=0, callbacks=[AMAT()])
    assert np.isfinite(diagnostics.landscape(model, x, y).losses).all()
    model = prune(recalibrate(model, x, verbose=0), x).model
    expected = model.predict(x, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "model.keras"
        model.save(file)
        loaded = keras.models.load_model(file)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    folded = fold(loaded).predict(x, verbose=0)
    np.testing.assert_allclose(folded, expected, atol=1e-5 * np.abs(expected).max())


if __name__ == "__main__":
    check_installation()
    check_use()
    print(f"keras_norms {keras_norms.__version__}: {keras.backend.backend()} works")
