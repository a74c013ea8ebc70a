"""The examples of README and the guides run, and what they make loads again."""

import pathlib
import re

import keras
import numpy as np
import pytest
from keras import applications, layers

from tests.support.backend import later, once, thorough_on

pytestmark = thorough_on("jax")

ROOT = pathlib.Path(__file__).parent.parent
FIRST, SURGERY, DIAGNOSTICS = (
    example
    for page in ("README.md", "docs/diagnostics.md")
    for example in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
)


def batch(size, *shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, *shape)).astype("float32")
    return {"x": x, "y": rng.integers(0, 10, size)}


def test_layers_and_diagnostics(tmp_path):
    names = batch(64, 8, 8, 1)
    exec(FIRST, names)
    model, x = names["model"], names["x"]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0)
    )
    exec(DIAGNOSTICS, names)
    assert names["probe"].history["step"] == [20]
    assert names["largest"].shape == (2,)


def small_network(weights, include_top, pooling, input_shape):
    """Takes the place of ResNet-50, which takes a minute."""
    x = inputs = keras.Input(input_shape)
    for strides in (4, 2):
        x = layers.Conv2D(8, 3, strides)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(x))


@pytest.mark.parametrize(
    "network", [small_network, *later(applications.ResNet50, marks=[once])]
)
@pytest.mark.filterwarnings("ignore:fold")
def test_surgery(network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(applications, "ResNet50", network)
    names = batch(8, 64, 64, 3)
    # Nothing is downloaded in a test.
    exec(SURGERY.replace('"imagenet"', "None"), names)
    expected = names["model"].predict(names["x"], verbose=0)
    folded = names["deployed"].predict(names["x"], verbose=0)
    np.testing.assert_allclose(folded, expected, atol=1e-5)
    loaded = keras.models.load_model("resnet50.keras")
    assert not any("keras_norms" in type(each).__module__ for each in loaded.layers)
    found = loaded.predict(names["x"], verbose=0)
    np.testing.assert_allclose(found, folded, atol=1e-6)
