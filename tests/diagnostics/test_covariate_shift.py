"""Internal covariate shift against gradients of a NumPy network."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference
from tests.support.diagnostics_networks import assert_same, numpy, variables

# Weights of the reference network by layer.
PLACES = {"hidden": [0, 1], "norm": [2, 3], "outputs": [4, 5]}


def gradients(weights, x, y):
    function, point = reference.of_vector(
        lambda values: reference.loss(values, x, y), weights
    )
    ends = np.cumsum([w.size for w in weights])[:-1]
    return np.split(reference.gradient(function, point), ends)


def expected_shift(weights, updated, x, y, name):
    """Distance and cosine of G and G', from their definition."""
    place = PLACES[name]
    partly = [*updated[: place[0]], *weights[place[0] :]]
    before, after = gradients(weights, x, y), gradients(partly, x, y)
    g = np.concatenate([before[i] for i in place])
    g_after = np.concatenate([after[i] for i in place])
    cosine = g @ g_after / np.linalg.norm(g) / np.linalg.norm(g_after)
    return np.linalg.norm(g - g_after), cosine, np.linalg.norm(g)


@pytest.fixture
def network():
    model = networks.reference_network()
    x, y = networks.regression_batch()
    weights = [numpy(v).astype("float64") for v in model.trainable_variables]
    return model, x, y, weights


@pytest.mark.parametrize(
    "layers", [None, ["outputs", "norm"], ["hidden"]], ids=["all", "two", "first"]
)
def test_shift_of_a_gradient_step_is_that_of_the_reference(layers, network):
    model, x, y, weights = network
    before = variables(model)
    found = diagnostics.covariate_shift(model, x, y, layers=layers, learning_rate=0.3)
    updated = [
        w - 0.3 * g.reshape(w.shape) for w, g in zip(weights, gradients(weights, x, y))
    ]
    # Without a choice: the layers with kernels.
    assert list(found.layers) == (layers or ["hidden", "outputs"])
    expected = [expected_shift(weights, updated, x, y, name) for name in found.layers]
    distances, cosines, norms = np.array(expected).T
    np.testing.assert_allclose(found.distances, distances, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.cosines, cosines, rtol=1e-5)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    assert found.not_finite == ()
    assert_same(variables(model), before)


def test_shift_of_any_step(network):
    model, x, y, weights = network
    rng = np.random.default_rng(0)
    updated = [w + 0.1 * rng.normal(size=w.shape) for w in weights]
    found = diagnostics.covariate_shift(
        model, x, y, layers=[model.get_layer("outputs")], updated=updated
    )
    distance, cosine, _ = expected_shift(weights, updated, x, y, "outputs")
    assert found.distances[0] == pytest.approx(distance, rel=1e-4)
    assert found.cosines[0] == pytest.approx(cosine, rel=1e-5)


def test_the_first_layer_has_no_shift(network):
    model, x, y, weights = network
    found = diagnostics.covariate_shift(
        model, x, y, layers=["hidden"], updated=[2 * w for w in weights]
    )
    assert found.distances[0] == 0
    assert found.cosines[0] == pytest.approx(1)


def test_a_layer_of_layers_is_one_layer():
    block = keras.Sequential(
        [keras.Input((5,)), layers.Dense(4), layers.Dense(4)], name="block"
    )
    model = keras.Sequential([keras.Input((5,)), layers.Dense(5), block])
    x, y = networks.batch()
    found = diagnostics.covariate_shift(
        model, x, np.eye(4)[y], "mse", layers=["block"], learning_rate=0.1
    )
    after_first = [numpy(v) for v in model.trainable_variables]
    _, gradient = diagnostics.value_and_grad(model, x, np.eye(4)[y], "mse")
    for i in (0, 1):
        model.trainable_variables[i].assign(after_first[i] - 0.1 * gradient[i])
    _, shifted = diagnostics.value_and_grad(model, x, np.eye(4)[y], "mse")
    difference = np.concatenate(
        [(a - b).ravel() for a, b in zip(gradient[2:], shifted[2:])]
    )
    assert found.distances[0] == pytest.approx(np.linalg.norm(difference), rel=1e-4)


def test_a_step_to_nowhere_is_named(network):
    model, x, y, weights = network
    found = diagnostics.covariate_shift(
        model, x, y, updated=[np.full(w.shape, np.inf) for w in weights]
    )
    assert found.not_finite == ("outputs",)
    assert np.isnan(found.distances[1]) and found.distances[0] == 0


def test_bad_input(network):
    model, x, y, weights = network
    with pytest.raises(ValueError, match="`layers` must hold layers of model.*conv1"):
        diagnostics.covariate_shift(model, x, y, layers=["conv1"])
    with pytest.raises(ValueError, match="`layers` must be a list of layers"):
        diagnostics.covariate_shift(model, x, y, layers=[])
    with pytest.raises(ValueError, match="`updated` must have the shapes"):
        diagnostics.covariate_shift(model, x, y, updated=weights[:2])
    model.get_layer("norm").trainable = False
    with pytest.raises(ValueError, match="layers with trainable weights.*'norm'"):
        diagnostics.covariate_shift(model, x, y, layers=["norm"])
