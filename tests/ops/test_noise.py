"""The noise of NoisyBN: its distribution, its independence, the same bits anywhere."""

import functools
import itertools

import numpy as np
import pytest
import scipy.stats
from keras import ops

from keras_norms.ops import noise
from tests.support.any_layer import noise_of
from tests.support.autodiff import compiled
from tests.support.backend import BACKEND, numpy
from tests.support.normalizations import KERNELS

hashed = pytest.mark.skipif(BACKEND == "torch", reason="PyTorch has its generator")
# Four standard errors of a normal variable, as a probability.
FOUR_SIGMA = 2 * scipy.stats.norm.sf(4)


def elements(shape, seed=0, calls=1):
    """N(0, 1) and U(-1, 1) of every element."""
    scale, shift = noise_of(shape, seed, calls, mean_jitter=1, scale_jitter=1)
    return {"normal": scale - 1, "uniform": shift}


def assert_uncorrelated(a, b):
    """Of mean 0 and variance 1: that of their product is within four deviations."""
    assert abs(np.mean(a * b)) < 4 / np.sqrt(a.size)


DISTRIBUTIONS = {"normal": scipy.stats.norm(), "uniform": scipy.stats.uniform(-1, 2)}


@pytest.fixture(scope="module")
def million():
    return elements((1000, 1000))


def standardised(kind, values):
    """Values, and their sizes, which depend on each other if radii do."""
    exact = DISTRIBUTIONS[kind]
    spread = np.sqrt(exact.moment(4) - exact.var() ** 2)
    return values / exact.std(), (values**2 - exact.var()) / spread


def assert_distributed(values, exact):
    assert scipy.stats.kstest(values.ravel(), exact.cdf).pvalue > FOUR_SIGMA


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_distribution_and_what_is_independent(million, kind):
    shape = million[kind].shape
    assert_distributed(million[kind], DISTRIBUTIONS[kind])
    np.testing.assert_array_equal(elements(shape)[kind], million[kind])
    for i, values in enumerate(standardised(kind, million[kind])):
        assert_uncorrelated(values[1:], values[:-1])
        assert_uncorrelated(values[:, 1:], values[:, :-1])
        assert_uncorrelated(values[::2, ::2], values[1::2, 1::2])
        for seed, calls in ((0, 2), (1, 1), (1, 2)):
            other = standardised(kind, elements(shape, seed, calls)[kind])[i]
            assert_uncorrelated(values, other)


def test_normal_and_uniform_are_independent(million):
    for pair in itertools.product(*(standardised(*each) for each in million.items())):
        assert_uncorrelated(*pair)


WIDE = {"mean_range": 0.5, "scale_range": 1.25}


def test_a_channel_draws_its_means():
    scale, shift = (values[0] for values in noise_of((3, 100_000), **WIDE))
    for values, low, high in ((scale, 1, 1.25), (shift, -0.5, 0.5)):
        assert_distributed(values, scipy.stats.uniform(low, high - low))
    again = noise_of((3, 100_000), calls=2, **WIDE)[1][0]
    scale, shift, again = ((v - v.mean()) / v.std() for v in (scale, shift, again))
    assert_uncorrelated(scale, shift)
    assert_uncorrelated(shift, again)


@pytest.mark.parametrize("axis", [1, -1])
def test_elements_vary_around_the_means_of_their_channel(axis):
    shape = (200, 5, 100, 5)
    means = noise_of(shape, axis=axis, **WIDE)
    values = noise_of(shape, axis=axis, mean_jitter=0.2, scale_jitter=0.3, **WIDE)
    others = tuple({0, 1, 2, 3} - {axis % 4})
    for value, mean, kind, size in zip(values, means, DISTRIBUTIONS, (0.3, 0.2)):
        assert np.ptp(mean, others).max() == 0 and np.unique(mean).size == 5
        assert_distributed((value - mean) / size, DISTRIBUTIONS[kind])


def lowbias32(x):
    """https://nullprogram.com/blog/2018/07/31/"""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
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

    x = ops.zeros(shape, "bfloat16")
    hashed_noise = functools.partial(noise.hashed_noise, dtype="float32")
    actual = compiled(hashed_noise, mode)(x, ops.convert_to_tensor(np.uint32(seed)))
    for value, name in zip(actual, expected):
        # Of numbers up to 6, with a few operations' rounding.
        np.testing.assert_allclose(
            numpy(value), expected[name].reshape(shape), atol=2e-6, err_msg=name
        )
