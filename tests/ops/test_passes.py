"""The passes over activations against float64 NumPy, all operands at random.

A layer's own centres, offsets and pivots are often 0, or equal to each other.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms.ops import passes
from keras_norms.ops.shapes import channel_groups
from tests.support.backend import BACKEND, has_float64, numpy
from tests.support.cbn_reference import relative_error

# Shape and channel axis: tensors that the kernels for a CPU take, whose neighbouring
# positions are channels of their own or not, and tensors that they leave alone.
SHAPES = [
    ((33, 2048), -1),
    ((64, 8, 16, 9), -1),
    ((9, 3, 5, 7, 80), 4),
    ((2, 1, 1, 5), -1),
    ((6, 16, 33, 24), 1),
    ((6, 16, 33, 24), -2),
    ((5, 3), 0),
]


def operands(shape, axis, vectors):
    """Two tensors, some vectors of the channels, and all of them for NumPy."""
    rng = np.random.default_rng(0)
    arrays = list(rng.normal(0.5, 2, (2, *shape)).astype("float32"))
    arrays += list(rng.normal(0.5, 1, (vectors, shape[axis])).astype("float32"))
    along = np.reshape(np.arange(len(shape)) == axis % len(shape), -1)
    exact = [a.astype("float64") for a in arrays]
    exact[2:] = [v.reshape(np.where(along, -1, 1)) for v in exact[2:]]
    return [ops.convert_to_tensor(a) for a in arrays], exact


def exact_sums(g, x, center, axis):
    axes = tuple(i for i in range(g.ndim) if i != axis % g.ndim)
    return np.stack([g.sum(axes), (g * (x - center)).sum(axes)])


@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_values(shape, axis):
    (g, x, *vectors), exact = operands(shape, axis, 4)
    scale, k, pivot, constant = exact[2:]
    expected = k * (exact[1] - scale) + pivot
    actual = passes.affine(x, *vectors[:3], axis=axis)
    assert relative_error(actual, expected) < 1e-6
    actual = passes.gradient_sums(g, x, vectors[0], axis=axis)
    assert relative_error(actual, exact_sums(*exact[:3], axis)) < 1e-5
    expected = scale * (exact[0] - k * (exact[1] - pivot) - constant)
    actual = passes.gradient_x(g, x, *vectors, axis=axis)
    assert relative_error(actual, expected) < 1e-6
    mask = np.random.default_rng(1).random(shape) < 0.6
    expected = np.where(mask, expected, scale * exact[0])
    mask = ops.convert_to_tensor(mask)
    actual = passes.masked_gradient_x(g, x, *vectors, mask, axis=axis)
    assert relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "wide", "rounding"),
    [
        ("float16", "float32", 2**-11),
        ("bfloat16", "float32", 2**-8),
        pytest.param("float32", "float64", 2**-24, marks=has_float64),
    ],
)
def test_vectors_may_be_wider_than_the_tensors(dtype, wide, rounding):
    """All is computed in their dtype; only what is stored like a tensor is rounded."""
    shape, axis = (64, 8, 16, 9), -1
    tensors, exact = operands(shape, axis, 4)
    g, x = (ops.cast(v, dtype) for v in tensors[:2])
    vectors = [ops.cast(v, wide) for v in tensors[2:]]
    exact[:2] = (numpy(ops.cast(v, "float32")).astype("float64") for v in (g, x))
    tolerance = 1e-5 if wide == "float32" else 1e-13

    def check(actual, expected):
        assert keras.backend.standardize_dtype(actual.dtype) == dtype
        error = np.abs(numpy(ops.cast(actual, "float32")) - expected)
        assert np.all(error <= rounding * np.abs(expected) + tolerance)

    a, b, c, d = exact[2:]
    check(passes.affine(x, *vectors[:3], axis=axis), b * (exact[1] - a) + c)
    check(
        passes.gradient_x(g, x, *vectors, axis=axis),
        a * (exact[0] - b * (exact[1] - c) - d),
    )
    sums = passes.gradient_sums(g, x, vectors[0], axis=axis)
    assert keras.backend.standardize_dtype(sums.dtype) == wide
    assert relative_error(sums, exact_sums(*exact[:3], axis)) < tolerance


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 5), 1),  # a position to a sample
        ((64, 32, 32, 64), 64),  # rows of 4096
        ((64, 32, 32, 63), 64),  # 65 would fit, but divides nothing
        ((64, 37, 3, 64), 37),
        ((64, 8, 8, 2048), 2),
        ((64, 8, 8, 2049), 1),
        ((64, 67, 3, 64), 3),  # 67 is too many
        ((None, 32, 32, 64), 64),
        ((None, None, 12, 64), 12),  # whatever the other size is
        ((None, None, 3, 4, 64), 4),
        ((None, 12, None, 10, 64), 10),
        ((4, 0, 3, 8), 3),
    ],
)
def test_channel_groups(shape, expected):
    assert channel_groups(shape) == expected


@pytest.mark.skipif(BACKEND == "jax", reason="XLA fuses the passes themselves")
def test_where_the_kernels_for_a_cpu_apply():
    (_, applies_to), *_ = passes.affine.kernels
    with keras.device("cpu:0"):
        x = ops.zeros((64, 8, 16, 90))

    def applies(x, dtype="float32", axis=-1):
        vector, true = ops.zeros(x.shape[axis], dtype), ops.convert_to_tensor(True)
        return applies_to(x, vector, vector, true, axis=axis)

    assert applies(x) and applies(x, axis=3)
    for axis in (0, 1, 2, -2):
        assert not applies(x, axis=axis)
    assert not applies(x, "float64")
    assert not applies(ops.cast(x, "float16"))
    assert not applies(ops.cast(x, "float16"), "float16")
    # A loop of double precision, which TensorFlow's operations do not have.
    assert applies(ops.cast(x, "float64"), "float64") == (BACKEND == "torch")
