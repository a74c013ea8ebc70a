"""The passes over activations in forward and backward maps."""

import keras

from keras_norms.ops.functions import ops
from keras_norms.ops.shapes import (
    channel_axis,
    channel_groups,
    per_channel,
    reduction_axes,
)
from keras_norms.ops.single_pass import in_xla, single_pass


def channel_sums(x, axis):
    """Sum over every axis but that of the channels."""
    ndim = len(x.shape)
    channel, axes = channel_axis(axis) % ndim, reduction_axes(ndim, axis)
    if keras.backend.backend() == "tensorflow" and not in_xla():
        # On a CPU TensorFlow adds elements one by one, except for neighbours.
        apart = 1 if isinstance(axis, tuple) else 0  # axes that are not added up
        if channel < ndim - 1:
            behind = axes[channel - apart :]
            return ops.sum(ops.sum(x, behind), axes[: channel - apart])
        groups = channel_groups(x.shape[apart:])
        if groups > 1:
            x = ops.reshape(x, (*ops.shape(x)[:apart], -1, groups, x.shape[-1]))
            x = ops.sum(x, apart)
            axes = reduction_axes(len(x.shape), (0, -1) if apart else -1)
    return ops.sum(x, axes)


def visible(x, mask):
    """x, and 0 where there is a mask that is false, where x may be NaN."""
    return x if mask is None else ops.where(mask, x, ops.zeros_like(x))


@single_pass()  # not by XLA: inference may be exported to places without it
def affine(x, center, scale, offset=None, mask=None, *, axis):
    """scale * (x - center) + offset, which keeps digits; 0 where a mask is false."""
    x, ndim = visible(x, mask), len(x.shape)
    center, scale = (per_channel(v, ndim, axis) for v in (center, scale))
    y = (ops.cast(x, center.dtype) - center) * scale
    if offset is not None:
        y = y + per_channel(offset, ndim, axis)
    return visible(ops.cast(y, x.dtype), mask)


@single_pass()
def gradient_sums(upstream, x, center, mask=None, *, axis):
    """sum(g) and sum(g * (x - center)) over a channel, stacked.

    Not of hidden elements without a gradient, which may be NaN.
    """
    ndim = len(x.shape)
    g, x = ops.cast(upstream, center.dtype), ops.cast(x, center.dtype)
    if mask is not None:
        counts = ops.logical_or(mask, ops.not_equal(upstream, 0))
        x = ops.where(counts, x, per_channel(center, ndim, axis))
    # Not x - center, which the forward pass has: XLA on CPU would write it to memory.
    shifted = x + per_channel(-center, ndim, axis)
    return ops.stack([channel_sums(g, axis), channel_sums(g * shifted, axis)])


@single_pass(xla="large")
def gradient_x(upstream, x, scale, k, pivot, constant, mask=None, *, axis):
    """scale * (g - k * (x - pivot) - constant); k may be as small as x is large.

    Where a mask is false, scale * g.
    """
    ndim = len(x.shape)
    scale, k, pivot, constant = (
        per_channel(v, ndim, axis) for v in (scale, k, pivot, constant)
    )
    g, x = ops.cast(upstream, scale.dtype), ops.cast(x, scale.dtype)
    dx = ops.cast(scale * (g - k * (x - pivot) - constant), upstream.dtype)
    if mask is None:
        return dx
    return ops.where(mask, dx, ops.cast(scale * g, upstream.dtype))
