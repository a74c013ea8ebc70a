"""Mean removal and the l2 norm alone, and the norms that the recipes of CBN compare."""

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes.models import norms
from recipes.models.cbn_parts import L2Norm, MeanRemoval
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


@pytest.mark.parametrize("kind", [MeanRemoval, L2Norm])
def test_parts(kind, tmp_path):
    """Outputs and gradients of the loss sum(y^3), and inference as made and loaded."""
    weight = np.linspace(0.5, 2, 5)
    reference = CBNReference(5, omega=OMEGA, rate=RATE)
    layer = kind(rho=RHO, omega=OMEGA, epsilon=EPSILON)
    model = keras.Sequential([keras.layers.Input((3, 2, 5)), layer])
    layer.set_learning_rate(RATE)
    (variable,) = layer.trainable_variables
    assert variable.name == ("beta" if kind is MeanRemoval else "gamma")
    variable.assign(weight)
    step = training_step(layer, lambda y: keras.ops.sum(y * y * y))

    def expected(x):
        if kind is MeanRemoval:
            return x - reference.moving_mean + weight
        return weight * x / (RHO * np.sqrt(reference.moving_statistic + EPSILON))

    for x in batches():
        y, dx, dweight = step(x.astype("float32"))
        # x and -x together have the mean 0 and the mean square of x.
        seen = x if kind is MeanRemoval else np.concatenate([x, -x])
        reference.train(seen, 1, 0)
        new = expected(x)
        np.testing.assert_allclose(y, new, **CLOSE)
        g = 3 * new**2
        if kind is MeanRemoval:
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
    assert isinstance(again.layers[0], kind) and again.layers[0].initial_rho == RHO


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


@pytest.mark.parametrize("name", sorted(norms.CBN_FAMILY))
def test_the_family_has_rho_and_omega(name):
    layer = norms.get(name, RHO, OMEGA).layer(5, name="x")
    assert isinstance(layer, CBN) and layer.initial_rho == RHO
    assert layer.omega == (1 if name == "cbn_fixed" else OMEGA)
    assert norms.NORMS[name].layer(1, name="x").initial_rho == 1.0
    with pytest.raises(ValueError, match="`rho` must be.*rho=0"):
        norms.get(name, rho=0.0)
