"""Passes over activations for PyTorch on a CPU.

There every operation is a loop of its own, and the first touch of fresh memory takes
longer than the loop: in-place operations and the batch normalization operations, which
do several things in one loop, are what is fast. They compute in float32 for 16 bits.
Each function computes what the one that it is registered for does.
"""

import functools

import torch

from keras_norms.ops import moments, passes
from keras_norms.ops.custom_gradient import is_eager_torch
from keras_norms.ops.forward_mode import have_tangents
from keras_norms.ops.shapes import channel_groups, reduction_axes, sums_are_long

_LARGE = 2**16  # elements; below, what is saved is less than a custom function takes
_NEAR = 2.0**-12  # a deviation is small by the mean
_FEW = 16  # channels; a loop over shorter rows takes two or three times as long
_BLOCK = 2**17  # elements of 16 bits that a core converts at once, to stay in its cache
_WIDE = {  # what to compute in
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def is_small(x, *others, axis):
    """Whether starting operations takes longest, and no gradient is kept."""
    return (
        is_eager_torch()  # first: sizes of an exported program are symbols
        and x.is_cpu
        and others[0].dtype == _WIDE.get(x.dtype)
        and isinstance(axis, int)
        and 0 < x.numel() < _LARGE
        and not torch.is_grad_enabled()
    )


@moments.mean_and_variance.faster(where=is_small)
def mean_and_variance_in_few_operations(x, prior, count, *, axis):
    """Both from sums around the batch's own mean, which needs no prior."""
    x, axes = x.to(prior.dtype), reduction_axes(x.ndim, axis)
    first = x.mean(axes, keepdim=True)
    x = x - first
    mean = x.mean(axes)  # what rounding has left
    variance = x.square_().mean(axes).addcmul_(mean, mean, value=-1).clamp_min_(0)
    return mean.add_(first.flatten()), variance


def applies_to(x, *others, axis):
    """Whether the functions below can compute for these arguments."""
    return (
        is_eager_torch()  # first: sizes may be symbols, `torch.func.vmap` has no values
        and x.numel() >= _LARGE
        and x.is_cpu
        and all(
            tensor.dtype == (x.dtype if tensor.ndim == x.ndim else _WIDE.get(x.dtype))
            for tensor in others
        )
        and isinstance(axis, int)
        and axis % x.ndim == x.ndim - 1
        and not have_tangents(others)
    )


def elementwise(function):
    """Decorate a function of activations and vectors that treats elements alike.

    If there are few channels, a row has several positions, and a vector is repeated.
    Blocks of 16 bits become float32, one by one.
    """

    @functools.wraps(function)
    def call(x, *others, axis):
        half = x.dtype != _WIDE[x.dtype]
        if x.shape[-1] >= _FEW and not half:
            return function(x, *others)
        groups = _groups(x)
        length = groups * x.shape[-1]
        wide = [
            _repeated(each, groups) if each.ndim == 1 else each.reshape(-1, length)
            for each in (x, *others)
        ]
        y = _in_blocks(function, *wide) if half else function(*wide)
        return y.view(x.shape)

    return call


def _in_blocks(function, x, *others):
    """Apply it to some rows at a time, in float32."""
    y = torch.empty_like(x)
    rows = max(_BLOCK * torch.get_num_threads() // x.shape[1], 1)
    for i in range(0, len(x), rows):
        block = (v if v.ndim == 1 else v[i : i + rows].float() for v in (x, *others))
        y[i : i + rows] = function(*block)
    return y


@passes.affine.faster(where=applies_to)
@elementwise
def affine(x, center, scale, offset=None):
    y = (x - center).mul_(scale)
    return y if offset is None else y.add_(offset)


@passes.gradient_x.faster(where=applies_to)
@elementwise
def gradient_x(upstream, x, scale, k, pivot, constant):
    y = x - pivot
    torch.addcmul(upstream, y, k, value=-1, out=y)
    return y.sub_(constant).mul_(scale)


@moments.mean_and_variance.faster(where=applies_to)
def mean_and_variance(x, prior, count, *, axis):
    """Both from one operation, which subtracts the mean itself and needs no prior."""
    groups = _groups(x)
    if not sums_are_long(x.shape):
        mean, variance = _mean_and_variance(x, groups)
        # The last digits of a mean matter where nearly all of x is the mean.
        if not torch.any(variance < (_NEAR * mean).square_()):
            return mean, variance
    # Of small numbers.
    rows = x.reshape(-1, groups * x.shape[-1])
    shift = rows.mean(0, dtype=_WIDE[x.dtype]).view(groups, -1).mean(0)
    x = (rows - _repeated(shift, groups)).view(x.shape)
    mean, variance = _mean_and_variance(x, groups)
    return mean.add_(shift), variance


def _mean_and_variance(x, groups):
    rows, dtype, unused = _rows(x, groups), _WIDE[x.dtype], None
    if x.dtype != dtype:  # results have the dtype of the averages, which it updates
        unused = torch.zeros(rows.shape[1], dtype=dtype)
    means, variances = torch.batch_norm_update_stats(rows, unused, unused, 0.0)
    means, variances = means.view(groups, -1), variances.view(groups, -1)
    mean = means.mean(0)
    return mean, (variances + (means - mean).square_()).mean(0)


@passes.gradient_sums.faster(where=applies_to)
def gradient_sums(upstream, x, center, *, axis):
    """sum(g) and sum(g * (x - center)), which is how `affine` backpropagates."""
    groups = _groups(x)
    ones = center.new_ones(groups * x.shape[-1])
    _, sum_gx, sum_g = torch.ops.aten.native_batch_norm_backward(
        _rows(upstream, groups),
        _rows(x, groups),
        ones,
        _repeated(center, groups),
        ones,
        None,
        None,
        False,
        0.0,
        [False, True, True],
    )
    return torch.stack([sum_g, sum_gx]).view(2, groups, -1).sum(1)


def _groups(x):
    """How many positions make a row: of one sample, or of several."""
    return channel_groups((1, *x.shape))


def _repeated(vector, groups):
    # `vector.repeat(groups)` takes twice as long. One channel would stay a view, with a
    # stride of 0 that the batch normalization operations do not look at.
    return vector.expand(groups, -1).reshape(-1).contiguous()


def _rows(x, groups):
    """The tensor as the batch of 1 x 1 images that the operations take."""
    return x.reshape(-1, groups * x.shape[-1], 1, 1)
