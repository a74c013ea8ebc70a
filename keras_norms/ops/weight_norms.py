"""Weights that are centered and of unit norm or variance, one unit at a time.

A unit is a vector of `n` numbers along `axes` of a tensor, `v` or `weight`; the other
axes count units. `epsilon` is not negative; `gain` is `None` for 1, or has the shape of
the tensor without `axes`. Results have the shape of the tensor, unless a function says
otherwise, and the dtype of the computation, float32 or wider. Functions may be
differentiated twice.

Vectors are divided by their largest magnitude before they are squared: nothing
overflows or vanishes for magnitudes of 1e-18 to 1e18. The result does not depend on
that number, so the gradient treats it as a constant.

Reference:

- Sun et al., New Interpretations of Normalization Methods in Deep Learning, AAAI 2020,
  Lemma 1. https://doi.org/10.1609/aaai.v34i04.6046
"""

import math
from typing import NamedTuple

import keras
from keras import ops

from keras_norms._types import Tensor
from keras_norms.ops.shapes import is_one_of

Axes = int | tuple[int, ...]


class Decomposition(NamedTuple):
    """`v = gamma * direction + beta`: each vector `v` has one `gamma` and one `beta`.

    `gamma` is the standard deviation and `beta` the mean, of the shape of `v` without
    the axes of a vector; `direction` is `N(v)`, of the shape of `v`.
    """

    gamma: Tensor
    beta: Tensor
    direction: Tensor


def center(v: Tensor, axes: Axes = -1) -> Tensor:
    """`v - mean(v)`, the projection onto the hyperplane orthogonal to `(1, ..., 1)`.

    Exactly zero where a vector is constant.
    """
    return _mean_and_centered(_wide(v), _normal(axes, v))[1]


def norm(v: Tensor, axes: Axes = -1, epsilon: float = 0.0) -> Tensor:
    """`sqrt(|v|^2 + epsilon)`, the length of each vector: of the shape without `axes`.

    Without `epsilon`, the gradient is zero where `v` is.
    """
    axes = _normal(axes, v)
    return _squeeze(_length(_wide(v), axes, _sum, epsilon), axes)


def unit_norm(v: Tensor, axes: Axes = -1, epsilon: float = 0.0) -> Tensor:
    """`v / sqrt(|v|^2 + epsilon)`, the projection onto the sphere of radius 1.

    Zero where a vector is zero.
    """
    return _over_length(_wide(v), _normal(axes, v), _sum, epsilon)


def standardize(v: Tensor, axes: Axes = -1, epsilon: float = 0.0) -> Tensor:
    """`N(v) = (v - mean(v)) / sqrt(var(v) + epsilon)`, zero where `v` is constant.

    Without `epsilon`, `N(v)` lies on the sphere of radius `sqrt(n)` in the hyperplane
    orthogonal to `(1, ..., 1)`, and `N(a v + t) = N(v)` for `a > 0`.
    """
    return _over_length(center(v, axes), _normal(axes, v), _mean, epsilon)


def decompose(v: Tensor, axes: Axes = -1) -> Decomposition:
    """Split `v = gamma * N(v) + beta` (Lemma 1); `|v|^2 = n * (gamma^2 + beta^2)`."""
    axes = _normal(axes, v)
    mean, centered = _mean_and_centered(_wide(v), axes)
    gamma = _length(centered, axes, _mean, 0.0)
    direction = _over_length(centered, axes, _mean, 0.0)
    return Decomposition(_squeeze(gamma, axes), _squeeze(mean, axes), direction)


def ws(
    weight: Tensor, axes: Axes, gain: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """`gain * (w - mean(w)) / sqrt(var(w) + epsilon)`: weight standardization."""
    return _times(gain, standardize(weight, axes, epsilon), axes)


def cwn(
    weight: Tensor, axes: Axes, gain: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """Centered weight norm: `gain * c / sqrt(|c|^2 + epsilon)`, `c = w - mean(w)`."""
    return _times(gain, unit_norm(center(weight, axes), axes, epsilon), axes)


def wn(
    weight: Tensor, axes: Axes, gain: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """`gain * w / sqrt(|w|^2 + epsilon)`: weight normalization.

    With `gain = norm(weight, axes, epsilon)` it returns `weight`.
    """
    return _times(gain, unit_norm(weight, axes, epsilon), axes)


def _wide(x):
    """`x` in float32, or in float64 where it is that."""
    x = ops.convert_to_tensor(x)
    wide = keras.backend.standardize_dtype(x.dtype) == "float64"
    return x if wide else ops.cast(x, "float32")


def _normal(axes, v):
    """`axes` as a sorted tuple of non-negative integers."""
    axes = (axes,) if isinstance(axes, int) else axes
    return tuple(sorted(axis % len(v.shape) for axis in axes))


# Over axes that stay with size 1. An element is the sum, and the mean, over no axes.


def _sum(v, axes):
    return ops.sum(v, axis=axes, keepdims=True) if axes else v


def _mean(v, axes):
    # On PyTorch, `ops.mean` has the precision of float32 only.
    n = 1
    for size in (ops.shape(v)[i] for i in axes):
        n = n * (size if isinstance(size, int) else ops.cast(size, v.dtype))
    return _sum(v, axes) / n


def _squeeze(v, axes):
    return ops.squeeze(v, axis=axes) if axes else v


def _mean_and_centered(v, axes):
    # Minus its first element, a constant vector is exactly zero, and nothing cancels
    # if the mean is much larger than the standard deviation.
    first = tuple(
        slice(0, 1) if is_one_of(i, axes) else slice(None) for i in range(len(v.shape))
    )
    first = ops.stop_gradient(v[first])
    v = v - first
    mean = _mean(v, axes)
    return first + mean, v - mean


def _size(v, axes, epsilon):
    """What to divide `v` by before it is squared: positive, and no gradient."""
    v = ops.abs(ops.stop_gradient(v))
    largest = ops.max(v, axis=axes, keepdims=True) if axes else v
    root = _root_of(epsilon, v)
    # On PyTorch, `ops.maximum` has the precision of float32 only.
    size = ops.where(largest > root, largest, root)
    return ops.where(size > 0, size, ops.ones_like(size))


def _root_of(epsilon, v):
    # Of a Python number PyTorch would keep only the digits of float32.
    return ops.convert_to_tensor(math.sqrt(epsilon), v.dtype)


def _divided(v, axes, reduce, epsilon):
    """`v / size`, `sqrt(reduce(v^2) + epsilon) / size`, `size`, and where it is 0.

    Where that root would be zero, it is 1 and has no gradient.
    """
    size = _size(v, axes, epsilon)
    v = v / size
    square = reduce(ops.square(v), axes)
    square = square + ops.square(_root_of(epsilon, v) / size)
    zero = ops.equal(square, 0)
    root = ops.sqrt(ops.where(zero, ops.ones_like(square), square))
    return v, root, size, zero


def _length(v, axes, reduce, epsilon):
    _, root, size, zero = _divided(v, axes, reduce, epsilon)
    return ops.where(zero, ops.zeros_like(root), size * root)


def _over_length(v, axes, reduce, epsilon):
    v, root, _, _ = _divided(v, axes, reduce, epsilon)
    return v / root


def _times(gain, v, axes):
    if gain is None:
        return v
    axes = _normal(axes, v)
    shape = [1 if is_one_of(i, axes) else n for i, n in enumerate(v.shape)]
    return ops.reshape(ops.cast(gain, v.dtype), shape) * v
