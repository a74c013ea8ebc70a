"""Mean removal and the l2 norm alone, and the norms that the recipes of CBN compare."""

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes.models import norms
from recipes.models.cbn_parts import L2Norm, MeanRemoval
from tests.support.autodiff import training_step
from tests.support.backend import numpy

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


@pytest.mark.parametrize("kind", [MeanRemoval, L2Norm])
def test_parts(kind):
    """Outputs and gradients of the loss sum(y^3), and inference."""
    weight, average = np.linspace(0.5, 2, 5), Average(1 - OMEGA * RATE)
    layer = kind(rho=RHO, omega=OMEGA, epsilon=EPSILON)
    layer.set_learning_rate(RATE)
    layer.build((None, 3, 2, 5))
    (variable,) = layer.trainable_variables
    assert variable.name == ("beta" if kind is MeanRemoval else "gamma")
    variable.assign(weight)
    step = training_step(layer, lambda y: keras.ops.sum(y * y * y))

    def expected(x, statistic):
        if kind is MeanRemoval:
            return x - statistic + weight
        return weight * x / (RHO * np.sqrt(statistic + EPSILON))

    for x in batches():
        y, dx, dweight = step(x.astype("float32"))
        batch = mean(x) if kind is MeanRemoval else mean(x**2)
        new = expected(x, average(batch))
        np.testing.assert_allclose(y, new, **CLOSE)
        g = 3 * new**2
        if kind is MeanRemoval:
            dy_dweight, dx_expected = 1, g - mean(g)
        else:  # the ratio of the moving and the batch's root is a constant
            dy_dweight = new / weight
            a = dy_dweight * weight / x
            dx_expected = a * g - a * mean(g * x) / (batch + EPSILON) * x
        np.testing.assert_allclose(dx, dx_expected, **CLOSE)
        np.testing.assert_allclose(dweight, (g * dy_dweight).sum((0, 1, 2)), **CLOSE)
    y = numpy(layer(x.astype("float32"), training=False))
    np.testing.assert_allclose(y, expected(x, average.value), **CLOSE)


@pytest.mark.parametrize("kind", [MeanRemoval, L2Norm])
def test_parts_save_and_load(kind, tmp_path):
    x = batches(1)[0].astype("float32")
    model = keras.Sequential([keras.layers.Input((3, 2, 5)), kind(rho=3.0)])
    model(x, training=True)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.layers[0], kind) and again.layers[0].initial_rho == 3.0
    np.testing.assert_array_equal(numpy(again(x)), numpy(model(x)))


@pytest.mark.parametrize(
    "name, eta, placement",
    [
        ("cbn", None, "before"),
        ("cbn_batch", 0.0, "before"),
        ("cbn_fixed", 0.9, "before"),
        ("bn_before", 0.0, "before"),
        ("bn_rho", 0.0, "after"),
        ("bn_rho_amat", None, "after"),
    ],
)
def test_which_average_a_norm_uses(name, eta, placement, recwarn):
    norm = norms.get(name, RHO, OMEGA)
    layer, coupled = norm.layer(5, name="x"), name.startswith("bn")
    layer.build((None, 3, 2, 5))
    beta = np.linspace(-3, 3, 5) * coupled  # there it is added last
    layer.beta.assign(beta)
    assert norm.amat == (eta is None) and norm.placement == placement
    if norm.amat:  # what the callback does
        layer.set_learning_rate(RATE)
        eta = 1 - OMEGA * RATE
    center, square = Average(eta), Average(eta)
    for x in batches():
        y = numpy(layer(x.astype("float32"), training=True))
        shifted = x - center(mean(x))
        deviation = x - mean(x) if coupled else shifted
        root = np.sqrt(square(mean(deviation**2)) + EPSILON)
        expected = shifted / root / RHO + beta
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
