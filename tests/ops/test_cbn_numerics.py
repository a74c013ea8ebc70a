"""CBN against float64 NumPy: values, statistics, first and second derivatives."""

import keras
import numpy as np
import pytest

from keras_norms import CBN
from tests.support.autodiff import BACKEND, MODES, second_derivative, training_step
from tests.support.cbn_reference import CBNReference, finite_differences, relative_error

FORMS = {
    "shift": {},
    "ratio": {"mean_gradient": "ratio"},
    "coupled": {"decouple": False},
    "coupled_ratio": {"decouple": False, "mean_gradient": "ratio"},
}
RATES = [0.1, 0.05, 0.01, 0.01, 0.001, 0.0, 0.2, 0.03] + [0.005] * 12


def make(channels, shape, rng, rho=0.7, **form):
    """A built layer with random gamma and beta, and its reference."""
    layer = CBN(rho=rho, **form)
    layer.build((None, *shape[1:]))
    gamma, beta = rng.normal(1, 0.3, channels), rng.normal(0, 0.3, channels)
    layer.gamma.assign(gamma)
    layer.beta.assign(beta)
    gamma, beta = (keras.ops.convert_to_numpy(v) for v in (layer.gamma, layer.beta))
    reference = CBNReference(channels, rho=rho, **form)
    return layer, reference, gamma.astype("float64"), beta.astype("float64")


def batch(rng, shape, mean=None, std=None):
    """A float32 batch; by default every channel has its own mean and scale."""
    channels = shape[-1]
    mean = rng.normal(0, 1, channels) if mean is None else mean
    std = rng.uniform(0.5, 2, channels) if std is None else std
    return (mean + std * rng.normal(size=shape)).astype("float32")


def quadratic_loss(g, h):
    """sum(g * y + h * y^2 / 2), and its derivative with respect to y in NumPy."""

    def loss(y):
        weights = [keras.ops.convert_to_tensor(v, "float32") for v in (g, h)]
        return keras.ops.sum(weights[0] * y + 0.5 * weights[1] * y * y)

    return loss, lambda y: g + h * y


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_twenty_steps_with_changing_rates(form, mode):
    rng = np.random.default_rng(0)
    shape = (16, 5, 4, 6)
    layer, reference, gamma, beta = make(6, shape, rng, **FORMS[form])
    loss, upstream = quadratic_loss(rng.normal(size=shape), rng.normal(size=shape))
    step = training_step(layer, loss, mode)
    for rate in RATES:
        layer.set_learning_rate(rate)
        rate = float(keras.ops.convert_to_numpy(layer.learning_rate))
        x = batch(rng, shape)
        y, dx, dgamma, dbeta = step(x)
        expected, constants = reference.train(x, gamma, beta, rate)
        expected_gradients = reference.gradients(
            upstream(expected), x, gamma, beta, constants
        )
        assert relative_error(y, expected) < 1e-5
        for actual, wanted in zip((dx, dgamma, dbeta), expected_gradients):
            assert relative_error(actual, wanted) < 1e-5
        for name in ("mean", "square"):
            moving = keras.ops.convert_to_numpy(getattr(layer, f"moving_{name}"))
            assert relative_error(moving, getattr(reference, name)) < 1e-5
    x = batch(rng, shape)
    y = keras.ops.convert_to_numpy(layer(x, training=False))
    assert relative_error(y, reference.inference(x, gamma, beta)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_without_a_rate_the_batch_normalises_and_momentum_averages(form):
    rng = np.random.default_rng(1)
    shape = (32, 4)
    layer, reference, gamma, beta = make(4, shape, rng, momentum=0.9, **FORMS[form])
    layer.set_learning_rate(-1)
    for _ in range(5):
        x = batch(rng, shape)
        expected, _ = reference.train(x, gamma, beta)
        assert relative_error(layer(x, training=True), expected) < 1e-5
    y = layer(x, training=False)
    assert relative_error(y, reference.inference(x, gamma, beta)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_reference_gradients_are_finite_differences(form):
    rng = np.random.default_rng(2)
    shape = (5, 2, 3)
    _, reference, gamma, beta = make(3, shape, rng, **FORMS[form])
    reference.train(batch(rng, shape), gamma, beta, 0.05)
    x = batch(rng, shape).astype("float64")
    g = rng.normal(size=shape)
    _, constants = reference.train(x, gamma, beta, 0.02)
    gradients = reference.gradients(g, x, gamma, beta, constants)
    arguments = [x, gamma, beta]
    for i, gradient in enumerate(gradients):

        def loss(value, i=i):
            changed = [*arguments[:i], value, *arguments[i + 1 :]]
            return np.sum(g * reference.forward(*changed, constants))

        assert relative_error(gradient, finite_differences(loss, arguments[i])) < 1e-7


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_second_derivative_is_the_derivative_of_the_gradient(form, mode):
    rng = np.random.default_rng(3)
    shape = (6, 3, 4)
    layer, reference, gamma, beta = make(4, shape, rng, **FORMS[form])
    layer.set_learning_rate(0.03)
    rate = float(keras.ops.convert_to_numpy(layer.learning_rate))
    loss, upstream = quadratic_loss(rng.normal(size=shape), rng.normal(size=shape))
    first = batch(rng, shape)
    training_step(layer, loss, mode)(first)
    reference.train(first, gamma, beta, rate)

    x, direction = batch(rng, shape), rng.normal(size=shape).astype("float32")
    _, constants = reference.train(x, gamma, beta, rate)

    def directional(x):
        y = reference.forward(x, gamma, beta, constants)
        dx, _, _ = reference.gradients(upstream(y), x, gamma, beta, constants)
        return np.sum(direction * dx)

    expected = finite_differences(directional, x.astype("float64"))
    actual = second_derivative(layer, x, loss, direction, mode)
    assert relative_error(actual, expected) < 2e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["shift", "coupled"])
@pytest.mark.parametrize("mean", [1e3, -1e3])
def test_large_mean_from_the_first_step_on(form, mode, mean):
    rng = np.random.default_rng(4)
    shape = (32, 8, 8, 3)
    layer, reference, gamma, beta = make(3, shape, rng, **FORMS[form])
    layer.set_learning_rate(0.02)
    rate = float(keras.ops.convert_to_numpy(layer.learning_rate))
    g = rng.normal(size=shape)
    loss, _ = quadratic_loss(g, np.zeros(shape))
    step = training_step(layer, loss, mode)
    for _ in range(3):
        x = batch(rng, shape, mean=mean, std=1.0)
        y, *gradients = step(x)
        expected, constants = reference.train(x, gamma, beta, rate)
        wanted = reference.gradients(g, x, gamma, beta, constants)
        assert relative_error(y, expected) < 1e-3
        for actual, gradient in zip(gradients, wanted):
            assert relative_error(actual, gradient) < 1e-3


EXTREMES = {
    "zeros": np.zeros((8, 4, 3)),
    "constant": np.full((8, 4, 3), 7.5),
    "tiny": np.random.default_rng(6).normal(size=(8, 4, 3)) * 1e-20,
    "one_sample": np.random.default_rng(7).normal(size=(1, 1, 3)),
    "one_image": np.random.default_rng(13).normal(size=(1, 8, 8, 3)),
    "large": np.random.default_rng(8).normal(size=(8, 4, 3)) * 1e15,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_inputs_give_finite_values_and_gradients(name, form, mode):
    rng = np.random.default_rng(9)
    x = EXTREMES[name].astype("float32")
    layer, reference, gamma, beta = make(3, x.shape, rng, **FORMS[form])
    g = rng.normal(size=x.shape)
    loss, _ = quadratic_loss(g, np.zeros(x.shape))
    step = training_step(layer, loss, mode)
    for rate in (0.0, 0.02, 1.0):
        layer.set_learning_rate(rate)
        values = step(x)
        assert all(np.isfinite(value).all() for value in values)
        rate = float(keras.ops.convert_to_numpy(layer.learning_rate))
        if rate > 0:  # The reference has no limit of eta = 1 on its first step.
            expected, _ = reference.train(x, gamma, beta, rate)
            assert np.abs(values[0] - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.isfinite(keras.ops.convert_to_numpy(layer(x, training=False))).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_channel_stays_alone(mode):
    rng = np.random.default_rng(10)
    x = batch(rng, (8, 4, 3))
    x[0, 0, 1] = np.nan
    layer, _, _, _ = make(3, x.shape, rng)
    layer.set_learning_rate(0.02)
    loss, _ = quadratic_loss(rng.normal(size=x.shape), np.zeros(x.shape))
    values = training_step(layer, loss, mode)(x)
    statistics = map(
        keras.ops.convert_to_numpy, (layer.moving_mean, layer.moving_square)
    )
    for value in (*values, *statistics):
        assert np.isfinite(value[..., [0, 2]]).all()


def test_zero_learning_rate_from_the_start_averages_all_batches():
    rng = np.random.default_rng(11)
    layer = CBN(center=False)
    layer.build((None, 3))
    layer.set_learning_rate(0.0)
    batches = [batch(rng, (16, 3)) for _ in range(4)]
    for x in batches:
        layer(x, training=True)
    mean = np.mean([x.mean(0, dtype="float64") for x in batches], axis=0)
    assert relative_error(layer.moving_mean, mean) < 1e-5


@pytest.mark.skipif(BACKEND == "jax", reason="float64 is a process-wide switch of JAX")
@pytest.mark.parametrize("form", FORMS)
def test_float64_layers_compute_in_float64(form):
    rng = np.random.default_rng(12)
    shape = (8, 3, 4)
    layer = CBN(dtype="float64", **FORMS[form])
    layer.build((None, 3, 4))
    reference = CBNReference(4, **FORMS[form])
    layer.set_learning_rate(0.02)
    for _ in range(3):
        x = rng.normal(1.0, 2.0, shape)
        expected, _ = reference.train(x, np.ones(4), np.zeros(4), 0.02)
        assert relative_error(layer(x, training=True), expected) < 1e-12
