"""Passes over activations for PyTorch on a CPU.

There every operation is a loop of its own, and the first touch of fresh memory takes
longer than the loop: in-place operations and the batch normalization operations, which
do several things in one loop, are what is fast. They compute in float32 for 16 bits.
Each function computes what the one that it is registered for does.
"""

import functools
import math

import torch

from keras_norms.ops import moments, passes
from keras_norms.ops.custom_gradient import is_eager_torch
from keras_norms.ops.forward_mode import have_tangents
from keras_norms.ops.shapes import (
    LONGEST_ROW,
    channel_groups,
    per_channel,
    reduction_axes,
    sums_are_long,
)

_LARGE = 2**16  # elements; below, what is saved is less than a custom function takes
_NEAR = 2.0**-12  # a deviation is small by the mean
_FEW = 16  # elements; a loop over shorter rows takes two or three times as long
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
        and (_is_last(axis, x) or _behind(x, axis) >= _FEW)
        and not have_tangents(others)
    )


def elementwise(function):
    """Decorate a function of activations and vectors that treats elements alike.

    If channels are last and few, a row has several positions, and a vector is repeated.
    Tensors of 16 bits are converted to float32 and back in blocks. The result is
    written to `out` if there is one, a contiguous tensor.
    """

    @functools.wraps(function)
    def call(x, *others, axis, out=None):
        half = x.dtype != _WIDE[x.dtype]
        if _is_last(axis, x) and x.shape[-1] >= _FEW and not half:
            return function(x, *others, out=out)
        rows = _in_rows((x, *others), axis)
        out = None if out is None else out.view(rows[0].shape)
        compute = functools.partial(_in_blocks, function) if half else function
        return compute(*rows, out=out).view(x.shape)

    return call


def _in_rows(tensors, axis):
    """Activations and vectors of their channels, in shapes that broadcast."""
    x = tensors[0]
    if _is_last(axis, x):
        parts = _parts(x, axis)
        rows = -1, math.prod(parts)
        return [v.reshape(rows) if v.ndim > 1 else _repeated(v, parts) for v in tensors]
    rows = -1, x.shape[axis], _behind(x, axis)
    return [v.reshape(rows) if v.ndim > 1 else v[:, None] for v in tensors]


def _in_blocks(function, x, *others, out):
    """Apply it to some rows at a time, in float32."""
    y = x.new_empty(x.shape) if out is None else out
    rows = max(_BLOCK * torch.get_num_threads() // math.prod(x.shape[1:]), 1)
    for i in range(0, len(x), rows):
        part = slice(i, i + rows)
        y[part] = function(
            *(v if v.ndim < x.ndim else v[part].float() for v in (x, *others))
        )
    return y


@passes.affine.faster(where=applies_to)
@elementwise
def affine(x, center, scale, offset=None, out=None):
    y = torch.sub(x, center, out=out).mul_(scale)
    return y if offset is None else y.add_(offset)


@passes.gradient_x.faster(where=applies_to)
@elementwise
def gradient_x(upstream, x, scale, k, pivot, constant, out=None):
    y = torch.sub(x, pivot, out=out)
    torch.addcmul(upstream, y, k, value=-1, out=y)
    return y.sub_(constant).mul_(scale)


@moments.mean_and_variance.faster(where=applies_to)
def mean_and_variance(x, prior, count, *, axis):
    """Both from one operation, which subtracts the mean itself and needs no prior."""
    if not (_is_last(axis, x) and sums_are_long(x.shape)):
        mean, variance = _mean_and_variance(x, axis)
        # The last digits of a mean matter where nearly all of x is the mean.
        if not torch.any(variance < (_NEAR * mean).square_()):
            return mean, variance
    # Of small numbers.
    shift = x.mean(reduction_axes(x.ndim, axis), dtype=prior.dtype)
    mean, variance = _mean_and_variance(x - per_channel(shift, x.ndim, axis), axis)
    return mean.add_(shift), variance


def _mean_and_variance(x, axis):
    if few := _left_over(x, axis):
        rows, share = x.reshape(-1, x.shape[-1]), few * x.shape[-1] / x.numel()
        (mean, variance), others = (
            _mean_and_variance(part, -1) for part in (rows[:-few], rows[-few:])
        )
        apart = others[0] - mean
        spread = apart.square().mul_(share * (1 - share))
        variance = torch.lerp(variance, others[1], share).add_(spread)
        return mean.add_(apart, alpha=share), variance
    parts = _parts(x, axis)
    rows, dtype, unused = _images(x, parts, axis), _WIDE[x.dtype], None
    if x.dtype != dtype:  # results have the dtype of the averages, which it updates
        unused = rows.new_zeros(rows.shape[1], dtype=dtype)
    means, variances = torch.batch_norm_update_stats(rows, unused, unused, 0.0)
    means, variances = means.view(parts), variances.view(parts)
    axes = reduction_axes(len(parts), 1)
    mean = means.mean(axes)
    spread = (means - per_channel(mean, len(parts), 1)).square_()
    return mean, variances.add_(spread).mean(axes)


@passes.gradient_sums.faster(where=applies_to)
def gradient_sums(upstream, x, center, *, axis):
    """sum(g) and sum(g * (x - center)), which is how `affine` backpropagates."""
    if few := _left_over(x, axis):
        rows = [tensor.reshape(-1, x.shape[-1]) for tensor in (upstream, x)]
        parts = ([v[:-few] for v in rows], [v[-few:] for v in rows])
        return sum(gradient_sums(*part, center, axis=-1) for part in parts)
    parts = _parts(x, axis)
    center = _repeated(center, parts)
    ones = torch.ones_like(center)
    _, sum_gx, sum_g = torch.ops.aten.native_batch_norm_backward(
        _images(upstream, parts, axis),
        _images(x, parts, axis),
        ones,
        center,
        ones,
        None,
        None,
        False,
        0.0,
        [False, True, True],
    )
    return torch.stack([sum_g, sum_gx]).view(2, *parts).sum((1, 3)[: len(parts) - 1])


def hides_positions(x, *others, axis, **settings):
    """Whether those below with a mask can: it hides positions with all channels."""
    *others, mask = others
    return (
        applies_to(x, *others, axis=axis)
        and _is_last(axis, x)
        and mask.dtype == torch.bool
        and mask.shape == (*x.shape[:-1], 1)
    )


@moments.masked_moments.faster(where=hides_positions)
def masked_moments(x, mask, *, axis, dtype):
    """The moments of the positions that are seen, which it copies."""
    seen = x[mask[..., 0]]
    zeros = x.new_zeros(x.shape[-1], dtype=_WIDE[x.dtype])
    if not len(seen):
        return zeros, zeros, zeros
    return zeros + len(seen), *mean_and_variance(seen, zeros, len(seen), axis=-1)


@passes.gradient_sums.faster(where=hides_positions)
def masked_gradient_sums(upstream, x, center, mask, *, axis):
    sums = gradient_sums(upstream, x, center, axis=axis)
    if torch.isfinite(sums).all():
        return sums
    # What is hidden may be NaN, if it has no gradient.
    x = torch.where(mask | (upstream != 0), x, center.to(x.dtype))
    return gradient_sums(upstream, x, center, axis=axis)


@passes.gradient_x.faster(where=hides_positions)
def masked_gradient_x(upstream, x, scale, k, pivot, constant, mask, *, axis):
    dx = gradient_x(upstream, x, scale, k, pivot, constant, axis=axis)
    hidden = ~mask[..., 0]
    dx[hidden] = (upstream[hidden] * scale).to(dx.dtype)
    return dx


def _is_last(axis, x):
    return axis % x.ndim == x.ndim - 1


def _behind(x, axis):
    """How many positions of a channel follow each other."""
    return math.prod(x.shape[axis % x.ndim + 1 :])


def _parts(x, axis):
    """The shape of the partial sums, `(before, channels)` or with a third axis.

    Where channels are last, neighbouring positions have their own, elsewhere rows.
    """
    if _is_last(axis, x):
        return channel_groups((1, *x.shape)), x.shape[-1]
    behind = _behind(x, axis)
    before = x.numel() // (x.shape[axis] * behind)
    return before, x.shape[axis], behind // _length_of_row(behind)


def _left_over(x, axis):
    """How many positions to add up by themselves, so that the others have many sums.

    If the number of positions has no suitable divisor, sums would be long.
    """
    channels = x.shape[-1]
    return _is_last(axis, x) and _remainder(x.numel() // channels, channels)


@functools.lru_cache
def _remainder(positions, channels):
    groups = channel_groups((1, positions, channels))
    wanted = 2 ** int(math.log2(max(LONGEST_ROW // channels, 1)))
    short = positions <= LONGEST_ROW * groups or 4 * groups >= wanted
    return 0 if short else positions % wanted


@functools.lru_cache
def _length_of_row(behind):
    divisors = (n for n in range(LONGEST_ROW, _FEW - 1, -1) if behind % n == 0)
    return next(divisors, behind)


def _repeated(vector, parts):
    # `vector.repeat(groups)` takes twice as long. One channel would stay a view, with a
    # stride of 0 that the batch normalization operations do not look at.
    return per_channel(vector, len(parts), 1).expand(parts).reshape(-1).contiguous()


def _images(x, parts, axis):
    """The tensor as the images that the operations take, with a channel for each sum.

    Where channels are last, many images of one pixel. Elsewhere, one image.
    """
    channels = math.prod(parts)
    if _is_last(axis, x):
        return x.reshape(-1, channels, 1, 1)
    return x.reshape(1, channels, -1, 1)
