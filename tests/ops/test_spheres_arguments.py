"""Projections onto spheres: defaults, dtypes, and an epsilon larger than the rest."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms.ops import spheres
from tests.support.autodiff import BACKEND, MODES, training_step
from tests.support.cbn_reference import relative_error
from tests.support.weight_reference import AsLayer


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(0.3, 1, shape).astype("float32")


def numpy(x):
    return np.asarray(ops.convert_to_numpy(x))


@pytest.mark.parametrize("name", ["center", "norm", "unit_norm", "standardize"])
def test_the_last_axis_by_default(name):
    v = normal(4, 3, 5)
    function = getattr(spheres, name)
    np.testing.assert_array_equal(numpy(function(v)), numpy(function(v, 2)))
    for actual, expected in zip(spheres.decompose(v), spheres.decompose(v, 2)):
        np.testing.assert_array_equal(numpy(actual), numpy(expected))


def test_epsilon_by_default():
    """Not of vectors: of kernels alone."""
    w = 0.003 * normal(8, 4)
    exact = w.astype("float64")
    centered = exact - exact.mean(0)
    for name, value, square in (
        ("ws", centered, np.mean(centered**2, 0)),
        ("cwn", centered, np.sum(centered**2, 0)),
        ("wn", exact, np.sum(exact**2, 0)),
    ):
        expected = value / np.sqrt(square + 1e-5)
        assert relative_error(getattr(spheres, name)(w, 0), expected) < 1e-5


def test_integers_become_float32():
    v = np.array([[1, 2, 6], [3, 3, 4]])
    for dtype in ("int32", "uint8"):
        actual = spheres.center(ops.convert_to_tensor(v, dtype))
        assert keras.backend.standardize_dtype(actual.dtype) == "float32"
        assert relative_error(actual, v - v.mean(1, keepdims=True)) < 1e-6


OF_SIZE = {  # and the power of the size that they grow with
    "norm": (spheres.norm, 1),
    "unit_norm": (spheres.unit_norm, 0),
    "standardize": (spheres.standardize, 0),
    "gamma": (lambda v, axes: spheres.decompose(v, axes)[0], 1),
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", OF_SIZE)
def test_long_vectors_of_very_different_sizes(name, sign):
    """The squares of the first add up to more than float32 holds."""
    function, power = OF_SIZE[name]
    v = sign * np.abs(normal(1000, 3))
    v[7] = sign * 1e-30  # nothing next to the others
    sizes = np.array([1e18, 1, 1e-18], "float32")
    actual, expected = numpy(function(sizes * v, 0)), numpy(function(v, 0))
    for i, size in enumerate(sizes**power):
        assert relative_error(actual[..., i], size * expected[..., i]) < 1e-5


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
def test_the_dtype_of_a_gain_does_not_matter(dtype):
    w, gain = normal(6, 4), np.arange(1, 5).astype(dtype)
    actual = spheres.wn(w, 0, gain)
    assert keras.backend.standardize_dtype(actual.dtype) == "float32"
    assert relative_error(actual, np.arange(1, 5) * numpy(spheres.wn(w, 0))) < 1e-6


def of_equation_12(kernel, gamma, beta, mean, covariance, epsilon):
    variance = np.einsum("iu,ij,ju->u", kernel, covariance, kernel)
    weight = gamma * kernel / np.sqrt(variance + epsilon)
    return weight, beta - mean @ weight


def layer_and_statistics():
    x = normal(20, 5)
    return [normal(5, 3, seed=1), *normal(2, 3, seed=2), x.mean(0), np.cov(x.T)]


def test_an_epsilon_larger_than_the_variance():
    epsilon = 100.0
    values = layer_and_statistics()
    exact = [v.astype("float64") for v in values]
    values = [np.asarray(v, "float32") for v in values]
    weight, bias = spheres.effective_weight(*values, epsilon)
    expected = of_equation_12(*exact, epsilon)
    assert relative_error(weight, expected[0]) < 1e-5
    assert relative_error(bias, expected[1]) < 1e-5


def test_the_length_of_a_kernel_does_not_matter():
    kernel, *values = (np.asarray(v, "float32") for v in layer_and_statistics())
    expected = [numpy(v) for v in spheres.effective_weight(kernel, *values)]
    for size in (1e-30, 1e30):
        actual = spheres.effective_weight(np.float32(size) * kernel, *values)
        for value, wanted in zip(actual, expected):
            assert relative_error(value, wanted) < 1e-5


def test_units_that_do_not_vary_have_a_derivative():
    kernel, *values = (np.asarray(v, "float32") for v in layer_and_statistics())
    kernel[:, 1] = 0

    gamma, *rest = values

    def of_kernel(kernel):
        return effective(kernel, ops.convert_to_tensor(gamma))

    def of_gamma(gamma):
        return effective(ops.convert_to_tensor(kernel), gamma)

    def effective(kernel, gamma):
        weight, bias = spheres.effective_weight(kernel, gamma, *rest)
        return ops.concatenate([weight, bias[None]], axis=0)

    for function, start in ((of_kernel, kernel), (of_gamma, gamma)):
        step = training_step(AsLayer(function), ops.sum, MODES[-1])
        weight, gradient = step(start)
        assert np.all(weight[:-1, 1] == 0)
        assert np.all(np.isfinite(gradient))
        assert np.all(gradient[..., 0] != 0)


@pytest.mark.skipif(BACKEND == "jax", reason="float64 is a process-wide switch of JAX")
def test_the_widest_dtype_decides():
    values = layer_and_statistics()
    assert {v.dtype.name for v in values} == {"float32", "float64"}
    weight, bias = spheres.effective_weight(*values, 0.1)
    expected = of_equation_12(*(v.astype("float64") for v in values), 0.1)
    for value, wanted in zip((weight, bias), expected):
        assert keras.backend.standardize_dtype(value.dtype) == "float64"
        assert relative_error(value, wanted) < 1e-13
