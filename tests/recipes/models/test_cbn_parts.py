"""Mean removal and the l2 norm alone, and the norms that the recipes of CBN compare."""

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes.models import norms
from recipes.models.cbn_parts import L2Norm, MeanRemoval
from tests.support.autodiff import training_step
from tests.support.backend import numpy, thorough_on

pytestmark = thorough_on("jax")
OMEGA, RATE, EPSILON, RHO = 10.0, 0.03, 1e-5, 2.0
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def mean(x):
    return x.mean((0, 1, 2))


def batches(count=3):
    rng = np.random.default_rng(0)
    scale, shift = rng.uniform(0.5, 2, 5), rng.normal(size=5)
    arrays = [scale * rng.normal(size=(6, 3, 2, 5)) + shift for _ in range(count)]
    return [array.astype("float32").astype("float64") for array in arrays]


class Average:
    """A debiased exponential average of the batches so far."""

    def __init__(self, eta):
        self.eta, self.weight, self.value = eta, 0.0, 0.0

    def __call__(self, new):
        kept = self.eta * self.weight
        self.weight = kept + 1 - self.eta
        self.value = (kept * self.value + (1 - self.eta) * new) / self.weight
        return self.value


def layer_and_step(kind, name, value):
    """A layer that has one weight, and its training step with the loss sum(y^3)."""
    layer = kind(rho=RHO, omega=OMEGA, epsilon=EPSILON)
    layer.set_learning_rate(RATE)
    layer.build((None, 3, 2, 5))
    assert [w.name for w in layer.trainable_variables] == [name]
    layer.trainable_variables[0].assign(value)
    return layer, training_step(layer, lambda y: keras.ops.sum(y * y * y))


def test_mean_removal():
    beta, average = np.linspace(-1, 1, 5), Average(1 - OMEGA * RATE)
    layer, step = layer_and_step(MeanRemoval, "beta", beta)
    for x in batches():
        y, dx, dbeta = step(x.astype("float32"))
        expected = x - average(mean(x)) + beta
        np.testing.assert_allclose(y, expected, **CLOSE)
        g = 3 * expected**2
        np.testing.assert_allclose(dx, g - mean(g), **CLOSE)
        np.testing.assert_allclose(dbeta, g.sum((0, 1, 2)), **CLOSE)
    y = numpy(layer(x.astype("float32"), training=False))
    np.testing.assert_allclose(y, x - average.value + beta, **CLOSE)


def test_l2_norm():
    gamma, average = np.linspace(0.5, 2, 5), Average(1 - OMEGA * RATE)
    layer, step = layer_and_step(L2Norm, "gamma", gamma)
    for x in batches():
        y, dx, dgamma = step(x.astype("float32"))
        square = mean(x**2)
        root = RHO * np.sqrt(average(square) + EPSILON)
        np.testing.assert_allclose(y, gamma * x / root, **CLOSE)
        # The ratio of both roots is a constant for the gradient.
        g, a = 3 * y**2, gamma / root
        k = a * mean(g * x) / (square + EPSILON)
        np.testing.assert_allclose(dx, a * g - k * x, **CLOSE)
        np.testing.assert_allclose(dgamma, (g * x / root).sum((0, 1, 2)), **CLOSE)
    y = numpy(layer(x.astype("float32"), training=False))
    root = RHO * np.sqrt(average.value + EPSILON)
    np.testing.assert_allclose(y, gamma * x / root, **CLOSE)


@pytest.mark.parametrize("kind", [MeanRemoval, L2Norm])
def test_parts_save_and_load(kind, tmp_path):
    x = batches(1)[0].astype("float32")
    model = keras.Sequential([keras.layers.Input((3, 2, 5)), kind(rho=3.0)])
    model(x, training=True)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.layers[0], kind) and again.layers[0].initial_rho == 3.0
    np.testing.assert_array_equal(numpy(again(x)), numpy(model(x)))


@pytest.mark.parametrize("name", ["bn_before", "bn_rho", "bn_rho_amat"])
def test_coupled_norms_are_bn_with_rho(name):
    norm = norms.get(name, RHO, OMEGA)
    layer, x = norm.layer(5, name="x"), batches(1)[0].astype("float32")
    layer.build(x.shape)
    layer.beta.assign(np.full(5, 3.0))
    y = numpy(layer(x, training=True))
    expected = (x - mean(x)) / np.sqrt(x.var((0, 1, 2)) + EPSILON) / RHO + 3
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert norm.placement == ("before" if name == "bn_before" else "after")


@pytest.mark.parametrize(
    "name,eta", [("cbn", None), ("cbn_batch", 0.0), ("cbn_fixed", 0.9)]
)
def test_which_average_a_norm_uses(name, eta, recwarn):
    norm = norms.get(name, RHO, OMEGA)
    layer = norm.layer(5, name="x")
    assert norm.amat == (eta is None)
    if norm.amat:  # what the callback does
        layer.set_learning_rate(RATE)
        eta = 1 - OMEGA * RATE
    center, square = Average(eta), Average(eta)
    for x in batches():
        y = numpy(layer(x.astype("float32"), training=True))
        shifted = x - center(mean(x))
        root = np.sqrt(square(mean(shifted**2)) + EPSILON)
        np.testing.assert_allclose(y, shifted / root / RHO, rtol=1e-4, atol=1e-5)
    assert not [w for w in recwarn if "AMAT" in str(w.message)]


@pytest.mark.parametrize("name", sorted(norms.CBN_FAMILY))
def test_the_family_has_rho_and_omega(name):
    layer = norms.get(name, RHO, OMEGA).layer(5, name="x")
    assert isinstance(layer, CBN) and layer.initial_rho == RHO
    assert layer.omega == (1 if name == "cbn_fixed" else OMEGA)
    assert norms.NORMS[name].layer(1, name="x").initial_rho == 1.0
    with pytest.raises(ValueError, match="`rho` must be.*rho=0"):
        norms.get(name, rho=0.0)
