"""Batch statistics in one pass: shifted, masked, and across replicas."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_norms._types import Tensor
from keras_norms.ops.functions import ops
from keras_norms.ops.passes import channel_sums, visible
from keras_norms.ops.replicas import (
    devices_share_batches,
    gather_replicas,
    number_of_replicas,
)
from keras_norms.ops.shapes import Axis, channel_axis, per_channel, reduction_axes
from keras_norms.ops.single_pass import in_xla, single_pass

# A shift that is off by this many deviations costs six of 24 bits of the variance.
_FAR = 8.0
# An error of the shift, relative to the mean, that costs no more than rounding x did.
_CLOSE = 2.0**-12
# A larger variance counts as this, by dtype.
_LARGEST_VARIANCE = {
    name: float(np.finfo(name).max) / 4 for name in ("float32", "float64")
}


class Moments(NamedTuple):
    """Statistics of one batch, each `(channels,)`, with groups `(groups, channels)`.

    `count` is how many elements were seen, over all replicas where they are
    synchronized. It is a scalar unless a mask differs between channels.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor


def moments(
    x: Tensor,
    dtype: str,
    axis: Axis,
    mask: Tensor | None = None,
    synchronized: bool = False,
    prior: Tensor | None = None,
) -> Moments:
    """Mean and variance of every channel.

    Sums are of `x - shift`: nothing cancels if the mean is much larger than the
    standard deviation, and one read of `x` gives both.

    Args:
        x: Tensor of rank 2 or more.
        dtype: The dtype to compute in, float32 or wider.
        axis: The channel axis, see `shapes`.
        mask: Boolean tensor that broadcasts to the shape of `x`, `False` where an
            element does not count. Reads `x` twice.
        synchronized: Whether statistics are those of all replicas.
        prior: An estimate of the mean, `(channels,)`. Right or wrong, it changes only
            the rounding.

    Returns:
        `Moments`. Without any element, mean and variance are zero. Squares of a channel
        are added up in `dtype`: in float32, `count * variance` must be below 3e38, a
        deviation below 1e19 / sqrt(count). Beyond that the variance is 2^126.
    """
    if prior is None:
        prior = ops.zeros((x.shape[channel_axis(axis)],), dtype)
    if mask is None:
        count = _elements(x, axis, dtype)
        mean, variance = mean_and_variance(x, prior, count, axis=axis)
    elif _is_shared(axis):
        mask = ops.broadcast_to(mask, ops.shape(x))
        count = ops.sum(ops.cast(mask, dtype), reduction_axes(len(x.shape), axis))
        found = _around_prior_if_near(x, prior, count, axis, mask)
        mean, variance = (ops.where(count > 0, v, ops.zeros_like(v)) for v in found)
    else:
        count, mean, variance = masked_moments(x, mask, axis=axis, dtype=dtype)
    # Averages continue with a finite number, even if squares add up to more.
    largest = _LARGEST_VARIANCE[keras.backend.standardize_dtype(variance.dtype)]
    local = Moments(count, mean, ops.minimum(variance, largest))
    return combine_replicas(local)[0] if synchronized else local


def moving_averages(
    old: tuple[Tensor, ...], new: tuple[Tensor, ...], momentum: float, count: Tensor
) -> tuple[Tensor, ...]:
    """One step of plain exponential averages, `old` with the weight `momentum`.

    Args:
        old, new: Tuples of statistics of the same channels, each `(channels,)`: the
            averages, and those of the batch, or of its groups `(groups, channels)`.
        count: How many elements the batch has, a scalar or `(channels,)`.

    Returns:
        The averages after the batch, see `after_batch`. A channel without an element,
        or with a statistic that is not finite, keeps its averages.
    """
    usable = count > 0
    for statistic in new:
        usable = ops.logical_and(usable, ops.isfinite(statistic))
    moved = (momentum * a + (1 - momentum) * b for a, b in zip(old, new))
    return after_batch(usable, moved, old)[0]


def after_batch(
    usable: Tensor, new: Iterable[Tensor], old: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The averages to keep: new ones where they are usable, else the old ones.

    If new ones are given for each group, `(groups, channels)`, it takes their mean over
    the groups where they are usable. Also returns, for each channel, whether averages
    are new.
    """
    if len(usable.shape) == 2:
        # One sum: devices that have some of the groups then start one all-reduce.
        terms = [ops.where(usable, each, ops.zeros_like(each)) for each in new]
        sums = ops.sum(ops.stack([ops.cast(usable, terms[0].dtype), *terms]), 1)
        usable = sums[0] > 0
        groups = ops.where(usable, sums[0], ops.ones_like(sums[0]))
        new = [sums[1 + i] / groups for i in range(len(terms))]
    return tuple(ops.where(usable, a, b) for a, b in zip(new, old)), usable


def _is_shared(axis):
    """Whether the elements of one statistic are divided among devices.

    Those of a batch are. Groups are assumed to be on one device each, which is fast.
    """
    return devices_share_batches() and not isinstance(axis, tuple)


def _elements(x, axis, dtype):
    """Elements per channel, a scalar tensor. Sizes may be known only at run time."""
    shape = ops.shape(x)
    sizes = [shape[i] for i in reduction_axes(len(shape), axis)]
    static = math.prod(size for size in sizes if isinstance(size, int))
    count = ops.full((), float(static), dtype)
    for size in sizes:
        if not isinstance(size, int):
            count = count * ops.cast(size, dtype)
    return count


@single_pass()
def mean_and_variance(
    x: Tensor, prior: Tensor, count: Tensor, *, axis: Axis
) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel; see `moments`, without a mask."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    half = dtype in ("float16", "bfloat16")
    if _is_shared(axis):
        around = _around_prior_or_zero if half else _around_prior_if_near
        found = around(x, prior, count, axis)
    elif not in_xla():
        # Each operation is its own pass: one more costs less than avoiding it.
        return _around(x, _mean(x, prior.dtype, count, axis), count, axis)
    else:
        least, most = _range_of_some(x, prior.dtype, axis)
        prior = ops.broadcast_to(prior, ops.shape(least))
        shift = ops.where(least <= most, ops.clip(prior, least, most), prior)
        found = _around(x, shift, count, axis)
    if not half or keras.backend.backend() != "jax":
        return found
    import jax

    # XLA can compute the sums in the kernel that makes x, unless it needs a value of x
    # first: on TPUs four sums, on GPUs two. Around zero these err by about 2^-22 of the
    # mean square; rounding x to bfloat16 added more than 2^-20. Only the branch for the
    # platform is compiled.
    on_gpu = found
    if dtype == "bfloat16":
        on_gpu = _around(x, ops.zeros_like(prior), count, axis)
    return jax.lax.platform_dependent(
        found,
        _around_prior_or_zero(x, prior, count, axis),
        on_gpu,
        tpu=lambda found, on_tpu, on_gpu: on_tpu,
        cuda=lambda found, on_tpu, on_gpu: on_gpu,
        default=lambda found, on_tpu, on_gpu: found,
    )


def _range_of_some(x, dtype, axis):
    """The least and the largest of some values of each channel, from different places.

    They are reduced, because XLA computes cheap things, such as a slice, again in the
    gradient. On a CPU it does so while it overwrites that memory, if the gradient reads
    `x` in another shape too.
    """
    axes, sizes = reduction_axes(len(x.shape), axis), ops.shape(x)
    index = [slice(None)] * len(sizes)
    for i in axes:
        index[i] = slice(None, None, sizes[i] // 3 + 1)
    some = ops.cast(x[tuple(index)], dtype)
    # In an empty batch the least is above the largest.
    ends = ops.min(some, axes, initial=np.inf), ops.max(some, axes, initial=-np.inf)
    if keras.backend.backend() == "tensorflow":
        # TensorFlow does not know the rank of `some` if it does not know the sizes.
        groups = (-1,) if isinstance(axis, tuple) else ()
        shape = (*groups, x.shape[channel_axis(axis)])
        ends = tuple(ops.reshape(end, shape) for end in ends)
    return ends


def _around_prior_or_zero(x, prior, count, axis):
    """Sums around whichever is nearer to the mean: one read of x, and no value of it.

    Zero costs digits if the mean is many deviations: 16 of the 24 binary digits of a
    sum at 2^8. But beyond that, bfloat16 has no digits of a deviation anyway.
    """
    by_shift = [
        _around(x, shift, count, axis) for shift in (prior, ops.zeros_like(prior))
    ]
    mean = ops.stop_gradient(by_shift[0][0])
    nearer = ops.abs(mean - prior) <= ops.abs(mean)
    return tuple(ops.where(nearer, *pair) for pair in zip(*by_shift))


def _around_prior_if_near(x, prior, count, axis, mask=None):
    """Sums around the prior, and around the batch's own mean if the prior was far.

    A value of the batch would be better than the prior, but devices that do not hold it
    would have to fetch it.
    """
    found = _around(x, prior, count, axis, mask)
    mean, variance = found
    error = ops.square(mean - ops.stop_gradient(prior))
    near = ops.logical_or(
        error <= _FAR**2 * variance, error <= ops.square(_CLOSE * mean)
    )
    near = ops.logical_and(near, ops.isfinite(variance))  # Squares may overflow.

    def where_it_was_far():
        shift = _mean(x, prior.dtype, count, axis, mask)
        exact = _around(x, shift, count, axis, mask)
        return tuple(ops.where(near, *pair) for pair in zip(found, exact))

    return ops.cond(ops.all(near), lambda: found, where_it_was_far)


def _around(x, shift, count, axis, mask=None):
    """Mean and variance from sums of `x - shift`."""
    shift = ops.stop_gradient(shift)
    x = ops.cast(x, shift.dtype)
    divisor = ops.maximum(count, 1)
    ahead = behind = visible(x + per_channel(-shift, len(x.shape), axis), mask)
    if in_xla():  # on a CPU it would write a shared difference to memory
        behind = visible(per_channel(shift, len(x.shape), axis) - x, mask)
    mean = channel_sums(ahead, axis) / divisor
    square = channel_sums(ops.square(behind), axis) / divisor
    variance = ops.relu(square - ops.square(mean))
    return shift + mean, variance


def _mean(x, dtype, count, axis, mask=None):
    total = channel_sums(visible(ops.cast(x, dtype), mask), axis)
    return total / ops.maximum(count, 1)


@single_pass()
def masked_moments(
    x: Tensor, mask: Tensor, *, axis: Axis, dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and variance of every channel; see `moments`."""
    mask = ops.broadcast_to(mask, ops.shape(x))
    x = ops.cast(x, dtype)
    count = channel_sums(ops.cast(mask, dtype), axis)
    divisor = ops.maximum(count, 1)
    # Two passes: a prior mean may be far from the few elements that a mask leaves.
    mean = channel_sums(visible(x, mask), axis) / divisor
    centered = visible(x - per_channel(mean, len(x.shape), axis), mask)
    return count, mean, channel_sums(ops.square(centered), axis) / divisor


def combine_replicas(local: Moments, *others: Tensor) -> tuple[Any, ...]:
    """Merge the moments of all replicas (Chan et al. 1979) in one all-reduce.

    Other tensors, `(channels,)`, go along, and come back with those of all replicas
    along a new first axis.
    """
    if number_of_replicas() == 1:
        return local, *(other[None] for other in others)
    count = ops.broadcast_to(local.count, ops.shape(local.mean))
    slots = gather_replicas(ops.stack([count, local.mean, local.variance, *others]))
    counts, means, variances, *gathered = (slots[:, i] for i in range(slots.shape[1]))
    count = ops.sum(counts, 0)
    shares = counts / ops.maximum(count, 1)
    mean = ops.sum(shares * means, 0)
    spread = ops.square(means - mean)
    merged = Moments(count, mean, ops.sum(shares * (variances + spread), 0))
    return merged, *gathered
