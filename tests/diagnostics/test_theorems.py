"""The theorems of Santurkar et al. against derivatives of a NumPy network, float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from keras_norms import diagnostics, freeze, unfreeze
from keras_norms.diagnostics import theorems
from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference
from tests.support.backend import numpy, thorough_on
from tests.support.diagnostics_networks import float64
from tests.support.diagnostics_reference import normalized

pytestmark = thorough_on("jax")


seeds = st.integers(0, 2**32 - 1)
every_setting = settings(max_examples=25, deadline=None)


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def test_what_has_no_variance_and_what_has_much():
    for y in ([0.1] * 3, [0.3] * 7):
        with pytest.raises(ValueError, match="`y` must be a vector that is not const"):
            theorems.normalize(y)
    with pytest.raises(ValueError, match="`y` must be a vector of finite numbers"):
        theorems.normalize(1.0)
    for size in (1e-200, 1e200):
        y_hat, sigma = theorems.normalize([size, -size])
        assert isinstance(sigma, float)
        np.testing.assert_array_equal(y_hat, [1, -1])
        assert sigma == size


@every_setting
@given(seeds)
def test_facts_c1_and_c2_and_theorems_4_1_4_2_and_4_4(seed):
    """Equalities, for a channel of activations, an affine map and a smooth loss."""
    rng, m = np.random.default_rng(seed), 7
    y = rng.normal(rng.normal(), rng.uniform(0.5, 3), m)
    gamma, beta, target = rng.uniform(0.3, 2), rng.normal(), rng.normal(size=m)
    mixing = rng.normal(size=(m, m))

    def loss(z):
        return np.sum((np.tanh(mixing @ z) - target) ** 2)

    def affine(y):
        return gamma * normalized(y) + beta

    def loss_of_y(y):
        return loss(affine(y))

    z = affine(y)
    g, G = reference.gradient(loss, z), reference.gradient(loss_of_y, y)
    close(theorems.gradient(g, y, gamma), G)
    close(theorems.squared_gradient(g, y, gamma), G @ G)
    rows = [reference.gradient(lambda y, b=b: affine(y)[b], y) for b in range(m)]
    close(theorems.jacobian(y, gamma), rows)
    after, before = reference.hessian(loss, z), reference.hessian(loss_of_y, y)
    rounding = 1e-5 * np.linalg.norm(before)  # of central differences
    assert np.linalg.norm(theorems.hessian(g, after, y, gamma) - before) < rounding
    form = theorems.curvature(g, after, y, gamma)
    assert abs(form - G @ before @ G) < rounding * (G @ G)
    # Theorem 4.4 bounds dL/dw = X^T dL/dy; it is reached at multiples of rotations X.
    largest = rng.uniform(0.5, 3)
    bounds = theorems.weight_gradient_bound(g, y, largest, gamma)
    X = largest * np.linalg.qr(mixing)[0]
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
    with pytest.raises(ValueError, match="must have a positive inner product"):
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
    u = numpy(stack[0](x.astype("float32")))
    u, g = (np.moveaxis(v, norm.axis, -1).astype("float64") for v in (u, g))
    u, g = (v.reshape(-1, v.shape[-1]) for v in (u, g))
    gamma = float64(norm.gamma) if norm.scale else 1.0
    arrived = reference.at_input(gamma * g, u, epsilon=norm.epsilon)
    for found in (terms.measured, terms.bound):
        np.testing.assert_allclose(found, (arrived**2).sum(0), rtol=1e-3)
    np.testing.assert_allclose(terms.gradient, (g**2).sum(0), rtol=1e-5)
    np.testing.assert_allclose(terms.mean, len(u) * g.mean(0) ** 2, rtol=1e-3)

    with pytest.raises(ValueError, match="must be a BatchNormalization.*a Dropout"):
        diagnostics.lipschitz_terms(model, stack[3], x, y)
    freeze(model)
    with pytest.raises(ValueError, match="not frozen.*a FrozenBatchNormalization"):
        diagnostics.lipschitz_terms(model, "norm", x, y)
    unfreeze(model).get_layer("norm").trainable = False
    with pytest.raises(ValueError, match="not frozen"):
        diagnostics.lipschitz_terms(model, "norm", x, y)


def test_the_theorem_where_what_a_mask_hides_has_a_gradient():
    """A loss that a model adds does not know of the mask."""
    norm = layers.BatchNormalization(name="norm", epsilon=0.5)
    stack = [layers.Masking(), layers.Dense(4), norm, layers.Dense(3)]
    model = networks.compiled(networks.Subclassed(stack))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 4, 2)), rng.integers(0, 3, (6, 4))
    x[:, 2:] *= rng.random((6, 2, 1)) < 0.5
    model(x)
    networks.randomize(model)
    terms = diagnostics.lipschitz_terms(model, "norm", x, y)
    np.testing.assert_allclose(terms.bound, terms.measured, rtol=1e-4)
