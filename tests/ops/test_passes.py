"""The passes over activations against float64 NumPy, all operands at random.

A layer's own centres, offsets and pivots are often 0, or equal to each other.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms.ops import passes, single_pass
from keras_norms.ops.moments import moments
from tests.support.backend import BACKEND, numpy
from tests.support.batch_reference import relative_error

# Shape and channel axis: tensors that the kernels for a CPU take, whose neighbouring
# positions are channels of their own or not, and tensors that they leave alone.
SHAPES = [
    ((33, 2048), -1),
    ((64, 8, 16, 9), -1),
    ((24_000, 3), -1),
    ((40_009, 2), -1),  # a prime
    ((100, 28, 28, 1), -1),
    ((9, 3, 5, 7, 80), 4),
    ((2, 1, 1, 5), -1),
    ((6, 16, 33, 24), 1),
    ((6, 16, 33, 24), -2),
    ((9, 5, 10_007), 1),
    ((5, 3), 0),
]
WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}
CASES = [(*case, "float32", "float32") for case in SHAPES]
CASES += [
    (*SHAPES[1], *dtypes)
    for dtypes in WIDE.items()
    if BACKEND != "jax" or dtypes[1] != "float64"
]
CASES += [
    (*case, half, "float32")
    for case in [((50, 30, 40, 24), -1), ((6, 1, 1, 16), -1), ((40, 24, 30, 50), 1)]
    for half in ("float16", "bfloat16")
]


@pytest.mark.parametrize(("shape", "axis", "dtype", "wide"), CASES, ids=str)
def test_values(shape, axis, dtype, wide, monkeypatch):
    """All is computed in the dtype of vectors; only a tensor is rounded to its own."""
    # TensorFlow has kernels for tensors that would take long here.
    monkeypatch.setattr(single_pass, "_LARGE", 1)
    rng = np.random.default_rng(0)
    g, x = (
        ops.cast(v, dtype) for v in rng.normal(0.5, 2, (2, *shape)).astype("float32")
    )
    vectors = rng.normal(0.5, 1, (4, shape[axis])).astype("float32")
    of_positions = [1 if i == axis % len(shape) else n for i, n in enumerate(shape)]
    masks = [rng.random(sizes) < 0.6 for sizes in (shape, of_positions)]
    dg, dx = (numpy(ops.cast(v, "float32")).astype("float64") for v in (g, x))
    others = tuple({*range(len(shape))} - {axis % len(shape)})
    a, b, c, d = (np.expand_dims(v.astype("float64"), others) for v in vectors)
    vectors = [ops.cast(v, wide) for v in vectors]
    rounding = 0 if dtype == wide else ROUNDING[dtype]
    tolerance = 1e-13 if wide == "float64" else 1e-6

    def check(actual, expected):
        assert keras.backend.standardize_dtype(actual.dtype) == dtype
        error = np.abs(numpy(ops.cast(actual, "float32")) - expected)
        size = np.abs(expected)
        assert np.all(error <= rounding * size + tolerance * size.max())

    check(passes.affine(x, *vectors[:3], axis=axis), b * (dx - a) + c)
    expected = a * (dg - b * (dx - c) - d)
    check(passes.gradient_x(g, x, *vectors, axis=axis), expected)
    for mask in masks:
        mask = ops.convert_to_tensor(mask)
        actual = passes.gradient_x(g, x, *vectors, mask, axis=axis)
        check(actual, np.where(mask, expected, a * dg))
    expected = np.stack([dg.sum(others), (dg * (dx - a)).sum(others)])
    for mask in (None, *masks):
        given = () if mask is None else (ops.convert_to_tensor(mask),)
        sums = passes.gradient_sums(g, x, vectors[0], *given, axis=axis)
        assert keras.backend.standardize_dtype(sums.dtype) == wide
        assert relative_error(sums, expected) < 10 * tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_where_what_is_hidden_is_not_finite(dtype):
    """It counts if it has a gradient, as that of a loss which ignores the mask."""
    rng = np.random.default_rng(1)
    g, x = rng.integers(-8, 9, (2, 64, 64, 24)).astype("float32")
    mask = rng.random((64, 64, 1)) < 0.6
    x[~mask[..., 0]], g[~mask[..., 0], 1:] = np.nan, 0
    center = rng.integers(-8, 9, 24).astype("float32")
    tensors = ops.cast(g, dtype), ops.cast(x, dtype), center, mask
    tensors = (ops.convert_to_tensor(v) for v in tensors)
    actual = numpy(passes.gradient_sums(*tensors, axis=-1))
    seen = np.where(mask, x, center).astype("float64")
    expected = np.stack([g.sum((0, 1)), (g * (seen - center)).sum((0, 1))])
    expected[1, 0] = np.nan
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 60, 20, 70), -1),
        ((3, 60, 20, 70), 2),
        ((2, 40, 30, 30, 3), -1),
        ((2, 9, 7, 5), 3),
    ],
)
def test_groups(shape, axis, dtype):
    """What they have in common, and what each has of its own."""
    rng = np.random.default_rng(2)
    g, x = (
        ops.cast(v, dtype) for v in rng.normal(0.5, 2, (2, *shape)).astype("float32")
    )
    groups, channels = shape[0], shape[axis]
    own = rng.normal(0.5, 1, (3, groups, channels)).astype("float32")
    shared = rng.normal(0.5, 1, channels).astype("float32")
    others = tuple({*range(1, len(shape))} - {axis % len(shape)})
    dg, dx = (numpy(ops.cast(v, "float32")).astype("float64") for v in (g, x))
    a, b, c = (np.expand_dims(v.astype("float64"), others) for v in own)
    d = np.expand_dims(shared.astype("float64"), (0, *others))
    own, shared = [ops.convert_to_tensor(v) for v in own], ops.convert_to_tensor(shared)
    at = {"axis": (0, axis)}
    rounding = 0 if dtype == "float32" else ROUNDING[dtype]
    for actual, expected in (
        (passes.affine(x, *own[:2], shared, **at), b * (dx - a) + d),
        (passes.gradient_x(g, x, *own, shared, **at), a * (dg - b * (dx - c) - d)),
    ):
        assert keras.backend.standardize_dtype(actual.dtype) == dtype
        error = np.abs(numpy(ops.cast(actual, "float32")) - expected)
        bound = rounding * np.abs(expected) + 1e-6 * np.abs(expected).max()
        assert np.all(error <= bound)
    expected = np.stack([dg.sum(others), (dg * (dx - a)).sum(others)])
    assert relative_error(passes.gradient_sums(g, x, own[0], **at), expected) < 1e-5
    _, mean, variance = moments(x, "float32", prior=shared, **at)
    assert relative_error(mean, dx.mean(others)) < 1e-6
    assert relative_error(variance, dx.var(others)) < 1e-6
