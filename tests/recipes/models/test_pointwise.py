"""DyT and Derf, and batch renormalization as the recipes have it, against float64."""

import inspect
import math

import keras
import numpy as np
import pytest

from recipes.models import norms, pointwise
from tests.support.autodiff import FAST, training_step
from tests.support.backend import numpy

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
erf = np.vectorize(math.erf)
FUNCTIONS = {  # and their derivatives
    "dyt": (np.tanh, lambda u: 1 - np.tanh(u) ** 2),
    "derf": (erf, lambda u: 2 / np.sqrt(np.pi) * np.exp(-(u**2))),
}


def inputs():
    x = 2 * np.random.default_rng(0).normal(size=(6, 3, 2, 5)) + 1
    return x.astype("float32").astype("float64")


def built(name):
    layer = norms.get(name).layer(5, name="x")
    layer.build((None, 3, 2, 5))
    return layer


@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_and_gradients(name):
    """Of the loss sum(y^3), with the initial weights and with others."""
    x, (function, slope) = inputs(), FUNCTIONS[name]
    layer = keras.Sequential([keras.layers.Input((3, 2, 5)), built(name)])
    loss = training_step(layer, lambda y: keras.ops.sum(y * y * y), FAST)
    gamma, beta, alpha, shift = np.ones(5), np.zeros(5), 0.5, 0.0
    for _ in range(2):
        found = dict(zip(["y", "x"], (results := loss(x.astype("float32")))[:2]))
        names = [variable.name for variable in layer.trainable_variables]
        found |= dict(zip(names, results[2:], strict=True))
        u = alpha * x + shift
        y = gamma * function(u) + beta
        g, du = 3 * y**2, 3 * y**2 * gamma * slope(u)
        expected = {"y": y, "x": alpha * du, "alpha": (x * du).sum()}
        expected["gamma"] = (g * function(u)).sum((0, 1, 2))
        expected["beta"] = g.sum((0, 1, 2))
        expected |= {"shift": du.sum()} if name == "derf" else {}
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            # Sums of up to 180 terms of order 10.
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-3)
        gamma, beta, alpha = np.linspace(0.5, 2, 5), np.linspace(-1, 1, 5), 0.3
        shift = -0.2 * (name == "derf")
        values = {"gamma": gamma, "beta": beta, "alpha": alpha, "shift": shift}
        for variable in layer.trainable_variables:
            variable.assign(values[variable.name])


@pytest.mark.parametrize("kind", [pointwise.DynamicTanh, pointwise.DynamicErf])
def test_save_and_load(kind, tmp_path):
    model = keras.Sequential([keras.layers.Input((5,)), kind(alpha=0.7)])
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.layers[0], kind) and again.layers[0].initial_alpha == 0.7
    x = np.ones((2, 5), "float32")
    np.testing.assert_array_equal(numpy(again(x)), numpy(model(x)))


@pytest.mark.skipif(
    "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters,
    reason="this Keras has no batch renormalization",
)
def test_batch_renormalization():
    """Algorithm 1 of the paper: r and d, their bounds, and the averages."""
    layer, mean, deviation = built("renorm"), 0.0, 1.0
    factors = np.array([0.1, 0.5, 1.0, 2.0, 10.0])
    for shift in (0.0, 5.0):
        x = factors * (inputs() + shift)
        y = numpy(layer(x.astype("float32"), training=True))
        batch_mean, batch_deviation = (
            x.mean((0, 1, 2)),
            np.sqrt(x.var((0, 1, 2)) + 1e-5),
        )
        r = np.clip(batch_deviation / deviation, 1 / 3, 3)
        d = np.clip((batch_mean - mean) / deviation, -5, 5)
        expected = (x - batch_mean) / batch_deviation * r + d
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
        mean = mean + 0.01 * (batch_mean - mean)
        deviation = deviation + 0.01 * (batch_deviation - deviation)
    y = numpy(layer(x.astype("float32"), training=False))
    np.testing.assert_allclose(y, (x - mean) / deviation, rtol=1e-3, atol=1e-3)
