"""The examples that README shows run, and what they make loads again."""

import pathlib
import re

import keras
import numpy as np
import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_examples_are_found():
    assert len(EXAMPLES) == 3


def test_layers(tmp_path):
    rng = np.random.default_rng(0)
    names = {
        "x": rng.normal(size=(64, 28, 28, 1)).astype("float32"),
        "y": rng.integers(0, 10, 64),
    }
    exec(EXAMPLES[0], names)
    model, x = names["model"], names["x"]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0)
    )
    exec(EXAMPLES[2], names)
    assert names["probe"].history["step"] == [20]
    assert names["largest"].shape == (2,)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="exports")
@pytest.mark.filterwarnings("ignore:fold")
def test_surgery(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    names = {
        "x": rng.normal(size=(8, 64, 64, 3)).astype("float32"),
        "y": rng.integers(0, 10, 8),
    }
    # Nothing is downloaded in a test.
    exec(EXAMPLES[1].replace('"imagenet"', "None"), names)
    expected = names["model"].predict(names["x"], verbose=0)
    folded = names["deployed"].predict(names["x"], verbose=0)
    np.testing.assert_allclose(folded, expected, atol=1e-5)
    exported = keras.layers.TFSMLayer("resnet50", call_endpoint="serve")
    np.testing.assert_allclose(exported(names["x"]), expected, atol=1e-5)
