"""The noise of NoisyBN: its distribution, its independence, the same bits anywhere."""

import keras
import numpy as np
import pytest
import scipy.stats
from keras import ops

from keras_norms.ops import noise
from tests.support.any_layer import QUIET
from tests.support.autodiff import compiled
from tests.support.backend import BACKEND, numpy
from tests.support.normalizations import KERNELS

hashed = pytest.mark.skipif(BACKEND == "torch", reason="PyTorch has its generator")
# Four standard errors of a normal variable, as a probability.
FOUR_SIGMA = 2 * scipy.stats.norm.sf(4)


def draw(shape, seed=0, calls=1, axis=-1, **ranges):
    """Scales and shifts of the last of some calls, in the given ranges."""
    generator, x, ranges = (
        keras.random.SeedGenerator(seed),
        ops.zeros(shape),
        QUIET | ranges,
    )
    for _ in range(calls):
        pair = noise.scale_and_shift(x, generator, "float32", axis=axis, **ranges)
    return [numpy(ops.broadcast_to(v, shape)).astype("float64") for v in pair]


def elements(shape, seed=0, calls=1):
    """N(0, 1) and U(-1, 1) of every element."""
    scale, shift = draw(shape, seed, calls, mean_jitter=1, scale_jitter=1)
    return {"normal": scale - 1, "uniform": shift}


def assert_uncorrelated(a, b):
    """Of mean 0 and variance 1: that of their product is within four deviations."""
    assert abs(np.mean(a * b)) < 4 / np.sqrt(a.size)


DISTRIBUTIONS = {"normal": scipy.stats.norm(), "uniform": scipy.stats.uniform(-1, 2)}


@pytest.fixture(scope="module")
def million():
    return elements((1000, 1000))


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_distribution_and_what_is_independent(million, kind):
    exact, shape = DISTRIBUTIONS[kind], million[kind].shape
    assert scipy.stats.kstest(million[kind].ravel(), exact.cdf).pvalue > FOUR_SIGMA
    np.testing.assert_array_equal(elements(shape)[kind], million[kind])

    def standardised(values):
        """Values, and their sizes, which depend on each other if radii do."""
        square = values**2
        spread = np.sqrt(exact.moment(4) - exact.var() ** 2)
        return values / exact.std(), (square - exact.var()) / spread

    for i, values in enumerate(standardised(million[kind])):
        assert_uncorrelated(values[1:], values[:-1])
        assert_uncorrelated(values[:, 1:], values[:, :-1])
        assert_uncorrelated(values[::2, ::2], values[1::2, 1::2])
        for seed, calls in ((0, 2), (1, 1), (1, 2)):
            other = standardised(elements(shape, seed, calls)[kind])[i]
            assert_uncorrelated(values, other)


def test_normal_and_uniform_are_independent(million):
    normal, uniform = million["normal"], million["uniform"] * np.sqrt(3)
    square = (normal**2 - 1) / np.sqrt(2)
    for a, b in ((normal, uniform), (square, uniform)):
        assert_uncorrelated(a, b)
    assert_uncorrelated(square, (uniform**2 - 1) / np.sqrt(0.8))


WIDE = {"mean_range": 0.5, "scale_range": 1.25}


def test_a_channel_draws_its_means():
    scale, shift = (values[0] for values in draw((3, 100_000), **WIDE))
    for values, low, high in ((scale, 1, 1.25), (shift, -0.5, 0.5)):
        exact = scipy.stats.uniform(low, high - low)
        assert scipy.stats.kstest(values, exact.cdf).pvalue > FOUR_SIGMA
    again = draw((3, 100_000), calls=2, **WIDE)[1][0]
    scale, shift, again = ((v - v.mean()) / v.std() for v in (scale, shift, again))
    assert_uncorrelated(scale, shift)
    assert_uncorrelated(shift, again)


@pytest.mark.parametrize("axis", [1, -1])
def test_elements_vary_around_the_means_of_their_channel(axis):
    shape = (200, 5, 100, 5)
    means = draw(shape, axis=axis, **WIDE)
    values = draw(shape, axis=axis, mean_jitter=0.2, scale_jitter=0.3, **WIDE)
    others = tuple({0, 1, 2, 3} - {axis % 4})
    for value, mean, kind, size in zip(values, means, DISTRIBUTIONS, (0.3, 0.2)):
        assert np.ptp(mean, others).max() == 0 and np.unique(mean).size == 5
        exact, found = DISTRIBUTIONS[kind], (value - mean).ravel() / size
        assert scipy.stats.kstest(found, exact.cdf).pvalue > FOUR_SIGMA


def lowbias32(x):
    """https://nullprogram.com/blog/2018/07/31/"""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def uniforms(bits):
    return ((bits >> np.uint32(9)).astype("float64") + 0.5) / 2**23


@hashed
@pytest.mark.parametrize("mode", KERNELS)
@pytest.mark.parametrize("seed", [(0, 0), (3, 17), (2**32 - 1, 5)])
def test_the_hash_in_numpy(seed, mode):
    """So that all backends and modes have the same noise; Box and Muller in float64."""
    shape = (7, 3, 50)
    key = lowbias32(lowbias32(np.uint32([seed[0]])) ^ np.uint32(seed[1]))
    bits = lowbias32(np.arange(np.prod(shape), dtype="uint32") ^ key)
    radius_bits, angle_bits = lowbias32(bits ^ lowbias32(key)), lowbias32(bits)
    angle = np.pi / 2 * uniforms(angle_bits) + np.pi * (angle_bits & 1)
    expected = {
        "normal": np.sqrt(-2 * np.log(uniforms(radius_bits))) * np.cos(angle),
        "uniform": 2 * uniforms(lowbias32(bits + np.uint32(0x9E3779B9))) - 1,
    }

    def hashed_noise(x, seed):
        return noise.hashed_noise(x, seed, dtype="float32")

    x = ops.zeros(shape, "bfloat16")
    seed = ops.convert_to_tensor(np.uint32(seed))
    actual = compiled(hashed_noise, mode)(x, seed)
    for value, name in zip(actual, expected):
        # Of numbers up to 6, with a few operations' rounding.
        np.testing.assert_allclose(
            numpy(value), expected[name].reshape(shape), atol=2e-6, err_msg=name
        )
