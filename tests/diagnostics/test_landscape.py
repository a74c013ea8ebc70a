"""Landscapes and gradient noise of known losses, and points where there is none."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras.losses import mean_squared_error as mse

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.backend import precision
from tests.support.diagnostics_networks import assert_same


def test_a_quadratic_loss_has_its_exact_beta(linear):
    model, x, y, (w,) = linear
    line = {"learning_rate": 0.2, "step_range": (0.5, 3), "points": 6}
    found = diagnostics.landscape(model, x, y, **line)
    tolerance = 1e-11 if w.dtype == model.compute_dtype else 1e-4
    g = x.T @ (x @ w - y) / len(x)  # of the mean over two outputs
    steps = 0.2 * np.linspace(0.5, 3, 6)
    bent = np.linalg.norm(x.T @ x @ g / len(x))
    beta = bent / np.linalg.norm(g)
    losses = np.array([np.mean((x @ (w - s * g) - y) ** 2) for s in steps])
    np.testing.assert_allclose(found.steps, steps, rtol=1e-12)
    np.testing.assert_allclose(found.losses, losses, rtol=tolerance)
    np.testing.assert_allclose(found.distances, steps * bent, rtol=tolerance)
    np.testing.assert_allclose(found.betas, beta, rtol=tolerance)
    assert found.effective_beta == max(found.betas)
    assert found.loss_range == (min(found.losses), max(found.losses))
    assert found.gradient_distance == (min(found.distances), max(found.distances))
    assert found.loss == pytest.approx(np.mean((x @ w - y) ** 2), tolerance)
    assert found.gradient_norm == pytest.approx(np.linalg.norm(g), tolerance)
    assert found.not_finite == () and found.gradient_evaluations == 6 + 1


def test_the_length_of_a_step_is_that_of_the_weights_after_rounding():
    """The first step is too small to move a weight, the second moves them farther."""
    with precision("bfloat16"):
        dense = layers.Dense(2, use_bias=False)
        model = networks.sequential(dense, shape=(4,), loss="mse")
    dense.kernel.assign(np.full((4, 2), 8.0))
    settings = {"learning_rate": 1.0, "step_range": (1e-3, 0.27), "points": 2}
    found = diagnostics.landscape(model, np.eye(4), np.full((4, 2), 16.0), **settings)
    # The Hessian of `mean((W - y)^2)` is `I / 4`.
    np.testing.assert_allclose(found.betas, [np.nan, 1 / 4], rtol=1e-3)


def test_a_random_direction_is_as_long_as_the_gradient(linear):
    first, again, other = (
        diagnostics.landscape(*linear[:3], direction="random", points=3, seed=seed)
        for seed in (0, 0, 1)
    )
    assert_same(first.betas, again.betas)
    assert not np.allclose(first.betas, other.betas)
    x = linear[1]
    eigenvalues = np.linalg.eigvalsh(x.T @ x / len(x))
    assert eigenvalues[0] < first.effective_beta < eigenvalues[-1]
    lengths = 0.1 * first.gradient_norm * np.array([0.5, 2.25, 4])
    np.testing.assert_allclose(first.distances / first.betas, lengths, rtol=1e-4)


def logarithm(rate=0.5):
    """A model with one weight, 1, and the loss log(weight): its gradient is 1."""
    one = layers.Dense(1, use_bias=False, kernel_initializer="ones")
    loss, optimizer = lambda y, outputs: ops.log(outputs), keras.optimizers.SGD(rate)
    model = networks.sequential(one, shape=(1,), loss=loss, optimizer=optimizer)
    return model, np.ones((2, 1)), np.zeros((2, 1))


def test_the_step_lengths_follow_the_rate_of_the_optimizer():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.5, 0.25])
    model, x, y = logarithm(schedule)
    for iterations, rate in ((0, 0.5), (4, 0.25)):
        model.optimizer.iterations.assign(iterations)
        found = diagnostics.landscape(model, x, y, step_range=(0.1, 0.2), points=2)
        np.testing.assert_allclose(found.steps, [0.1 * rate, 0.2 * rate], rtol=1e-6)
    ended = keras.optimizers.schedules.CosineDecay(0.5, 4)
    model.optimizer.learning_rate = ended
    with pytest.warns(UserWarning, match="rate of the optimizer is 0"):
        assert np.isnan(diagnostics.landscape(model, x, y).effective_beta)

    class WithoutARateOfItsOwn(keras.optimizers.SGD):
        @property
        def learning_rate(self):
            raise AttributeError("As `keras.optimizers.MultiOptimizer` does.")

    networks.compiled(model, model.loss, optimizer=WithoutARateOfItsOwn())
    with pytest.raises(ValueError, match="`learning_rate` must be given"):
        diagnostics.landscape(model, x, y)
    without = keras.Model(model.inputs, model.outputs)
    with pytest.raises(ValueError, match="`learning_rate` must be given"):
        diagnostics.landscape(without, x, y, "mse")


def test_points_without_a_loss_are_named_and_the_others_kept():
    model, x, y = logarithm()
    found = diagnostics.landscape(model, x, y, step_range=(0.5, 3.5), points=4)
    np.testing.assert_allclose(found.steps, [0.25, 0.75, 1.25, 1.75])
    np.testing.assert_allclose(found.losses[:2], np.log([0.75, 0.25]), rtol=1e-5)
    np.testing.assert_allclose(found.distances[:2], [1 / 3, 3], rtol=1e-5)
    assert np.all(np.isnan([found.losses, found.distances, found.betas])[:, 2:])
    assert found.not_finite == (1.25, 1.75)
    assert found.loss_range == pytest.approx((np.log(0.25), np.log(0.75)), 1e-5)
    assert found.effective_beta == pytest.approx(4, 1e-5)

    model.trainable_variables[0].assign([[np.nan]])
    found = diagnostics.landscape(model, x, y, points=3)
    assert len(found.not_finite) == 3 and found.gradient_evaluations == 1
    assert np.all(np.isnan([found.loss_range, found.gradient_distance]))
    assert np.isnan(found.loss) and np.isnan(found.effective_beta)
    # Where the gradient is zero there is no beta.
    model.compile("sgd", "mse")
    model.trainable_variables[0].assign([[0.0]])
    found = diagnostics.landscape(model, x, y, points=2)
    assert found.gradient_norm == 0 and found.gradient_distance == (0, 0)
    assert np.isnan(found.effective_beta)


def test_a_point_with_a_loss_but_no_gradient_is_named():
    """The square root of a weight, 1, after a step of twice its gradient."""
    model, x, y = logarithm(1.0)
    networks.compiled(model, lambda y, outputs: ops.sqrt(outputs))
    settings = {"learning_rate": 1.0, "step_range": (1, 2), "points": 2}
    found = diagnostics.landscape(model, x, y, **settings)
    assert found.not_finite == (2.0,)
    assert np.isfinite([*found.gradient_distance, found.effective_beta]).all()


BATCHES = [networks.regression_batch(seed=seed) for seed in range(6)]


def test_moments_are_those_of_the_batch_gradients(linear):
    model, *_, (w,) = linear
    gradients = np.stack([(x.T @ (x @ w - y)).ravel() / len(x) for x, y in BATCHES])
    mean = gradients.mean(0)
    variance = np.trace(np.cov(gradients.T))
    squared = mean @ mean - variance / 6
    found = diagnostics.gradient_noise(model, BATCHES)
    assert found.variance == pytest.approx(variance, rel=1e-4)
    assert found.squared_norm == pytest.approx(squared, rel=1e-4)
    assert found.signal_to_noise == pytest.approx(squared / variance, rel=1e-4)
    losses = [np.mean((x @ w - y) ** 2) for x, y in BATCHES]
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert (found.batches, found.not_finite) == (6, ())

    half = diagnostics.gradient_noise(model, BATCHES, lambda *a: mse(*a) / 2)
    assert half.variance == pytest.approx(variance / 4, rel=1e-4)


def test_batches_without_a_finite_gradient_are_named(linear):
    model, (first, *others) = linear[0], BATCHES[:4]
    bad = (np.full_like(first[0], np.nan), first[1])
    found = diagnostics.gradient_noise(model, [first, bad, *others])
    assert found.not_finite == (1,)
    assert found.batches == 5
    expected = diagnostics.gradient_noise(model, BATCHES[:4])
    assert found[:4] == pytest.approx(expected[:4])
    found = diagnostics.gradient_noise(model, [bad, first, bad])
    assert np.isnan(found.variance) and found.not_finite == (0, 2)
    with pytest.raises(ValueError, match="at least two batches. Received: 1 batches"):
        diagnostics.gradient_noise(model, [first])
    with pytest.raises(ValueError, match="at least one sample"):
        nothing = [part[:0] for part in first]
        diagnostics.gradient_noise(model, iter([first, nothing]))
