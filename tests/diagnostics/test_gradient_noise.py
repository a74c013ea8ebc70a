"""Mean and variance of batch gradients against NumPy."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.diagnostics_networks import assert_same, variables


def linear():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(2, use_bias=False)])
    model.compile("sgd", "mse")
    return model


def test_moments_are_those_of_the_batch_gradients():
    model = linear()
    batches = [networks.regression_batch(seed=seed) for seed in range(6)]
    w = networks.numpy(model.trainable_variables[0]).astype("float64")
    gradients = np.stack([(x.T @ (x @ w - y)).ravel() / 12 for x, y in batches])
    mean = gradients.mean(0)
    variance = np.trace(np.cov(gradients.T))
    found = diagnostics.gradient_noise(model, batches)
    assert found.variance == pytest.approx(variance, rel=1e-4)
    assert found.squared_norm == pytest.approx(mean @ mean - variance / 6, rel=1e-4)
    assert found.signal_to_noise == pytest.approx(
        (mean @ mean - variance / 6) / variance, rel=1e-4
    )
    second = np.mean(np.sum(gradients**2, 1))
    assert found.variance + found.squared_norm == pytest.approx(second, rel=1e-4)
    assert found.loss == pytest.approx(
        np.mean([np.mean((x @ w - y) ** 2) for x, y in batches]), rel=1e-5
    )
    assert (found.batches, found.not_finite) == (6, ())


@pytest.mark.parametrize("name", ["dropout", "CBN"])
def test_the_same_batch_again_has_no_variance(name):
    model = networks.build(name, run_eagerly=networks.BACKEND == "tensorflow")
    before = variables(model)
    found = diagnostics.gradient_noise(model, iter([networks.batch()] * 3))
    assert found.variance == 0
    assert found.signal_to_noise == np.inf
    assert_same(variables(model), before)


def test_batches_without_a_finite_gradient_are_named():
    model = linear()
    batches = [networks.regression_batch(seed=seed) for seed in range(4)]
    bad = (np.full((12, 5), np.nan), batches[0][1])
    found = diagnostics.gradient_noise(model, [batches[0], bad, *batches[1:]])
    assert found.not_finite == (1,)
    assert found.batches == 5
    expected = diagnostics.gradient_noise(model, batches)
    assert found[:4] == pytest.approx(expected[:4])
    found = diagnostics.gradient_noise(model, [bad, batches[0], bad])
    assert np.isnan(found.variance) and found.not_finite == (0, 2)


def test_a_loss_of_choice():
    model = linear()
    batches = [networks.regression_batch(seed=seed) for seed in range(2)]
    single = diagnostics.gradient_noise(model, batches)
    double = diagnostics.gradient_noise(
        model, batches, lambda y, p: 2 * ops.mean(ops.square(y - p), -1)
    )
    assert double.variance == pytest.approx(4 * single.variance, rel=1e-5)


def test_bad_input():
    model, (x, y) = linear(), networks.regression_batch()
    with pytest.raises(ValueError, match="at least two batches. Received: 1 batches"):
        diagnostics.gradient_noise(model, [(x, y)])
    with pytest.raises(ValueError, match="at least two batches. Received: 0 batches"):
        diagnostics.gradient_noise(model, [])
    with pytest.raises(ValueError, match="must hold pairs"):
        diagnostics.gradient_noise(model, [x, x])
    with pytest.raises(ValueError, match="at least one sample"):
        diagnostics.gradient_noise(model, [(x, y), (x[:0], y[:0])])
