"""Decompositions, effective weights and scale invariance, against their formulas."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from keras import layers

from keras_norms import CBN, WN, WS, diagnostics, freeze
from tests.support import diagnostics_networks as networks
from tests.support.backend import BACKEND, precision, some
from tests.support.diagnostics_networks import WIDEST, float64, sequential
from tests.support.wrapped import Damped, Doubled

EXACT = 1e-12 if WIDEST == "float64" else 1e-5  # rounding of some operations


numbers = st.floats(-1e3, 1e3, allow_subnormal=False)


@settings(max_examples=50, deadline=None)
@given(arrays("float64", st.integers(2, 30), elements=numbers))
def test_a_vector_is_gamma_times_a_point_on_the_sphere_plus_beta(v):
    gamma, beta, direction = diagnostics.decompose(v)
    size = np.abs(v).max() + 1e-290
    assert abs(beta - np.mean(v)) <= 1e-13 * size
    assert abs(gamma - size * np.std(v / size)) <= 1e-13 * size
    np.testing.assert_allclose(gamma * direction + beta, v, atol=1e-13 * size)
    if gamma > 1e-6 * size:
        assert np.linalg.norm(direction) == pytest.approx(len(v) ** 0.5, rel=1e-12)


def test_decompose_over_axes_and_of_constant_vectors():
    v = np.random.default_rng(0).normal(size=(3, 2, 4))
    gamma, beta, direction = diagnostics.decompose(v, axes=(0, -1))
    np.testing.assert_allclose((gamma, beta), (v.std((0, 2)), v.mean((0, 2))))
    found = gamma[:, None] * direction + beta[:, None]
    np.testing.assert_allclose(found, v, atol=1e-14)
    gamma, beta, direction = diagnostics.decompose(np.full(7, 0.1))
    assert (gamma, beta) == (0, 0.1) and not direction.any()


LINEAR = {
    "dense": lambda: layers.Dense(4),
    "ws": lambda: WS(layers.Conv2D(3, 2)),
    "same": lambda: layers.Conv2D(3, 3, padding="same"),
    "grouped": lambda: layers.Conv2D(4, 3, strides=2, groups=2, use_bias=False),
    "depthwise": lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
    "transposed": lambda: layers.Conv2DTranspose(3, 2, strides=2, use_bias=False),
}


@pytest.mark.parametrize(
    "kind", some(LINEAR, ["dense", "ws"] if BACKEND == "jax" else LINEAR)
)
def test_effective_weights_are_one_layer_that_does_the_same(kind):
    """And batch normalization with them is, whose statistics are those of NumPy."""
    with precision(WIDEST):
        norm, linear = layers.BatchNormalization(epsilon=0.1), LINEAR[kind]()
        inputs = keras.Input((4, 3, 2))
        hidden = linear(layers.Activation("tanh")(inputs))
        model = keras.Model(inputs, layers.Activation("relu")(norm(hidden)))
    networks.randomize(model)
    norm.moving_mean.assign(norm.beta + 1)
    images = np.random.default_rng(0).normal(1, 2, (6, 4, 3, 2)).astype(WIDEST)
    before = model.get_weights()
    plain = linear.layer if isinstance(linear, WS) else linear
    one = type(plain).from_config({**plain.get_config(), "use_bias": True})
    one.build(images.shape)
    x = np.tanh(images)
    y = float64(linear(x))
    axes = tuple(range(y.ndim - 1))
    gamma, beta, *moving = map(float64, norm.variables)
    for training in (True, False):
        found = diagnostics.effective_weights(model, images, training=training)
        networks.assert_same(model.get_weights(), before)
        (found,) = found.values()
        assert found.layer == plain.name
        one.kernel.assign(found.kernel)
        one.bias.assign(found.bias)
        mean, variance = (y.mean(axes), y.var(axes)) if training else moving
        expected = gamma * (y - mean) / np.sqrt(variance + 0.1) + beta
        np.testing.assert_allclose(float64(one(x)), expected, rtol=EXACT, atol=EXACT)
    (frozen,) = diagnostics.effective_weights(freeze(model), images).values()
    np.testing.assert_array_equal(frozen.kernel, found.kernel)  # at inference


def test_effective_weights_of_a_kernel_that_each_call_replaces():
    dense, norm = layers.Dense(4), layers.BatchNormalization(epsilon=0.1)
    spectral = layers.SpectralNormalization(dense)
    model = keras.Sequential([keras.Input((3,)), spectral, norm])
    networks.randomize(model)
    x = np.random.default_rng(0).normal(1, 2, (8, 3)).astype("float32")
    (found,) = diagnostics.effective_weights(model, x).values()
    expected = float64(model(x, training=True))
    np.testing.assert_allclose(x @ found.kernel + found.bias, expected, atol=1e-4)


def test_effective_weights_of_any_model():
    """Of the branches only the first is a linear layer and a norm after it."""
    inputs = keras.Input((5,))
    branches = [
        layers.BatchNormalization(name="found")(layers.Dense(5)(inputs)),
        layers.BatchNormalization()(layers.Dense(5, activation="relu")(inputs)),
        layers.BatchNormalization()(Doubled(5)(inputs)),
        Damped()(layers.Dense(5)(inputs)),
    ]
    model, without = (keras.Model(inputs, branches[i:]) for i in range(2))
    for each in (model, keras.Model(inputs, model(inputs))):
        assert [*diagnostics.effective_weights(each, np.ones((8, 5)))] == ["found"]
    inputs = keras.Input((5, 4))
    dense = layers.Dense(5)(inputs)
    of_positions = keras.Model(inputs, layers.BatchNormalization(axis=1)(dense))
    for model, shape in ((without, (8, 5)), (of_positions, (8, 5, 4))):
        with pytest.raises(ValueError, match="must have a BatchNormalization of"):
            diagnostics.effective_weights(model, np.ones(shape))


def test_effective_weights_where_the_norm_has_another_dtype():
    """The second norm reads what ReLU made of the output of its linear layer."""
    with precision("mixed_bfloat16"):
        dense = [layers.Dense(5), layers.Dense(5)]
    norms = [layers.BatchNormalization(dtype="float32") for _ in dense]
    stack = [dense[0], norms[0], dense[1], layers.ReLU(dtype="bfloat16"), norms[1]]
    model = keras.Sequential([keras.Input((5,)), *stack])
    x = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
    (found,) = diagnostics.effective_weights(model, x).values()
    assert found.layer == dense[0].name
    y = float64(dense[0](x))
    expected = float64(dense[0].kernel) / np.sqrt(y.var(0) + norms[0].epsilon)
    np.testing.assert_allclose(found.kernel, expected, rtol=1e-5)


def test_a_model_with_layers_that_are_never_called():
    unused = {"unused": layers.Dense(3), "norm": layers.BatchNormalization()}
    body = [layers.Dense(4), layers.BatchNormalization(name="found")]
    body = keras.Sequential([keras.Input((5,)), *body])
    own = type("Own", (keras.Model,), {"call": lambda self, x: self.body(x)})()
    own.body, own.others = body, list(unused.values())
    x = np.ones((8, 5), "float32")
    own(x)
    assert [*diagnostics.effective_weights(own, x)] == ["found"]
    own.compile("sgd", "mse")
    found = diagnostics.blindness(own, x, x[:, :4])
    assert found.layers == ("found",)
    own.fit(x, x[:, :4], verbose=0, callbacks=[diagnostics.BatchStatistics(x, every=1)])


def test_invariance_of_every_norm():
    """Which weights do not count by their scale: of a unit, as a whole, or they do."""
    small = {"epsilon": 1e-8}
    model = sequential(
        layers.Dense(6, name="bn"),
        layers.BatchNormalization(**small),
        layers.LeakyReLU(),
        WN(layers.Dense(6, name="wn")),
        layers.LeakyReLU(),
        layers.Dense(6, use_bias=False, name="gn"),
        layers.GroupNormalization(2, **small),
        layers.Dense(6, activation="leaky_relu", name="cbn"),
        CBN(**small, name="norm"),
        layers.Dense(networks.CLASSES, name="last"),
        run_eagerly=networks.EAGER,
    )
    x, y = networks.batch()
    before = networks.variables(model)
    found = diagnostics.weight_geometry(model, x, y)
    networks.assert_same(networks.variables(model), before)
    kinds = dict(zip(found.weights, found.invariance))
    kernels = {w.split("/")[-2]: k for w, k in kinds.items() if w.endswith("kernel")}
    units = dict.fromkeys(("bn", "wn", "cbn"), "units")
    assert kernels == {**units, "gn": "whole", "last": "none"}
    # Zero, or without a gradient: of those nothing is known.
    assert {kinds[w] for w in kinds if w.endswith(("beta", "bias"))} == {"none"}
    kinds = np.array(found.invariance)
    assert np.abs(found.cosines[kinds != "none"]).max() < 2e-2
    assert found.unit_cosines[kinds == "units"].max() < 2e-2
    assert str(found).count("\n") == len(found.weights)


def test_a_cosine_of_a_unit_has_no_sign():
    one = layers.Dense(1, use_bias=False)
    model = sequential(one, shape=(3,), loss=lambda y, outputs: -outputs)
    x = np.random.default_rng(0).normal(1, 1, (8, 3)).astype("float32")
    model.set_weights([x.mean(0)[:, None]])
    found = diagnostics.weight_geometry(model, x, np.zeros((8, 1)), learning_rate=1.0)
    assert found.cosines[0] == pytest.approx(-1, abs=1e-4)
    assert found.unit_cosines[0] == pytest.approx(1, abs=1e-4)


def test_numbers_of_geometry():
    model = sequential(layers.Dense(3, activation="relu"), layers.Dense(3))
    networks.randomize(model)
    x, y = networks.batch()
    found = diagnostics.weight_geometry(model, x, y, learning_rate=0.7)
    weights = networks.weights_of(model)
    gradients = diagnostics.value_and_grad(model, x, y).gradient

    def cosine(w, g):
        return np.sum(w * g) / np.linalg.norm(w) / np.linalg.norm(g)

    norms, slopes = ([*map(np.linalg.norm, v)] for v in (weights, gradients))
    for numbers, expected in (
        (found.norms, norms),
        (found.gradient_norms, slopes),
        (found.cosines, [*map(cosine, weights, gradients)]),
        (found.effective_learning_rates, 0.7 / np.square(norms)),
    ):
        np.testing.assert_allclose(numbers, expected, rtol=1e-5, atol=1e-5)
    kernel, g = weights[0], gradients[0]
    largest = max(abs(cosine(*units)) for units in zip(kernel.T, g.T))
    assert found.unit_cosines[0] == pytest.approx(largest, abs=1e-5)
    assert np.isnan(found.unit_cosines[1])
    model.trainable_variables[0].assign(2 * kernel)
    twice = diagnostics.value_and_grad(model, x, y).gradient[0]
    deviation = np.linalg.norm(2 * twice - g) / np.linalg.norm(g)
    assert found.deviations[0] == pytest.approx(deviation, rel=1e-3)
    assert found.invariance[0] == "none" and found.deviations[0] > 0.05
    # Of a weight without a gradient nothing is known.
    model.layers[1].kernel.assign(np.zeros((3, 3)))
    found = diagnostics.weight_geometry(model, x, y)
    assert found.gradient_norms[0] == 0 and found.invariance[0] == "none"
    assert np.isnan(found.deviations[0]) and np.isnan(found.unit_deviations[0])
