"""DyT and Derf against NumPy, and the batch renormalization that the recipes have."""

import inspect
import math

import keras
import numpy as np
import pytest

from recipes.models import norms, pointwise
from tests.support.backend import numpy


@pytest.mark.parametrize(
    "name, kind, function",
    [
        ("dyt", pointwise.DynamicTanh, np.tanh),
        ("derf", pointwise.DynamicErf, np.vectorize(math.erf)),
    ],
)
def test_outputs_of_a_new_and_of_a_saved_layer(name, kind, function, tmp_path):
    assert type(norms.get(name).layer(5, name="x")) is kind
    x = 2 * np.random.default_rng(0).normal(size=(6, 3, 5)).astype("float32") + 1
    model = keras.Sequential([keras.layers.Input((3, 5)), kind(alpha=0.7)])
    np.testing.assert_allclose(numpy(model(x)), function(0.7 * x), rtol=1e-5, atol=1e-5)
    values = {"alpha": 0.3, "gamma": np.linspace(0.5, 2, 5), "beta": np.arange(5) - 2}
    values |= {"shift": -0.2} if name == "derf" else {}
    assert {v.name for v in model.trainable_variables} == values.keys()
    for variable in model.trainable_variables:
        variable.assign(values[variable.name])
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.layers[0].initial_alpha == 0.7
    expected = values["gamma"] * function(0.3 * x + values.get("shift", 0))
    np.testing.assert_allclose(numpy(again(x)), expected + values["beta"], atol=1e-5)


@pytest.mark.skipif(
    "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters,
    reason="this Keras has no batch renormalization",
)
def test_bounds_of_batch_renormalization():
    """Algorithm 1 of the paper, where r is 0.1, 1 and 10 and d is 7, bounded."""
    x = np.random.default_rng(0).normal(size=(60, 3))
    x = [0.1, 1, 10] * ((x - x.mean(0)) / x.std(0) + [0, 7, 0])
    layer = norms.get("renorm").layer(3, name="x")
    y = numpy(layer(x.astype("float32"), training=True))
    expected = (x - x.mean(0)) / x.std(0) * [1 / 3, 1, 3] + [0, 5, 0]
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)
    y = numpy(layer(x.astype("float32"), training=False))
    mean, variance = 0.01 * x.mean(0), (0.99 + 0.01 * x.std(0)) ** 2
    np.testing.assert_allclose(y, (x - mean) / variance**0.5, rtol=1e-3, atol=1e-3)
