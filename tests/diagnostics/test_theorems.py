"""The theorems of Santurkar et al. against derivatives of a NumPy network, float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from keras_norms import diagnostics
from keras_norms.diagnostics import theorems
from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference
from tests.support.backend import thorough_on
from tests.support.diagnostics_networks import float64

pytestmark = thorough_on("jax")


def normalized(y, gamma=1.0, beta=0.0):
    centred = y - np.mean(y)
    return gamma * centred / np.sqrt(np.mean(centred**2)) + beta


class Setting:
    """One channel of activations, an affine map, and a smooth loss after it."""

    def __init__(self, seed, m=7):
        self.rng = rng = np.random.default_rng(seed)
        self.y = rng.normal(rng.normal(), rng.uniform(0.5, 3), m)
        self.gamma, self.beta = rng.uniform(0.3, 2), rng.normal()
        self.target, self.mixing = rng.normal(size=m), rng.normal(size=(m, m))
        self.z = self.normalized(self.y)
        self.g = reference.gradient(self.loss, self.z)
        self.gradient = reference.gradient(self.loss_of_y, self.y)

    def loss(self, z):
        return np.sum((np.tanh(self.mixing @ z) - self.target) ** 2)

    def normalized(self, y):
        return normalized(y, self.gamma, self.beta)

    def loss_of_y(self, y):
        return self.loss(self.normalized(y))


seeds = st.integers(0, 2**32 - 1)
every_setting = settings(max_examples=25, deadline=None)


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@every_setting
@given(seeds)
def test_facts_c1_and_c2_and_theorems_4_1_4_2_and_4_4(seed):
    """The theorems are equalities."""
    case = Setting(seed)
    g, G = case.g, case.gradient
    channel = case.y, case.gamma
    close(theorems.gradient(g, *channel), G)
    close(theorems.squared_gradient(g, *channel), G @ G)
    rows = [
        reference.gradient(lambda y, b=b: case.normalized(y)[b], case.y)
        for b in range(case.y.size)
    ]
    close(theorems.jacobian(*channel), np.stack(rows))
    after = reference.hessian(case.loss, case.z)
    before = reference.hessian(case.loss_of_y, case.y)
    rounding = 1e-5 * np.linalg.norm(before)  # of central differences
    assert np.linalg.norm(theorems.hessian(g, after, *channel) - before) < rounding
    form = theorems.curvature(g, after, *channel)
    assert abs(form - G @ before @ G) < rounding * (G @ G)
    # Theorem 4.4 bounds dL/dw = X^T dL/dy; it is reached at multiples of rotations X.
    largest = case.rng.uniform(0.5, 3)
    bounds = theorems.weight_gradient_bound(g, case.y, largest, case.gamma)
    X = largest * np.linalg.qr(case.mixing)[0]
    for gradient, bound in zip((g, G), bounds):
        close(np.sum((X.T @ gradient) ** 2), bound)


@every_setting
@given(seeds)
def test_lemma_4_5_and_theorem_c3_of_the_first_version(seed):
    """The distance to the nearest multiple, and the sensitivity to a weight."""
    rng = np.random.default_rng(seed)
    w, optimum = rng.normal(size=(2, 6))
    w *= np.sign(w @ optimum)
    without, with_norm = theorems.initialization_gain(w, optimum)
    close(without, np.sum((w - optimum) ** 2))
    close(with_norm, w @ w - (w @ optimum) ** 2 / (optimum @ optimum))
    with pytest.raises(ValueError, match="must have a positive product"):
        theorems.initialization_gain(-w, optimum)
    x, other = rng.normal(size=(2, 8))
    w = rng.normal()
    # With respect to the weight of one input, `x`.
    slope = normalized((w + 1e-30j) * x + other).imag / 1e-30
    found = theorems.output_sensitivity(x, w * x + other)
    close(found, [x @ x, slope @ slope])


@pytest.mark.parametrize(
    "settings", [{"epsilon": 0.5}, {"axis": 1, "scale": False, "center": False}]
)
def test_a_layer_takes_away_what_the_theorem_says(settings):
    norm = layers.BatchNormalization(name="norm", **settings)
    stack = [layers.Conv2D(4, 3), norm, layers.Activation("tanh"), layers.Dropout(0.3)]
    top = [layers.Flatten(), layers.Dense(3)]
    model = networks.sequential(*stack, *top, shape=(5, 4, 2))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 5, 4, 2)), rng.integers(0, 3, 5)
    for variable in norm.trainable_variables:
        variable.assign(rng.uniform(0.5, 2, variable.shape))
    terms = diagnostics.lipschitz_terms(model, "norm", x, y)
    rest = terms.gradient - terms.mean - terms.correlation
    np.testing.assert_allclose(terms.bound, terms.scale * rest)
    g = diagnostics.value_and_grad(model, x, y, layer=norm).gradient
    u = float64(stack[0](x.astype("float32")))
    channels = norm.moving_mean.shape[0]
    u, g = (
        np.moveaxis(v.astype("float64"), norm.axis, -1).reshape(-1, channels)
        for v in (u, g)
    )
    sigma = np.sqrt(u.var(0) + norm.epsilon)
    u_hat = (u - u.mean(0)) / sigma
    gamma = float64(norm.gamma) if norm.scale else 1.0
    at_input = gamma / sigma * (g - g.mean(0) - u_hat * np.mean(g * u_hat, 0))
    for found in (terms.measured, terms.bound):
        np.testing.assert_allclose(found, (at_input**2).sum(0), rtol=1e-3)
    np.testing.assert_allclose(terms.gradient, (g**2).sum(0), rtol=1e-5)
    np.testing.assert_allclose(terms.mean, len(u) * g.mean(0) ** 2, rtol=1e-3)

    with pytest.raises(ValueError, match="must be a BatchNormalization.*a Dropout"):
        diagnostics.lipschitz_terms(model, stack[3], x, y)
    norm.trainable = False
    with pytest.raises(ValueError, match="not frozen"):
        diagnostics.lipschitz_terms(model, "norm", x, y)
