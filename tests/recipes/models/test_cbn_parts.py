"""Mean removal and the l2 norm alone, and the norms that the recipes of CBN compare."""

import keras
import numpy as np
import pytest

from keras_norms import AMAT, CBN
from recipes.models import norms
from recipes.models.cbn_parts import L2Norm, MeanRemoval
from tests.support.autodiff import training_step

OMEGA, RATE, EPSILON = 10.0, 0.03, 1e-5
RHO = 2.0


def batches(count=3):
    rng = np.random.default_rng(0)
    scale, shift = rng.uniform(0.5, 2, 5), rng.normal(size=5)
    arrays = [scale * rng.normal(size=(6, 3, 2, 5)) + shift for _ in range(count)]
    return [array.astype("float32").astype("float64") for array in arrays]


class Average:
    """A debiased exponential average of the batches so far, SPEC of CBN."""

    def __init__(self, eta):
        self.eta, self.weight, self.value = eta, 0.0, 0.0

    def __call__(self, new):
        kept = self.eta * self.weight
        self.weight = kept + 1 - self.eta
        self.value = (kept * self.value + (1 - self.eta) * new) / self.weight
        return self.value


def layer_of(kind, **weights):
    layer = kind(rho=RHO, omega=OMEGA, epsilon=EPSILON)
    layer.set_learning_rate(RATE)
    layer.build((None, 3, 2, 5))
    for name, value in weights.items():
        getattr(layer, name).assign(value)
    return layer


def test_mean_removal():
    beta, average = np.linspace(-1, 1, 5), Average(1 - OMEGA * RATE)
    layer = layer_of(MeanRemoval, beta=beta)
    assert [w.name for w in layer.trainable_variables] == ["beta"]
    step = training_step(layer, lambda y: keras.ops.sum(y * keras.ops.square(y)))
    for x in batches():
        y, dx, dbeta = step(x.astype("float32"))
        expected = x - average(x.mean((0, 1, 2))) + beta
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
        g = 3 * expected**2
        np.testing.assert_allclose(dx, g - g.mean((0, 1, 2)), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dbeta, g.sum((0, 1, 2)), rtol=1e-4, atol=1e-4)
    y = keras.ops.convert_to_numpy(layer(x.astype("float32"), training=False))
    np.testing.assert_allclose(y, x - average.value + beta, rtol=1e-4, atol=1e-4)


def test_l2_norm():
    gamma, average = np.linspace(0.5, 2, 5), Average(1 - OMEGA * RATE)
    layer = layer_of(L2Norm, gamma=gamma)
    assert [w.name for w in layer.trainable_variables] == ["gamma"]
    step = training_step(layer, lambda y: keras.ops.sum(y * keras.ops.square(y)))
    for x in batches():
        y, dx, dgamma = step(x.astype("float32"))
        square = np.square(x).mean((0, 1, 2))
        root = RHO * np.sqrt(average(square) + EPSILON)
        np.testing.assert_allclose(y, gamma * x / root, rtol=1e-4, atol=1e-4)
        # The ratio of both roots is a constant for the gradient.
        g, a = 3 * y**2, gamma / root
        k = a * (g * x).mean((0, 1, 2)) / (square + EPSILON)
        np.testing.assert_allclose(dx, a * g - k * x, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            dgamma, (g * x / root).sum((0, 1, 2)), rtol=1e-4, atol=1e-4
        )
    y = keras.ops.convert_to_numpy(layer(x.astype("float32"), training=False))
    root = RHO * np.sqrt(average.value + EPSILON)
    np.testing.assert_allclose(y, gamma * x / root, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [MeanRemoval, L2Norm])
def test_parts_save_and_load(kind, tmp_path):
    x = batches(1)[0].astype("float32")
    model = keras.Sequential([keras.layers.Input((3, 2, 5)), kind(rho=3.0)])
    model(x, training=True)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.layers[0], kind) and again.layers[0].initial_rho == 3.0
    expected, found = (model.predict(x, verbose=0), again.predict(x, verbose=0))
    np.testing.assert_array_equal(found, expected)


def layer_named(name):
    norm = norms.get(name, RHO, OMEGA)
    layer = norm.layer(5, name="x")
    return norm, layer


@pytest.mark.parametrize("name", ["bn_before", "bn_rho", "bn_rho_amat"])
def test_coupled_norms_are_bn_with_rho(name):
    norm, layer = layer_named(name)
    x = batches(1)[0].astype("float32")
    layer.build(x.shape)
    layer.beta.assign(np.full(5, 3.0))
    y = keras.ops.convert_to_numpy(layer(x, training=True))
    centered = x - x.mean((0, 1, 2))
    expected = centered / np.sqrt(x.var((0, 1, 2)) + EPSILON) / RHO + 3
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert norm.placement == ("before" if name == "bn_before" else "after")


@pytest.mark.parametrize(
    "name,eta", [("cbn", None), ("cbn_batch", 0.0), ("cbn_fixed", 0.9)]
)
def test_which_average_a_norm_uses(name, eta):
    norm, layer = layer_named(name)
    assert norm.amat == (eta is None)
    if norm.amat:  # what the callback does
        layer.set_learning_rate(RATE)
        eta = 1 - OMEGA * RATE
    mean, square = Average(eta), Average(eta)
    for x in batches():
        y = keras.ops.convert_to_numpy(layer(x.astype("float32"), training=True))
        shifted = x - mean(x.mean((0, 1, 2)))
        root = np.sqrt(square(np.square(shifted).mean((0, 1, 2))) + EPSILON)
        np.testing.assert_allclose(y, shifted / root / RHO, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(norms.CBN_FAMILY))
def test_the_family_has_rho_and_omega(name):
    norm, layer = layer_named(name)
    assert isinstance(layer, CBN) and layer.initial_rho == RHO
    assert norms.NORMS[name].layer(1, name="x").initial_rho == 1.0
    with pytest.raises(ValueError, match="`rho` must be.*rho=0"):
        norms.get(name, rho=0.0)


@pytest.mark.parametrize("name", ["cbn_batch", "cbn_fixed", "bn_rho", "bn_before"])
def test_norms_without_amat_need_no_callback(name, recwarn):
    _, layer = layer_named(name)
    model = keras.Sequential([keras.layers.Input((3, 2, 5)), layer])
    model.compile("sgd", "mse")
    x = batches(1)[0].astype("float32")
    model.fit(x, x, verbose=0)
    assert not [w for w in recwarn if "AMAT" in str(w.message)]


def test_amat_finds_the_parts():
    layers = [MeanRemoval(), L2Norm()]
    model = keras.Sequential([keras.layers.Input((3, 2, 5)), *layers])
    model.compile(keras.optimizers.SGD(0.125), "mse")
    x = batches(1)[0].astype("float32")
    model.fit(x, x, verbose=0, callbacks=[AMAT()])
    assert [float(layer.learning_rate.numpy()) for layer in layers] == [0.125] * 2
