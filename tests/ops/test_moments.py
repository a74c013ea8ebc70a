"""Moments against float64 NumPy where digits could be lost, and what masks leave."""

import numpy as np
import pytest
from keras import ops

from keras_norms import CBN
from keras_norms.ops.moments import moments
from tests.support.backend import BACKEND, has_latest_xla, jax_only, numpy
from tests.support.batch_reference import CBNReference, relative_error

OF_TWICE_A_PRIME, OF_CONSTANTS = 2e-6, [(64, 32, 32, 16), (600_000, 2), (10_000, 2)]
if BACKEND == "tensorflow":  # adds up one by one half of so many rows, of a prime all
    OF_TWICE_A_PRIME = 5e-5
else:
    OF_CONSTANTS.append((600_011, 2))


def exact_moments(x, axis=-1):
    """Mean and variance in float64."""
    axes = tuple({*range(x.ndim)} - {axis % x.ndim})
    return x.mean(axes, dtype="float64"), x.var(axes, dtype="float64")


def assert_moments(x, *bounds, axis=-1, **prior):
    """Their errors, of the mean and of the variance, are within the bounds."""
    batch = moments(ops.convert_to_tensor(x), "float32", axis, **prior)
    exact = exact_moments(numpy(ops.cast(x, "float32")), axis)
    for found, expected, bound in zip(batch[1:], exact, bounds, strict=True):
        assert relative_error(found, expected) < bound


def test_the_moving_mean_takes_the_place_of_an_element():
    """From an outlier on, sums would be 20,000 times as large as what is left."""
    batches = np.random.default_rng(1).normal(3, 1, (2, 40_000, 3)).astype("float32")
    batches[1, [0, -1]] = 1e5
    layer, reference = CBN(), CBNReference(3, rate=0.05)
    layer.set_learning_rate(0.05)
    for x in batches:
        y = layer(x, training=True)
        expected = reference.train(x, np.ones(3), np.zeros(3))
        assert relative_error(y, expected) < 1e-4
    assert relative_error(layer.moving_square, reference.moving_statistic) < 1e-4


@pytest.mark.parametrize(("outlier", "axis"), [(0, -1), (-1, -1), (0, 0), (-1, 1)])
def test_without_a_prior_an_element_takes_its_place(outlier, axis):
    """The first or the last, whichever is nearer to 0."""
    means = np.array([1e4, -1e4, 2e4])
    x = np.random.default_rng(2).normal(0, 1, (5000, 4, 3)) + means
    x[outlier, outlier] = 1e3 * means
    x = np.moveaxis(x.astype("float32"), -1, axis)
    # A thread of TensorFlow on a CPU adds 5,000 squares to that of the outlier, one
    # after the other, and each time the sum is rounded by 2^-24 of it at most.
    bound = 5000 * 2**-24 if BACKEND == "tensorflow" else 1e-4
    assert_moments(x, 1e-5, bound, axis=axis)


@has_latest_xla
@pytest.mark.parametrize(
    ("shape", "mean", "bounds"),
    [
        ((70, 1, 1, 4096), 1e3, (2e-7, 5e-5)),
        ((64, 128, 128, 4), 1e3, (2e-7, 4e-6)),
        ((64, 128, 128, 4), 3, (2e-7, 4e-6)),
        ((140_000, 3), 1e3, (2e-7, 2e-6)),
        ((140_002, 3), 1e3, (2e-7, OF_TWICE_A_PRIME)),
        ((16_384, 64), 1e3, (1e-7, 4e-6)),
        ((1000, 1024), 1e3, (1e-7, 4e-6)),
        ((1_000_000, 3), 3, (1e-7, 2e-6)),
    ],
)
def test_long_sums_keep_their_digits(shape, mean, bounds):
    means = mean * (-1) ** np.arange(shape[-1])
    x = np.random.default_rng(3).normal(means, 1, shape).astype("float32")
    assert_moments(x, *bounds)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "axis", "bounds"),
    [
        ((64, 64, 64, 4), -1, (2e-7, 4e-6)),
        ((140_002, 3), -1, (2e-6, OF_TWICE_A_PRIME)),
        ((16_384, 64), -1, (2e-7, 4e-6)),
        ((16, 3, 50_000), 1, (2e-7, 4e-6)),
    ],
)
def test_half_precision_is_added_up_in_float32(shape, axis, bounds, dtype):
    x = np.random.default_rng(5).normal(3, 1, shape).astype("float32")
    assert_moments(ops.cast(x, dtype), *bounds, axis=axis)


def test_long_sums_of_channels_that_are_first():
    means = np.array([1e3, -1e3, 3])[:, None]
    x = np.random.default_rng(6).normal(means, 1, (16, 3, 50_000)).astype("float32")
    assert_moments(x, 2e-7, 4e-6, axis=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("shape", OF_CONSTANTS)
def test_constant_channels(shape, axis, dtype):
    values = ops.cast(np.linspace(7.3, 9, shape[-1], dtype="float32"), dtype)
    x = ops.moveaxis(ops.broadcast_to(values, shape), -1, axis)
    _, mean, variance = moments(x, "float32", axis)
    np.testing.assert_array_equal(numpy(mean), numpy(ops.cast(values, "float32")))
    np.testing.assert_array_equal(numpy(variance), 0)


def test_no_variance_rounds_to_less_than_zero():
    """Constant channels, far from the prior mean."""
    values = np.random.default_rng(7).uniform(1e3, 1e4, 200).astype("float32")
    x = ops.convert_to_tensor(np.tile(values, (3, 1)))
    batch = moments(x, "float32", -1, prior=ops.zeros(200))
    assert numpy(batch.variance).min() >= 0
    assert relative_error(batch.mean, values) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_positions_may_be_anything(dtype):
    rng = np.random.default_rng(8)
    x = rng.normal(3, 1, (64, 200, 24)).astype("float32")
    mask = rng.random((64, 200, 1)) < 0.6
    x[~mask[..., 0]] = np.nan
    x = ops.cast(x, dtype)
    count, *found = moments(x, "float32", -1, ops.convert_to_tensor(mask))
    np.testing.assert_array_equal(numpy(count), mask.sum())
    expected = exact_moments(numpy(ops.cast(x, "float32"))[mask[..., 0]])
    for actual, exact, bound in zip(found, expected, (3e-7, 4e-6), strict=True):
        assert relative_error(actual, exact) < bound
    nothing = moments(x, "float32", -1, ops.zeros((64, 200, 1), "bool"))
    for value in nothing:
        np.testing.assert_array_equal(numpy(value), np.zeros(24))


@pytest.mark.parametrize("shared", [False, True] if BACKEND == "jax" else [False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(256, 5), (16, 4, 4, 5)])
def test_a_prior_that_is_wrong(shape, dtype, shared, monkeypatch):
    """Each channel by another amount; as on one device, and as on several."""
    name = "keras_norms.ops.moments.devices_share_batches"
    monkeypatch.setattr(name, lambda: shared)
    prior = np.array([1e2, -1e4, 1e10, 1e30, np.inf], "float32")
    x = np.random.default_rng(9).normal(1, 1, shape)
    x = ops.cast(x.astype("float32"), dtype)
    assert_moments(x, 1e-6, 1e-5, prior=ops.convert_to_tensor(prior))


@jax_only
def test_of_bfloat16_on_gpus(monkeypatch):
    """Rounding to bfloat16 adds about 2^-18 of the mean square to a variance."""
    import jax

    def on_gpu(*tensors, default, cuda=None, **others):
        return (cuda or default)(*tensors)

    monkeypatch.setattr(jax.lax, "platform_dependent", on_gpu)
    means = np.array([0, 1, -10, 100])
    x = np.random.default_rng(4).normal(means, 1, (32, 16, 16, 4)).astype("float32")
    x = ops.cast(ops.convert_to_tensor(x), "bfloat16")
    mean, variance = exact_moments(numpy(ops.cast(x, "float32")))
    batch = moments(x, "float32", -1, prior=ops.full(4, 1e6))
    np.testing.assert_allclose(numpy(batch.mean), mean, rtol=1e-6, atol=1e-6)
    error = np.abs(numpy(batch.variance) - variance)
    assert np.all(error < 2**-20 * (variance + mean**2))
