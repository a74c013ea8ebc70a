"""The theorems of Santurkar et al. against derivatives of a NumPy network, float64."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from keras_norms import diagnostics
from keras_norms.diagnostics import theorems
from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference
from tests.support.diagnostics_networks import assert_same, relative_error, variables


class Setting:
    """One channel of activations, an affine map, and a smooth loss of `z`."""

    def __init__(self, seed, m=7):
        self.rng = rng = np.random.default_rng(seed)
        self.y = rng.normal(rng.normal(), rng.uniform(0.5, 3), m)
        self.gamma, self.beta = rng.uniform(0.3, 2), rng.normal()
        self.target, self.mixing = rng.normal(size=m), rng.normal(size=(m, m))

    def loss(self, z):
        """What is after the channel, the same in both networks."""
        return np.sum((np.tanh(self.mixing @ z) - self.target) ** 2)

    def normalized(self, y):
        centred = y - np.mean(y)
        return self.gamma * centred / np.sqrt(np.mean(centred**2)) + self.beta

    def loss_of_y(self, y):
        return self.loss(self.normalized(y))

    @property
    def g(self):
        return reference.gradient(self.loss, self.normalized(self.y))

    @property
    def gradient(self):
        return reference.gradient(self.loss_of_y, self.y)


seeds = st.integers(0, 2**32 - 1)
every_setting = settings(max_examples=25, deadline=None)


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@every_setting
@given(seeds)
def test_fact_c1(seed):
    case = Setting(seed)
    close(theorems.gradient(case.g, case.y, case.gamma), case.gradient)


@every_setting
@given(seeds)
def test_fact_c2(seed):
    case = Setting(seed)
    rows = [
        reference.gradient(lambda y, b=b: case.normalized(y)[b], case.y)
        for b in range(case.y.size)
    ]
    close(theorems.jacobian(case.y, case.gamma), np.stack(rows))


@every_setting
@given(seeds)
def test_theorem_4_1_is_an_equality(seed):
    case = Setting(seed)
    close(
        theorems.squared_gradient(case.g, case.y, case.gamma),
        case.gradient @ case.gradient,
    )


@every_setting
@given(seeds)
def test_theorem_4_2_is_an_equality(seed):
    case = Setting(seed)
    after = reference.hessian(case.loss, case.normalized(case.y))
    before = reference.hessian(case.loss_of_y, case.y)
    size = np.linalg.norm(before)
    actual = theorems.hessian(case.g, after, case.y, case.gamma)
    assert np.linalg.norm(actual - before) < 1e-5 * size
    G = case.gradient
    form = theorems.curvature(case.g, after, case.y, case.gamma)
    assert abs(form - G @ before @ G) < 1e-5 * size * (G @ G)


@every_setting
@given(seeds)
def test_theorem_4_4_bounds_the_gradient_of_the_weights(seed):
    case = Setting(seed)
    m = case.y.size
    g, G = case.g, case.gradient
    largest = case.rng.uniform(0.5, 3)
    without, with_norm = theorems.weight_gradient_bound(g, case.y, largest, case.gamma)
    # dL/dw = X^T dL/dy; it is tight where X is a multiple of a rotation.
    X = case.rng.normal(size=(m, 4))
    X *= largest / np.linalg.norm(X, 2)
    rotation = largest * np.linalg.qr(case.rng.normal(size=(m, m)))[0]
    for gradient, bound in ((g, without), (G, with_norm)):
        assert np.sum((X.T @ gradient) ** 2) <= bound * (1 + 1e-9)
        close(np.sum((rotation.T @ gradient) ** 2), bound)
    y_hat, sigma = theorems.normalize(case.y)
    reduced = case.gamma**2 / sigma**2 * without
    assert with_norm <= reduced * (1 + 1e-9)
    # As printed, without 1/m, what is reached would be more than the bound.
    printed = (
        case.gamma**2
        / sigma**2
        * largest**2
        * (g @ g - m * np.mean(g) ** 2 - (g @ y_hat) ** 2)
    )
    assert printed < np.sum((rotation.T @ G) ** 2)


@every_setting
@given(seeds)
def test_lemma_4_5_is_the_distance_to_the_nearest_multiple(seed):
    rng = np.random.default_rng(seed)
    w, optimum = rng.normal(size=(2, 6))
    if w @ optimum < 0:
        w = -w
    without, with_norm = theorems.initialization_gain(w, optimum)
    close(without, np.sum((w - optimum) ** 2))
    unit = optimum / np.linalg.norm(optimum)
    close(with_norm, w @ w - (w @ unit) ** 2)
    for scale in rng.uniform(0, 3, 20):
        assert with_norm <= np.sum((w - scale * optimum) ** 2) + 1e-9
    with pytest.raises(ValueError, match="must have a positive product"):
        theorems.initialization_gain(-w, optimum)


@every_setting
@given(seeds)
def test_theorem_c3_of_the_first_version(seed):
    rng = np.random.default_rng(seed)
    x, other = rng.normal(size=(2, 8))
    w = rng.normal()

    def outputs(w):
        return w * x + other

    def normalized(w):
        y = outputs(w)
        centred = y - np.mean(y)
        return centred / np.sqrt(np.mean(centred**2))

    step = 1e-30
    slopes = [f(w + 1j * step).imag / step for f in (outputs, normalized)]
    close(
        theorems.output_sensitivity(x, outputs(w)),
        [np.sum(slope**2) for slope in slopes],
    )


def test_a_constant_channel_cannot_be_normalised():
    with pytest.raises(ValueError, match="`y` must be a vector that is not constant"):
        theorems.normalize(np.ones(4))


# On a layer of a model


def convolutional(**settings):
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(name="norm", **settings),
            layers.Activation("tanh"),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    rng = np.random.default_rng(0)
    norm = model.get_layer("norm")
    if norm.scale:
        norm.gamma.assign(rng.uniform(0.5, 2, norm.gamma.shape))
        norm.beta.assign(rng.normal(size=norm.beta.shape))
    x = rng.normal(size=(5, 6, 6, 2))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, x, rng.integers(0, 3, 5), loss


@pytest.mark.parametrize(
    "settings",
    [{"epsilon": 0.5}, {"axis": 1, "scale": False, "center": False}],
    ids=["large epsilon", "another axis, not affine"],
)
def test_a_layer_takes_away_what_the_theorem_says(settings):
    model, x, y, loss = convolutional(**settings)
    before = variables(model)
    terms = diagnostics.lipschitz_terms(model, "norm", x, y, loss)
    np.testing.assert_allclose(terms.measured, terms.bound, rtol=1e-3)
    rest = terms.gradient - terms.mean - terms.correlation
    np.testing.assert_allclose(terms.bound, terms.scale * rest)
    assert np.all(terms.mean >= 0) and np.all(terms.correlation >= 0)
    assert_same(variables(model), before)


def test_terms_of_a_layer_are_those_of_its_arrays():
    model, x, y, loss = convolutional(epsilon=1e-7)
    norm = model.get_layer("norm")
    terms = diagnostics.lipschitz_terms(model, norm, x, y, loss)
    activations = networks.numpy(model.layers[0](x.astype("float32")))
    _, g = diagnostics.value_and_grad(model, x, y, loss, layer=norm)
    for channel in range(4):
        values, slopes = (v[..., channel].ravel() for v in (activations, g))
        gamma = float(networks.numpy(norm.gamma)[channel])
        slopes = slopes.astype("float64")
        expected = theorems.squared_gradient(slopes, values, gamma)
        assert terms.bound[channel] == pytest.approx(expected, rel=1e-3)
        assert terms.gradient[channel] == pytest.approx(slopes @ slopes, rel=1e-5)
    assert relative_error(terms.measured, terms.bound) < 1e-3


def test_other_layers_have_no_such_terms():
    model, x, y, loss = convolutional()
    with pytest.raises(ValueError, match="must be a BatchNormalization.*a Dropout"):
        diagnostics.lipschitz_terms(model, model.layers[3], x, y, loss)
    model.get_layer("norm").trainable = False
    with pytest.raises(ValueError, match="not frozen"):
        diagnostics.lipschitz_terms(model, "norm", x, y, loss)
