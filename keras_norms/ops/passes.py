"""The passes over activations of which forward and backward maps consist."""

import math

import keras
from keras import ops

from keras_norms.ops.custom_gradient import fused

_LONGEST_ROW = 4096


def reduction_axes(ndim, axis):
    """Return every axis of a tensor of rank `ndim` but the channel axis."""
    return tuple(i for i in range(ndim) if i != axis % ndim)


def per_channel(vector, ndim, axis):
    """Reshape `(channels,)` so that it broadcasts against a tensor of rank `ndim`."""
    trailing = ndim - 1 - axis % ndim
    if not trailing or not len(vector.shape):
        return vector
    return ops.reshape(vector, tuple(vector.shape) + (1,) * trailing)


def neighbours(shape):
    """How many neighbouring positions a CPU best takes as channels of their own.

    Its loops add up a channel one element after the other. Shorter sums, combined
    afterwards, keep more digits, and longer rows are faster where channels are few.

    Args:
        shape: That of a tensor, channels last; sizes may be `None`.
    """
    positions = math.prod(size for size in shape[1:-1] if size)
    if None in shape[1:-1]:
        positions = shape[-2] or 1
    longest = max(_LONGEST_ROW // shape[-1], 1)
    return max(n for n in range(1, longest + 1) if positions % n == 0)


def channel_sums(x, axis):
    """Sum over every axis but that of the channels."""
    if (
        keras.backend.backend() == "tensorflow"
        and axis % len(x.shape) == len(x.shape) - 1
    ):
        # On a CPU it adds one element after the other, see above.
        x = ops.sum(ops.reshape(x, (-1, neighbours(x.shape), x.shape[-1])), 0)
        axis = -1
    return ops.sum(x, reduction_axes(len(x.shape), axis))


@fused(cpu="affine")  # not by XLA: inference is exported to where there is none
def affine(x, center, scale, offset, *, axis):
    """scale * (x - center) + offset; subtracting first keeps digits."""
    ndim = len(x.shape)
    center, scale, offset = (
        per_channel(v, ndim, axis) for v in (center, scale, offset)
    )
    return ops.cast((ops.cast(x, center.dtype) - center) * scale + offset, x.dtype)


@fused(cpu="gradient_sums")
def gradient_sums(upstream, x, center, *, axis):
    """sum(g) and sum(g * (x - center)) over a channel, stacked."""
    ndim = len(x.shape)
    axes = reduction_axes(ndim, axis)
    g, x = ops.cast(upstream, center.dtype), ops.cast(x, center.dtype)
    # Not x - center, which the forward pass has: XLA on CPU would write it to memory.
    shifted = x + per_channel(-center, ndim, axis)
    return ops.stack([ops.sum(g, axes), ops.sum(g * shifted, axes)])


@fused()
def masked_gradient_sums(upstream, x, center, mask, *, axis):
    """The same, but for hidden elements without a gradient, which may be NaN."""
    ndim = len(x.shape)
    counts = ops.logical_or(mask, ops.not_equal(upstream, 0))
    x = ops.where(counts, ops.cast(x, center.dtype), per_channel(center, ndim, axis))
    return gradient_sums.__wrapped__(upstream, x, center, axis=axis)


@fused(cpu="gradient_x", xla=True)
def gradient_x(upstream, x, scale, k, pivot, constant, *, axis):
    """scale * (g - k * (x - pivot) - constant); k may be as small as x is large."""
    ndim = len(x.shape)
    scale, k, pivot, constant = (
        per_channel(v, ndim, axis) for v in (scale, k, pivot, constant)
    )
    g, x = ops.cast(upstream, scale.dtype), ops.cast(x, scale.dtype)
    return ops.cast(scale * (g - k * (x - pivot) - constant), upstream.dtype)


@fused(xla=True)
def masked_gradient_x(upstream, x, scale, k, pivot, constant, mask, *, axis):
    """The same where the mask is true, scale * g elsewhere."""
    visible = gradient_x.__wrapped__(upstream, x, scale, k, pivot, constant, axis=axis)
    scale = per_channel(scale, len(x.shape), axis)
    hidden = ops.cast(scale * ops.cast(upstream, scale.dtype), upstream.dtype)
    return ops.where(mask, visible, hidden)
