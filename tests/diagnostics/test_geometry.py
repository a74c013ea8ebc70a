"""Decompositions, effective weights and scale invariance, against their formulas."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from keras import layers

from keras_norms import CBN, WN, WS, diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.diagnostics_networks import BACKEND, assert_same, numpy, variables

EXACT = 1e-12 if BACKEND == "tensorflow" else 1e-5  # the widest floats there are
DTYPE = networks.PRECISIONS[-1]


def images(size=12, channels=2, seed=0):
    return np.random.default_rng(seed).normal(1, 2, (size, 6, 5, channels))


def randomize(model, seed=1):
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0.5, 0.5, variable.shape))


# Lemma 1


numbers = st.floats(-1e3, 1e3, allow_subnormal=False)


@settings(max_examples=50, deadline=None)
@given(arrays("float64", st.integers(2, 30), elements=numbers), st.floats(0.1, 10))
def test_a_vector_is_gamma_times_a_point_on_the_sphere_plus_beta(v, a):
    n = len(v)
    gamma, beta, direction = diagnostics.decompose(v)
    size = np.abs(v).max() + 1e-290
    mean = sum(v.tolist()) / n
    variance = sum(((x - mean) / size) ** 2 for x in v.tolist()) / n
    assert abs(beta - mean) <= 1e-13 * size
    assert abs(gamma - size * variance**0.5) <= 1e-13 * size
    np.testing.assert_allclose(gamma * direction + beta, v, atol=1e-13 * size)
    if gamma > 1e-6 * size:
        assert np.linalg.norm(direction) == pytest.approx(n**0.5, rel=1e-12)
        assert abs(direction.sum()) < 1e-8 * n
        np.testing.assert_allclose(
            diagnostics.decompose(a * v + 3 * size).direction, direction, atol=1e-5
        )
    length = n**0.5 * np.hypot(gamma, beta)
    assert np.linalg.norm(v / size) == pytest.approx(length / size, rel=1e-12, abs=1e-9)


def test_decompose_over_axes_and_of_constant_vectors():
    v = np.random.default_rng(0).normal(size=(3, 2, 4))
    gamma, beta, direction = diagnostics.decompose(v, axes=(0, -1))
    assert gamma.shape == beta.shape == (2,)
    for unit in range(2):
        part = diagnostics.decompose(v[:, unit].ravel())
        assert gamma[unit] == pytest.approx(part.gamma)
        assert beta[unit] == pytest.approx(part.beta)
        np.testing.assert_allclose(direction[:, unit].ravel(), part.direction)
    found = diagnostics.decompose(np.full(7, 0.1))
    assert (found.gamma, found.beta) == (0, 0.1)
    assert not found.direction.any()
    with pytest.raises(
        ValueError, match="`v` must be an array of real numbers, with el"
    ):
        diagnostics.decompose(np.zeros((3, 0)))


# Eq. 12


def test_effective_weights_of_a_dense_layer():
    with networks.precision(DTYPE):
        dense, norm = layers.Dense(4), layers.BatchNormalization(epsilon=0.1)
        model = keras.Sequential([keras.Input((5,)), dense, norm])
    randomize(model)
    x, _ = networks.batch()
    before = variables(model)
    found = diagnostics.effective_weights(model, x)[norm.name]
    assert_same(variables(model), before)

    kernel, gamma, beta = (
        numpy(v).astype("float64") for v in (dense.kernel, norm.gamma, norm.beta)
    )
    mean, covariance = x.mean(0), np.cov(x.T, bias=True)
    for unit in range(4):
        w = kernel[:, unit]
        w = gamma[unit] * w / np.sqrt(w @ covariance @ w + 0.1)
        np.testing.assert_allclose(found.kernel[:, unit], w, rtol=EXACT, atol=EXACT)
        bias = beta[unit] - w @ mean
        assert found.bias[unit] == pytest.approx(bias, rel=EXACT, abs=EXACT)
    assert found.layer == dense.name


@pytest.mark.parametrize(
    "linear",
    [
        lambda: layers.Conv2D(3, 3, padding="same"),
        lambda: layers.Conv2D(4, 3, strides=2, groups=2, use_bias=False),
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
        lambda: layers.Conv2DTranspose(3, 2, strides=2, use_bias=False),
        lambda: WS(layers.Conv2D(3, 2)),
    ],
)
def test_effective_weights_are_one_layer_that_does_the_same(linear):
    norm = layers.BatchNormalization()
    linear = linear()
    inputs = keras.Input((6, 5, 2))
    hidden = linear(layers.Activation("tanh")(inputs))
    model = keras.Model(inputs, layers.Activation("relu")(norm(hidden)))
    randomize(model)
    for training in (True, False):
        found = diagnostics.effective_weights(model, images(), training=training)
        (found,) = found.values()
        plain = linear.layer if isinstance(linear, WS) else linear
        config = {**plain.get_config(), "use_bias": True, "name": "one"}
        one = type(plain).from_config(config)
        x = np.tanh(images()).astype("float32")
        one.build(x.shape)
        one.kernel.assign(found.kernel)
        one.bias.assign(found.bias)
        expected = numpy(norm(linear(x), training=training))
        np.testing.assert_allclose(numpy(one(x)), expected, rtol=1e-4, atol=1e-4)


def test_effective_weights_of_any_model():
    class Residual(keras.Model):
        def __init__(self):
            super().__init__()
            self.linear = layers.Dense(5, name="first")
            self.norm = layers.BatchNormalization(name="after_first")
            self.activated = layers.Dense(5, activation="relu", name="second")
            self.other = layers.BatchNormalization(name="after_second")

        def call(self, x, training=False):
            x = x + self.norm(self.linear(x), training=training)
            return self.other(self.activated(x), training=training)

    model = Residual()
    x, _ = networks.batch()
    model(x)
    assert [*diagnostics.effective_weights(model, x)] == ["after_first"]
    inputs = keras.Input((5,))
    nested = keras.Model(inputs, keras.Sequential([model])(inputs))
    assert [*diagnostics.effective_weights(nested, x)] == ["after_first"]


class Doubled(layers.Dense):
    def call(self, x):
        return 2 * super().call(x)


class Damped(layers.BatchNormalization):
    def call(self, x, training=None, mask=None):
        return super().call(x, training=training, mask=mask) / 2


@pytest.mark.parametrize(
    ("linear", "norm"),
    [(Doubled, layers.BatchNormalization), (layers.Dense, Damped)],
)
def test_effective_weights_of_classes_that_override_call(linear, norm):
    model = keras.Sequential([keras.Input((4,)), linear(3), norm(), layers.Dense(2)])
    with pytest.raises(ValueError, match="must have a BatchNormalization that reads"):
        diagnostics.effective_weights(model, np.ones((5, 4), "float32"))


def test_effective_weights_bad_input():
    x, _ = networks.batch()
    model = networks.reference_network()  # its Dense layer has an activation
    with pytest.raises(ValueError, match="must have a BatchNormalization that reads"):
        diagnostics.effective_weights(model, x)
    with pytest.raises(ValueError, match="batch of at least one sample"):
        diagnostics.effective_weights(model, x[:0])
    with pytest.raises(ValueError, match="must be a keras.Model that is built"):
        diagnostics.effective_weights(keras.Sequential([layers.Dense(2)]), x)


# Lemmas 2 and 3


def compiled(stack, rate=0.1):
    model = keras.Sequential([keras.Input((6, 5, 2)), *stack, layers.Dense(3)])
    model.compile(
        keras.optimizers.SGD(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=BACKEND == "tensorflow",
    )
    return model


def labels(size=12):
    return np.arange(size) % 3


def test_invariance_of_every_norm():
    """Which weights do not count by their scale: of a unit, as a whole, or they do."""
    keras.utils.set_random_seed(0)
    model = compiled(
        [
            layers.Conv2D(4, 2, name="bn"),
            layers.BatchNormalization(epsilon=1e-5, name="norm1"),
            layers.ReLU(),
            WN(layers.Conv2D(4, 2, name="wn"), name="wrapper"),
            layers.ReLU(),
            layers.Conv2D(4, 2, use_bias=False, name="gn"),
            layers.GroupNormalization(2, epsilon=1e-5, name="norm2"),
            layers.ReLU(),
            layers.Conv2D(4, 2, activation="relu", name="cbn"),
            CBN(name="norm4"),
            layers.Flatten(),
            layers.LayerNormalization(epsilon=1e-5, name="norm3"),
        ]
    )
    before = variables(model)
    found = diagnostics.weight_geometry(model, images(), labels())
    assert_same(variables(model), before)
    kinds = dict(zip(found.weights, found.invariance))
    kernels = {
        path.split("/")[-2]: kind
        for path, kind in kinds.items()
        if path.endswith("kernel")
    }
    last = model.layers[-1].name
    expected = {"bn": "units", "wn": "units", "gn": "whole", "cbn": "units"}
    assert kernels == {**expected, last: "none"}
    # Zero, or without a gradient: of those nothing is known.
    assert {kinds[p] for p in kinds if p.endswith(("beta", "bias"))} == {"none"}
    for path, kind, cosine, of_unit in zip(
        found.weights, found.invariance, found.cosines, found.unit_cosines
    ):
        if kind != "none":
            assert abs(cosine) < 2e-2, path
        if kind == "units":
            assert of_unit < 2e-2, path
    assert str(found).count("\n") == len(found.weights)


def test_numbers_of_geometry():
    model = compiled(
        [layers.Conv2D(3, 2, name="conv"), layers.ReLU(), layers.Flatten()]
    )
    randomize(model)
    x, y = images(), labels()
    found = diagnostics.weight_geometry(model, x, y, learning_rate=0.7)
    gradients = diagnostics.value_and_grad(model, x, y).gradient
    values = [numpy(v).astype("float64") for v in model.trainable_variables]
    for i, (w, g) in enumerate(zip(values, gradients)):
        norm, gradient_norm = np.linalg.norm(w), np.linalg.norm(g)
        assert found.norms[i] == pytest.approx(norm, rel=1e-6)
        assert found.gradient_norms[i] == pytest.approx(gradient_norm, rel=1e-5)
        cosine = np.sum(w * g) / norm / gradient_norm
        assert found.cosines[i] == pytest.approx(cosine, abs=1e-5)
        assert found.effective_learning_rates[i] == pytest.approx(0.7 / norm**2)
    kernel, g = values[0], gradients[0].astype("float64")
    cosines = [
        np.sum(kernel[..., i] * g[..., i])
        / np.linalg.norm(kernel[..., i])
        / np.linalg.norm(g[..., i])
        for i in range(3)
    ]
    assert found.unit_cosines[0] == pytest.approx(np.abs(cosines).max(), abs=1e-5)
    assert np.isnan(found.unit_cosines[1])
    model.trainable_variables[0].assign(2 * kernel)
    twice = diagnostics.value_and_grad(model, x, y).gradient[0]
    deviation = np.linalg.norm(2 * twice - g) / np.linalg.norm(g)
    assert found.deviations[0] == pytest.approx(deviation, rel=1e-3)
    assert found.invariance[0] == "none" and found.deviations[0] > 0.05


def test_orthogonality_is_exact():
    with networks.precision(DTYPE):
        model = compiled(
            [
                layers.Conv2D(4, 3, name="conv"),
                layers.BatchNormalization(epsilon=1e-20),
                layers.Flatten(),
            ]
        )
    found = diagnostics.weight_geometry(model, images(), labels())
    assert abs(found.cosines[0]) < EXACT
    assert found.unit_cosines[0] < EXACT
    assert found.unit_deviations[0] < 100 * EXACT
    # The bias before it has no gradient, up to rounding.
    assert found.gradient_norms[1] < EXACT * found.gradient_norms[0]


def test_a_regularizer_is_part_of_the_loss():
    model = compiled(
        [
            layers.Conv2D(4, 3, kernel_regularizer=keras.regularizers.L2(0.5)),
            layers.BatchNormalization(),
            layers.Flatten(),
        ]
    )
    found = diagnostics.weight_geometry(model, images(), labels())
    assert found.invariance[0] == "none" and found.cosines[0] > 0.01


def test_weight_geometry_bad_input():
    model = compiled([layers.Flatten()])
    with pytest.raises(ValueError, match="`tolerance` must be a number, positive"):
        diagnostics.weight_geometry(model, images(), labels(), tolerance=0)
    with pytest.raises(ValueError, match="batch of at least one sample"):
        diagnostics.weight_geometry(model, images(0), labels(0))
    plain = keras.Sequential([keras.Input((5,)), layers.Dense(2)])
    with pytest.raises(ValueError, match="`learning_rate` must be given"):
        diagnostics.weight_geometry(plain, *networks.regression_batch(), "mse")
