"""Derivatives of networks with every normalisation, against training and each other."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.diagnostics_networks import (
    BACKEND,
    NETWORKS,
    assert_same,
    relative_error,
    variables,
    weights_of,
)

rng = np.random.default_rng(3)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network(name):
    """The gradient is that of training, the Hessian its change; the model stays."""
    # On TensorFlow compilation takes long, and is tested with fewer networks.
    model = networks.build(name, run_eagerly=BACKEND == "tensorflow")
    x, y = networks.batch()
    model.train_on_batch(x, y)
    before, weights = variables(model), weights_of(model)
    objective = diagnostics.Objective(model, x, y)
    loss, gradient = objective.value_and_grad()

    v, w = rng.normal(size=(2, objective.start.size))
    product = objective.hessian_vector_product(v)
    if "CBN" in name:  # It holds ratios constant that move with the weights.
        assert w @ product == pytest.approx(
            v @ objective.hessian_vector_product(w), rel=1e-3
        )
    else:
        step = 1e-3
        _, ahead = objective.value_and_grad(objective.start + step * v)
        _, behind = objective.value_and_grad(objective.start - step * v)
        assert relative_error(product, (ahead - behind) / (2 * step)) < 1e-2

    again = objective.value_and_grad()
    assert again[0] == loss
    np.testing.assert_array_equal(again[1], gradient)
    assert_same(variables(model), before)

    assert model.train_on_batch(x, y) == pytest.approx(loss, rel=1e-6)
    steps = zip(weights, weights_of(model), objective.unflatten(gradient), strict=True)
    for old, new, g in steps:
        np.testing.assert_allclose(new, old - 0.5 * g, rtol=1e-5, atol=1e-6)


def test_hessian_of_cbn_without_a_rate_is_the_change_of_the_gradient():
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(6, activation="tanh"), CBN(), layers.Dense(2)]
    )
    objective = diagnostics.Objective(model, *networks.regression_batch(), "mse")
    vector = rng.normal(size=objective.start.size)
    step = 1e-3
    _, ahead = objective.value_and_grad(objective.start + step * vector)
    _, behind = objective.value_and_grad(objective.start - step * vector)
    product = objective.hessian_vector_product(vector)
    assert relative_error(product, (ahead - behind) / (2 * step)) < 1e-2
