"""Internal covariate shift against gradients of a NumPy network."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference
from tests.support.diagnostics_networks import assert_same, flat, variables

# Weights of the reference network by layer.
PLACES = {"hidden": slice(0, 2), "norm": slice(2, 4), "outputs": slice(4, 6)}


def gradients(weights, x, y):
    ends = np.cumsum([w.size for w in weights])[:-1]
    return np.split(reference.gradient(*reference.of_weights(weights, x, y)), ends)


def expected_shift(weights, updated, x, y, name):
    """Distance, cosine and norm of G and G' of a layer, from their definition."""
    place = PLACES[name]
    partly = [*updated[: place.start], *weights[place.start :]]
    g, after = (flat(gradients(at, x, y)[place]) for at in (weights, partly))
    norm = np.linalg.norm(g)
    return np.linalg.norm(g - after), g @ after / norm / np.linalg.norm(after), norm


def test_shifts_are_those_of_the_reference(nonlinear):
    model, x, y, weights = nonlinear
    before = variables(model)
    slopes = gradients(weights, x, y)
    descent = [w - 0.03 * g.reshape(w.shape) for w, g in zip(weights, slopes)]
    rng = np.random.default_rng(0)
    anywhere = [w + 0.02 * rng.normal(size=w.shape) for w in weights]
    outputs = model.get_layer("outputs")
    rate = {"learning_rate": 0.03}
    for names, updated, settings in (
        (["outputs", "norm"], descent, {"layers": [outputs, "norm"], **rate}),
        # Without a choice: the layers with kernels.
        (["hidden", "outputs"], descent, rate),
        (["hidden", "outputs"], anywhere, {"updated": anywhere}),
    ):
        found = diagnostics.covariate_shift(model, x, y, **settings)
        assert list(found.layers) == names and found.not_finite == ()
        expected = [expected_shift(weights, updated, x, y, name) for name in names]
        distances, *others = np.transpose(expected)
        np.testing.assert_allclose(found.distances, distances, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose((found.cosines, found.norms), others, rtol=1e-5)
    nowhere = [np.full(w.shape, np.inf) for w in weights]
    found = diagnostics.covariate_shift(model, x, y, updated=nowhere)
    assert found.not_finite == ("outputs",)
    # Before the first layer there is none.
    assert np.isnan(found.distances[1]) and found.distances[0] == 0
    assert_same(variables(model), before)


def test_a_layer_of_layers_is_one_layer():
    block = keras.Sequential([layers.Dense(4), layers.Dense(4)], name="block")
    model = networks.sequential(layers.Dense(5), block, loss="mse")
    x, y = networks.batch()[0], np.ones((8, 4))
    found = diagnostics.covariate_shift(model, x, y, layers=["block"])
    gradient = diagnostics.value_and_grad(model, x, y).gradient
    assert found.norms == pytest.approx(np.linalg.norm(flat(gradient[2:])), rel=1e-5)

    block.trainable = False
    with pytest.raises(ValueError, match="layers with trainable weights.*'block'"):
        diagnostics.covariate_shift(model, x, y, layers=["block"])
    model = networks.sequential(layers.BatchNormalization(), loss="mse")
    with pytest.raises(ValueError, match="`model` must have a layer with a trainable"):
        diagnostics.covariate_shift(model, *networks.regression_batch())
