"""Landscapes with known shapes, and points where there is none."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.diagnostics_networks import assert_same, variables

rng = np.random.default_rng(5)


def quadratic(size=4):
    """A linear model, its batch, and the Hessian of its mean squared error."""
    x = rng.normal(size=(20, size))
    y = rng.normal(size=(20, 1))
    model = keras.Sequential([keras.Input((size,)), layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, x, y, 2 / 20 * x.T @ x


@pytest.mark.parametrize("dtype", networks.PRECISIONS)
def test_a_quadratic_loss_has_its_exact_beta(dtype):
    with networks.precision(dtype):
        model, x, y, hessian = quadratic()
        found = diagnostics.landscape(
            model, x, y, learning_rate=0.2, step_range=(0.5, 3), points=6
        )
    tolerance = 1e-11 if dtype == "float64" else 1e-4
    w = networks.numpy(model.trainable_variables[0]).astype("float64")
    g = (2 / 20 * x.T @ (x @ w - y)).ravel()
    steps = 0.2 * np.linspace(0.5, 3, 6)
    bent = np.linalg.norm(hessian @ g)
    beta = bent / np.linalg.norm(g)
    points = w.ravel() - steps[:, None] * g
    losses = np.mean((x @ points.T - y) ** 2, 0)

    np.testing.assert_allclose(found.steps, steps, rtol=1e-12)
    np.testing.assert_allclose(found.losses, losses, rtol=tolerance)
    np.testing.assert_allclose(found.distances, steps * bent, rtol=tolerance)
    np.testing.assert_allclose(found.betas, beta, rtol=tolerance)
    assert found.effective_beta == pytest.approx(beta, rel=tolerance)
    assert found.loss_range == pytest.approx((losses.min(), losses.max()), tolerance)
    assert found.gradient_distance == pytest.approx(
        (steps[0] * bent, steps[-1] * bent), tolerance
    )
    assert found.loss == pytest.approx(np.mean((x @ w - y) ** 2), tolerance)
    assert found.gradient_norm == pytest.approx(np.linalg.norm(g), tolerance)
    assert found.not_finite == ()


def test_a_random_direction_is_as_long_as_the_gradient():
    model, x, y, hessian = quadratic()
    settings = {"direction": "random", "points": 3}
    first = diagnostics.landscape(model, x, y, **settings)
    again = diagnostics.landscape(model, x, y, **settings)
    other = diagnostics.landscape(model, x, y, seed=1, **settings)
    assert_same(first.betas, again.betas)
    assert not np.allclose(first.betas, other.betas)
    eigenvalues = np.linalg.eigvalsh(hessian)
    assert eigenvalues[0] < first.effective_beta < eigenvalues[-1]
    np.testing.assert_allclose(
        first.distances / first.betas,
        0.1 * first.gradient_norm * np.array([0.5, 2.25, 4]),
        rtol=1e-4,
    )


def test_the_step_lengths_follow_the_rate_of_the_optimizer():
    model, x, y, _ = quadratic()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.5, 0.25])
    model.compile(keras.optimizers.SGD(schedule), "mse")
    found = diagnostics.landscape(model, x, y, step_range=(1, 2), points=2)
    np.testing.assert_allclose(found.steps, [0.5, 1.0], rtol=1e-6)
    model.fit(x, y, epochs=4, batch_size=20, verbose=0)
    found = diagnostics.landscape(model, x, y, step_range=(1, 2), points=2)
    np.testing.assert_allclose(found.steps, [0.25, 0.5], rtol=1e-6)


def test_k_points_cost_k_and_one_gradients(monkeypatch):
    calls = []
    value_and_grad = diagnostics.Objective.value_and_grad

    def counted(self, point=None):
        calls.append(point)
        return value_and_grad(self, point)

    monkeypatch.setattr(diagnostics.Objective, "value_and_grad", counted)
    model, x, y, _ = quadratic()
    found = diagnostics.landscape(model, x, y, points=5)
    assert found.gradient_evaluations == len(calls) == 6


@pytest.mark.parametrize("name", ["NoisyBN", "dropout"])
def test_noise_is_the_same_at_every_point_and_nothing_changes(name):
    model = networks.build(name, run_eagerly=networks.BACKEND == "tensorflow")
    x, y = networks.batch()
    before = variables(model)
    # So near that a loss with other noise would not be.
    found = diagnostics.landscape(model, x, y, step_range=(1e-4, 2e-4), points=3)
    np.testing.assert_allclose(found.losses, found.loss, rtol=1e-3)
    again = diagnostics.landscape(model, x, y, step_range=(1e-4, 2e-4), points=3)
    assert_same(found.losses, again.losses)
    assert_same(variables(model), before)


# Points that are not finite


def logarithm():
    """A model with one weight, 1, and the loss log(weight): its gradient is 1."""
    model = keras.Sequential(
        [
            keras.Input((1,)),
            layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.5), lambda y, outputs: ops.log(outputs))
    return model, np.ones((2, 1)), np.zeros((2, 1))


def test_points_without_a_loss_are_named_and_the_others_kept():
    found = diagnostics.landscape(*logarithm(), step_range=(0.5, 3.5), points=4)
    np.testing.assert_allclose(found.steps, [0.25, 0.75, 1.25, 1.75])
    np.testing.assert_allclose(found.losses[:2], np.log([0.75, 0.25]), rtol=1e-5)
    np.testing.assert_allclose(found.distances[:2], [1 / 3, 3], rtol=1e-5)
    assert np.all(np.isnan([found.losses, found.distances, found.betas])[:, 2:])
    assert found.not_finite == (1.25, 1.75)
    assert found.loss_range == pytest.approx((np.log(0.25), np.log(0.75)), 1e-5)
    assert found.effective_beta == pytest.approx(4, 1e-5)


def test_without_a_finite_gradient_no_point_is_finite():
    model, x, y = logarithm()
    model.trainable_variables[0].assign([[np.nan]])
    found = diagnostics.landscape(model, x, y, points=3)
    assert len(found.not_finite) == 3
    assert np.isnan(found.loss) and np.isnan(found.effective_beta)
    assert np.all(np.isnan([found.loss_range, found.gradient_distance]))
    assert found.gradient_evaluations == 1


def test_where_the_gradient_is_zero_there_is_no_beta():
    model, x, _, _ = quadratic()
    y = networks.numpy(model(x.astype("float32")))
    model.trainable_variables[0].assign(np.zeros((4, 1)))
    found = diagnostics.landscape(model, x, np.zeros_like(y), points=2)
    assert found.gradient_norm == 0
    assert found.gradient_distance == (0, 0)
    assert np.isnan(found.effective_beta)


# Bad input


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"points": 0}, "`points` must be an integer, positive"),
        ({"points": 2.5}, "`points` must be an integer"),
        ({"step_range": (2, 1)}, "`step_range` must be two positive numbers in order"),
        ({"step_range": (0, 1)}, "`step_range` must be two positive numbers in order"),
        ({"direction": "up"}, "`direction` must be one of 'gradient', 'random'"),
        ({"learning_rate": 0}, "`learning_rate` must be a number, positive"),
    ],
)
def test_arguments_out_of_range(settings, message):
    model, x, y, _ = quadratic()
    with pytest.raises(ValueError, match=message):
        diagnostics.landscape(model, x, y, **settings)


def test_a_model_without_an_optimizer_needs_a_rate():
    model, x, y, _ = quadratic()
    bare = keras.Model(model.inputs, model.outputs)
    with pytest.raises(ValueError, match="`learning_rate` must be given"):
        diagnostics.landscape(bare, x, y, "mse")
    found = diagnostics.landscape(bare, x, y, "mse", learning_rate=0.1)
    assert np.all(np.isfinite(found.losses))
