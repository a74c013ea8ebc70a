"""Normalisation by the average l_p norm of a channel, and its hand-written gradient.

As in `normalize`: `x` is an activation tensor, a statistic is a vector over its channel
axis, float32 or wider.
"""

import math
from typing import NamedTuple

from keras_norms._types import Tensor
from keras_norms.ops.custom_gradient import custom_gradient
from keras_norms.ops.functions import ops
from keras_norms.ops.moments import combine_replicas, moments
from keras_norms.ops.passes import (
    affine,
    channel_sums,
    gradient_sums,
    gradient_x,
    visible,
)
from keras_norms.ops.replicas import gather_replicas, sum_over_replicas
from keras_norms.ops.shapes import Axis, per_channel, reduction_axes
from keras_norms.ops.single_pass import single_pass


class LpStatistics(NamedTuple):
    """Statistics of one batch: elements per channel, mean and norm, as `Moments`.

    `ends` are the largest x and the largest -x if `norm` is that of x - mean and p is
    infinity, else empty.
    """

    count: Tensor
    mean: Tensor
    norm: Tensor
    ends: tuple[Tensor, ...] = ()


def lp_statistics(
    x: Tensor,
    dtype: str,
    *,
    p: float,
    centered: bool,
    axis: Axis,
    mask: Tensor | None = None,
    synchronized: bool = False,
    prior: Tensor | None = None,
) -> LpStatistics:
    """Mean and s_p = (mean |x|^p)^(1/p) of every channel, s_inf = max |x|.

    Args:
        x: Tensor of rank 2 or more.
        dtype: What to compute in, float32 or wider.
        p: 1 to infinity.
        centered: Whether s_p is that of `x - mean` instead.
        axis: The channel axis, see `shapes`.
        mask: Boolean, broadcasts to `x`; `False` elements do not count.
        synchronized: Whether statistics are those of all replicas.
        prior: An estimate of the mean, see `moments`.

    Returns:
        `LpStatistics`. Without any element, mean and norm are zero.
    """
    masks = () if mask is None else (mask,)
    # The norm goes along with the moments, unless it needs their mean first.
    waits = centered and p not in (2, math.inf)
    together = synchronized and p != 2 and not waits
    batch = moments(x, dtype, axis, mask, synchronized and not together, prior)
    if p == 2:
        square = batch.variance
        if not centered:
            square = square + ops.square(batch.mean)
        return LpStatistics(batch.count, batch.mean, _root(square, 2))
    if centered and p == math.inf:
        ends = _ends(x, *masks, dtype=dtype, axis=axis)
        if together:
            batch, *ends = combine_replicas(batch, *ends)
            ends = [ops.max(end, 0) for end in ends]
        above, below = _beyond(batch.mean, *ends)
        norm = ops.relu(ops.where(above > below, above, below))
        return LpStatistics(batch.count, batch.mean, norm, tuple(ends))
    center = batch.mean if centered else ops.zeros_like(batch.mean)
    norm = _norm(x, center, *masks, p=p, centered=centered, axis=axis)
    if synchronized:
        if together:
            batch, norms = combine_replicas(batch, norm)
        else:
            norms = gather_replicas(norm)
        norm = _norm_of_norms(norms, p, axis=-1)
    if p != math.inf:
        norm = norm / ops.maximum(batch.count, 1) ** (1 / p)
    return LpStatistics(batch.count, batch.mean, norm)


def lp_inference(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    norm: Tensor,
    *,
    epsilon: float,
    axis: int,
) -> Tensor:
    """The same map with stored statistics: affine in `x`."""
    return affine(x, mean, gamma / (norm + epsilon), beta, axis=axis)


def lp_normalization(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    batch: LpStatistics,
    *,
    p: float,
    centered: bool,
    epsilon: float,
    axis: Axis,
    mask: Tensor | None = None,
    synchronized: bool = False,
) -> Tensor:
    """gamma * (x - mean) / (norm + epsilon) + beta (Santurkar et al., Section 3.3).

    `batch` is what `lp_statistics` returns for `x` and the same arguments: the gradient
    passes through it. Where several elements attain the maximum, the gradient of s_inf
    goes to them in equal parts. `gamma` and `beta` are of the shape of the statistics,
    in the dtype to compute in.
    """

    # With a = gamma / (norm + epsilon) and g = `upstream`, the derivative that arrives
    # at the norm is -a * sum(g * (x - mean)) / (norm + epsilon).

    def forward(x, gamma, beta, mean, norm, *for_gradient):
        return lp_inference(x, gamma, beta, mean, norm, epsilon=epsilon, axis=axis)

    def gradient(upstream, x, gamma, beta, mean, norm, count, *rest):
        ends, mask = rest[: len(batch.ends)], rest[len(batch.ends) :]
        # Without the factor a, by which `gradient_x` multiplies.
        inverse = 1 / (norm + epsilon)
        center = mean if centered else ops.zeros_like(mean)
        sums = local = gradient_sums(upstream, x, mean, *mask, axis=axis)
        if p == 2:
            # (x - center) / norm: linear in x, and its mean is 0 where it is centered.
            direction = x
            pivot = center
            unit = 1 / ops.where(norm > 0, norm, ops.ones_like(norm))
        else:
            if ends:
                direction = _direction_of_ends(x, mean, *ends, *mask, axis=axis)
            else:
                direction = _direction(
                    x, center, norm, *mask, p=p, centered=centered, axis=axis
                )
            pivot = ops.zeros_like(mean)
            unit = ops.ones_like(mean)
            if p == math.inf or centered:
                axes = reduction_axes(len(x.shape), axis)
                attained = ops.sum(ops.abs(direction), axes)
                sums = ops.concatenate(
                    [local, ops.stack([ops.sum(direction, axes), attained])]
                )
        total = sum_over_replicas(sums) if synchronized else sums
        count = ops.maximum(count, 1)
        through_norm = -total[1] * inverse
        # The factor that `_direction` left out.
        shares = ops.maximum(total[3], 1) if p == math.inf else count
        k = -through_norm / shares * unit
        constant = total[0] / count
        if centered and p != 2:
            constant = constant - k * total[2] / count
        vectors = gamma * inverse, k, pivot, constant
        dx = gradient_x(upstream, direction, *vectors, *mask, axis=axis)
        return dx, local[1] * inverse, local[0], *[None] * (3 + len(rest))

    rest = batch.ends if mask is None else (*batch.ends, mask)
    normalize = custom_gradient(forward, gradient)
    return normalize(x, gamma, beta, batch.mean, batch.norm, batch.count, *rest)


def _root(x, p):
    """x^(1/p), with derivative 0 where x is 0."""
    is_zero = x == 0  # NaN is not, and stays
    root = ops.where(is_zero, ops.ones_like(x), x) ** (1 / p)
    return ops.where(is_zero, ops.zeros_like(x), root)


def _norm_of_norms(x, p, axis):
    """(sum x^p)^(1/p) of non-negative numbers, without overflow."""
    if p == 1:
        return channel_sums(x, axis)
    axes = reduction_axes(len(x.shape), axis)
    # There may be no number at all.
    largest = ops.max(x, axes, keepdims=True, initial=0)
    if p == math.inf:
        return ops.squeeze(largest, axes)
    largest = ops.stop_gradient(ops.where(largest > 0, largest, ops.ones_like(largest)))
    return _root(channel_sums((x / largest) ** p, axis), p) * ops.squeeze(largest, axes)


def _offset(x, center, centered, axis):
    """x - center in the dtype of `center`; x itself where it is not centered."""
    x = ops.cast(x, center.dtype)
    return x - per_channel(center, len(x.shape), axis) if centered else x


@single_pass()
def _norm(x, center, mask=None, *, p, centered, axis):
    size = visible(ops.abs(_offset(x, center, centered, axis)), mask)
    return _norm_of_norms(size, p, axis)


@single_pass()
def _ends(x, mask=None, *, dtype, axis):
    """The largest x and the largest -x of every channel, in one reduction on JAX."""
    x = ops.cast(x, dtype)
    axes = reduction_axes(len(x.shape), axis)
    none = -(2.0**127)  # finite: replicas multiply it by 0

    def largest(x):
        if mask is not None:
            x = ops.where(mask, x, ops.full_like(x, none))
        return ops.max(x, axes, initial=none)

    return largest(x), largest(-x)


def _beyond(mean, largest_x, largest_minus_x):
    """How far a channel reaches above its mean, and below."""
    return largest_x - mean, largest_minus_x + mean


@single_pass()
def _direction_of_ends(x, mean, largest_x, largest_minus_x, mask=None, *, axis):
    """`_direction` for p = inf of x - mean: 1 or -1 where x is the farther end.

    It compares x itself: x - mean may be rounded otherwise than where it was largest.
    """
    ndim, x = len(x.shape), ops.cast(x, mean.dtype)
    above, below = _beyond(mean, largest_x, largest_minus_x)
    # Nothing is larger than the norm: no x is equal to this.
    nowhere = ops.full_like(mean, math.inf)
    top = ops.where(above >= below, largest_x, nowhere)
    bottom = ops.where(below >= above, largest_minus_x, nowhere)
    top, bottom = (per_channel(end, ndim, axis) for end in (top, bottom))
    direction = ops.cast(x == top, x.dtype) - ops.cast(-x == bottom, x.dtype)
    return visible(direction, mask)


@single_pass()
def _direction(x, center, norm, mask=None, *, p, centered, axis):
    """The derivative of s_p with respect to x - center, up to a factor of the channel.

    sign(u) (|u| / s_p)^(p-1), and for p = inf sign(u) where the maximum is attained.
    """
    u = _offset(x, center, centered, axis)
    norm = per_channel(norm, len(u.shape), axis)
    direction = ops.sign(u)
    if p == math.inf:
        direction = ops.where(ops.abs(u) == norm, direction, ops.zeros_like(u))
    elif p != 1:
        norm = ops.where(norm > 0, norm, ops.ones_like(norm))
        direction = direction * (ops.abs(u) / norm) ** (p - 1)
    return visible(direction, mask)
