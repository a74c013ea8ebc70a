"""Mean and variance of batch gradients against NumPy."""

import numpy as np
import pytest
from keras.losses import mean_squared_error as mse

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks

BATCHES = [networks.regression_batch(seed=seed) for seed in range(6)]


def test_moments_are_those_of_the_batch_gradients(linear):
    (w,) = linear.weights
    gradients = np.stack([(x.T @ (x @ w - y)).ravel() / len(x) for x, y in BATCHES])
    mean = gradients.mean(0)
    variance = np.trace(np.cov(gradients.T))
    squared = mean @ mean - variance / 6
    found = diagnostics.gradient_noise(linear.model, BATCHES)
    assert found.variance == pytest.approx(variance, rel=1e-4)
    assert found.squared_norm == pytest.approx(squared, rel=1e-4)
    assert found.signal_to_noise == pytest.approx(squared / variance, rel=1e-4)
    losses = [np.mean((x @ w - y) ** 2) for x, y in BATCHES]
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert (found.batches, found.not_finite) == (6, ())

    half = diagnostics.gradient_noise(linear.model, BATCHES, lambda *a: mse(*a) / 2)
    assert half.variance == pytest.approx(variance / 4, rel=1e-4)


def test_batches_without_a_finite_gradient_are_named(linear):
    first, *others = BATCHES[:4]
    bad = (np.full_like(first[0], np.nan), first[1])
    found = diagnostics.gradient_noise(linear.model, [first, bad, *others])
    assert found.not_finite == (1,)
    assert found.batches == 5
    expected = diagnostics.gradient_noise(linear.model, BATCHES[:4])
    assert found[:4] == pytest.approx(expected[:4])
    found = diagnostics.gradient_noise(linear.model, [bad, first, bad])
    assert np.isnan(found.variance) and found.not_finite == (0, 2)
    with pytest.raises(ValueError, match="at least two batches. Received: 1 batches"):
        diagnostics.gradient_noise(linear.model, [first])
    with pytest.raises(ValueError, match="at least one sample"):
        nothing = [part[:0] for part in first]
        diagnostics.gradient_noise(linear.model, iter([first, nothing]))
