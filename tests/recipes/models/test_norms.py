"""Norms that the recipes have for themselves, against NumPy."""

import keras
import numpy as np
import pytest
import scipy

from recipes.models import norms, pointwise
from tests.support.autodiff import training_step
from tests.support.backend import numpy
from tests.support.batch_reference import CBNReference

OMEGA, RATE, EPSILON, RHO = 10.0, 0.03, 1e-5, 2.0
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def mean(x):
    return x.mean((0, 1, 2))


def batches(count=3):
    rng = np.random.default_rng(0)
    scale, shift = rng.uniform(0.5, 2, 5), rng.normal(size=5)
    arrays = [scale * rng.normal(size=(6, 3, 2, 5)) + shift for _ in range(count)]
    return [array.astype("float32").astype("float64") for array in arrays]


@pytest.mark.parametrize("name", ["mean_removal", "l2_norm"])
def test_halves_of_cbn(name, tmp_path):
    """Outputs and gradients of the loss sum(y^3), and inference as made and loaded."""
    weight = np.linspace(0.5, 2, 5)
    reference = CBNReference(5, omega=OMEGA, rate=RATE)
    layer, removal = norms.get(name, RHO, OMEGA).layer(5, "x"), name == "mean_removal"
    model = keras.Sequential([keras.layers.Input((3, 2, 5)), layer])
    layer.set_learning_rate(RATE)
    (variable,) = layer.trainable_variables
    assert variable.name == ("beta" if removal else "gamma")
    variable.assign(weight)
    step = training_step(layer, lambda y: keras.ops.sum(y * y * y))

    def expected(x):
        if removal:
            return x - reference.moving_mean + weight
        return weight * x / (RHO * np.sqrt(reference.moving_statistic + EPSILON))

    for x in batches():
        y, dx, dweight = step(x.astype("float32"))
        # x and -x together have the mean 0 and the mean square of x.
        seen = x if removal else np.concatenate([x, -x])
        reference.train(seen, 1, 0)
        new = expected(x)
        np.testing.assert_allclose(y, new, **CLOSE)
        g = 3 * new**2
        if removal:
            dy_dweight, dx_expected = 1, g - mean(g)
        else:  # the ratio of the moving and the batch's root is a constant
            dy_dweight, a = new / weight, new / x
            dx_expected = a * (g - mean(g * x) / (mean(x**2) + EPSILON) * x)
        np.testing.assert_allclose(dx, dx_expected, **CLOSE)
        np.testing.assert_allclose(dweight, (g * dy_dweight).sum((0, 1, 2)), **CLOSE)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, again):
        y = numpy(each(x.astype("float32"), training=False))
        np.testing.assert_allclose(y, expected(x), **CLOSE)


@pytest.mark.parametrize(
    "name, rate, placement",
    [
        ("cbn", RATE, "before"),
        ("cbn_batch", -1, "before"),
        ("cbn_fixed", 0.1, "before"),
        ("bn_before", -1, "before"),
        ("bn_rho", -1, "after"),
        ("bn_rho_amat", RATE, "after"),
    ],
)
def test_which_average_a_norm_uses(name, rate, placement, recwarn):
    norm = norms.get(name, RHO, OMEGA)
    layer, decouple = norm.layer(5, name="x"), not name.startswith("bn")
    omega = 1 if name == "cbn_fixed" else OMEGA
    reference = CBNReference(5, RHO, omega, decouple=decouple, rate=rate)
    layer.build((None, 3, 2, 5))
    beta = np.linspace(-3, 3, 5)
    layer.beta.assign(beta)
    assert norm.amat == (rate == RATE) and norm.placement == placement
    if norm.amat:  # what the callback does
        layer.set_learning_rate(RATE)
    for x in batches():
        y = numpy(layer(x.astype("float32"), training=True))
        expected = reference.train(x, 1, beta)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert not [w for w in recwarn if "AMAT" in str(w.message)]


@pytest.mark.parametrize(
    "name, kind, function",
    [
        ("dyt", pointwise.DynamicTanh, np.tanh),
        ("derf", pointwise.DynamicErf, scipy.special.erf),
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
