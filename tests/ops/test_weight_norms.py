"""Norms of weights against float64 NumPy."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms.ops import weight_norms
from tests.support.autodiff import MODES, second_derivative, training_step
from tests.support.backend import BACKEND, numpy, some
from tests.support.batch_reference import finite_differences, relative_error
from tests.support.weight_reference import AsLayer, WeightReference

WIDEST = "float32" if BACKEND == "jax" else "float64"
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


def normal(*shape, seed=0):
    """Float64 numbers that float32 holds exactly."""
    rng = np.random.default_rng(seed)
    return rng.normal(0.3, 1.0, shape).astype("float32").astype("float64")


def reference_norm(v, axes, keepdims=False):
    return np.sqrt(np.sum(v**2, axes, keepdims=keepdims))


def reference_unit_norm(v, axes):
    length = reference_norm(v, axes, keepdims=True)
    return v / np.where(length == 0, 1, length)


def reference_standardize(v, axes):
    length = np.prod([v.shape[axis] for axis in axes]) ** 0.5
    return length * reference_unit_norm(v - v.mean(axes, keepdims=True), axes)


def decomposed(name):
    return lambda v, *axes: getattr(weight_norms.decompose(v, *axes), name)


# The function, its reference, and whether it stays the same if v grows.
FUNCTIONS = {
    "center": (weight_norms.center, lambda v, a: v - v.mean(a, keepdims=True), False),
    "norm": (weight_norms.norm, reference_norm, False),
    "unit_norm": (weight_norms.unit_norm, reference_unit_norm, True),
    "standardize": (weight_norms.standardize, reference_standardize, True),
    "gamma": (decomposed("gamma"), np.std, False),
    "beta": (decomposed("beta"), np.mean, False),
    "direction": (decomposed("direction"), reference_standardize, True),
}

# JAX compiles each operation anew for each shape.
names = pytest.mark.parametrize(
    "name", some(FUNCTIONS, ["norm", "direction"] if BACKEND == "jax" else FUNCTIONS)
)


@pytest.mark.parametrize(
    ("dtype", "axes"),
    [("int32", 0), ("float16", -1), ("bfloat16", (0, -2)), (WIDEST, (2, 1, 0))],
)
@names
def test_axes_and_dtypes(name, dtype, axes):
    function, reference, of_direction = FUNCTIONS[name]
    v = ops.cast(3 * normal(3, 4, 2), dtype)
    exact = numpy(ops.cast(v, WIDEST)).astype("float64")
    actual = function(v, *([] if axes == -1 else [axes]))  # the default
    wide = "float64" if dtype == "float64" else "float32"
    assert keras.backend.standardize_dtype(actual.dtype) == wide
    expected = reference(exact, axes if isinstance(axes, tuple) else (axes,))
    assert tuple(actual.shape) == expected.shape
    size = np.abs(expected if of_direction else exact).max()
    assert np.abs(numpy(actual) - expected).max() <= TOLERANCE[wide] * size


HARD = {f"{size:.0e}": size * normal(20, 3) for size in (1e-18, 1e-9, 1e9, 1e18)}
HARD["a mean much larger than the deviation"] = 1e4 + normal(1000, 3)
# The squares of the first add up to more than float32 holds.
SEVERAL = np.array([1e18, 1, 1e-18]) * np.abs(normal(1000, 3))
SEVERAL[7] *= 1e-30  # nothing next to the others
HARD |= {"several sizes": SEVERAL, "several sizes, negative": -SEVERAL}


@pytest.mark.parametrize("case", HARD)
@names
def test_hard_vectors(name, case):
    function, reference, _ = FUNCTIONS[name]
    v = HARD[case].astype("float32")
    actual, expected = numpy(function(v, 0)), reference(v.astype("float64"), (0,))
    for i in range(3):
        assert relative_error(actual[..., i], expected[..., i]) < 1e-5


@pytest.mark.parametrize(
    ("value", "epsilon"),
    [(0.0, 0.0), (0.0, 1e-5), (0.1, 0.0), (1e-18, 1e-100), (1e18, 1e-5)],
)
def test_constant_vectors(value, epsilon):
    """They are zero without their mean, and each derivative is finite."""
    v = np.full((7, 2), value, "float32")
    gamma, beta, direction = weight_norms.decompose(v, 0)
    kernels = (f(v, 0, epsilon=epsilon) for f in (weight_norms.ws, weight_norms.cwn))
    assert all(np.all(numpy(zero) == 0) for zero in (gamma, direction, *kernels))
    np.testing.assert_allclose(numpy(beta), v[0], rtol=1e-6)
    expected = v / np.sqrt(np.sum(v.astype("float64") ** 2, 0) + epsilon + 1e-300)
    actual = numpy(weight_norms.unit_norm(v, 0, epsilon))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    for name in ("norm", "unit_norm", "standardize"):
        function = getattr(weight_norms, name)
        layer = AsLayer(lambda v, function=function: function(v, 0, epsilon))
        assert np.all(np.isfinite(training_step(layer, ops.sum)(v)[1]))


def check_derivatives(function, reference, x):
    """Of a random quadratic form of the output."""
    rng = np.random.default_rng(1)
    g, h = rng.normal(size=(2, *reference(x).shape))
    direction = rng.normal(size=x.shape).astype("float32")
    x32 = x.astype("float32")

    def loss(y):
        linear, square = (ops.convert_to_tensor(v, "float32") for v in (g, h))
        return ops.sum(linear * y + 0.5 * square * y * y)

    def of_numpy(x):
        return np.sum(g * reference(x) + 0.5 * h * reference(x) ** 2)

    def along_direction(x, step=1e-4):
        forward, backward = x + step * direction, x - step * direction
        return (of_numpy(forward) - of_numpy(backward)) / (2 * step)

    _, gradient = training_step(AsLayer(function), loss, MODES[-1])(x32)
    assert relative_error(gradient, finite_differences(of_numpy, x)) < 1e-5
    (second,) = second_derivative(AsLayer(function), x32, loss, [direction], MODES[-1])
    expected = finite_differences(along_direction, x, 1e-4)
    assert relative_error(second, expected) < 1e-5


@pytest.mark.parametrize("name", some(FUNCTIONS, ["norm", "unit_norm", "direction"]))
def test_derivatives(name):
    function, reference, _ = FUNCTIONS[name]
    axes = (0, 2)
    check_derivatives(
        lambda v: function(v, axes), lambda v: reference(v, axes), normal(3, 2, 2)
    )


@pytest.mark.parametrize("kind", ["ws", "cwn", "wn"])
@pytest.mark.parametrize(
    ("axes", "unit", "gain"),
    [((0, -1), (0, 2), np.arange(1, 5)), ((2, 0), (0, 2), None), ((), (), None)],
)
def test_weight_maps(kind, axes, unit, gain):
    """By default epsilon is 1e-5, which counts where a kernel is small."""
    w = 0.003 * normal(3, 4, 2)
    ones = np.ones([n for i, n in enumerate(w.shape) if i not in unit])
    reference, function = WeightReference(kind), getattr(weight_norms, kind)
    expected = reference.forward(w, ones if gain is None else gain, unit)
    tolerance = TOLERANCE[WIDEST]
    np.testing.assert_allclose(function(w, axes, gain), expected, tolerance, tolerance)
