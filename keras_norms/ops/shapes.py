"""Axes of activations: the channel axis, the axis of groups, and the others.

If each group of samples is normalised by itself, `axis` is a tuple: an activation is
`(groups, group_size, ...)`, the axes of its statistics are 0 and the channel axis, and
a vector is `(groups, channels)`, or `(channels,)` if groups share it.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import keras

from keras_norms._types import Tensor
from keras_norms.ops.functions import ops

LONGEST_ROW = 4096  # elements of a CPU's loop
_SHORT = 1024  # elements of a sum
ALIGNED = 4  # oneDNN takes fifteen times as long for a row of 4,095 as for 4,096

Axis = int | tuple[int, int]


def reduction_axes(ndim: int, axis: Axis) -> tuple[int, ...]:
    """Return every axis of a tensor of rank `ndim` except those of its statistics."""
    channel = channel_axis(axis) % ndim
    first = 1 if isinstance(axis, tuple) else 0
    return (*range(first, channel), *range(channel + 1, ndim))


def is_one_of(i: int, axes: Iterable[int]) -> bool:
    """`i in axes`, which is false if PyTorch compiles it and an axis is symbolic."""
    return any(i == axis for axis in axes)


def channel_axis(axis: Axis) -> int:
    """The channel axis, with groups too."""
    return axis[-1] if isinstance(axis, tuple) else axis


def per_channel(vector: Tensor, ndim: int, axis: Axis) -> Tensor:
    """Reshape a vector to broadcast against a tensor of rank `ndim`."""
    channel = channel_axis(axis) % ndim
    trailing = ndim - 1 - channel
    if len(vector.shape) == 2:
        groups, channels = ops.shape(vector)
        between, behind = (1,) * (channel - 1), (1,) * trailing
        return ops.reshape(vector, (groups, *between, channels, *behind))
    if not trailing:
        return vector
    return ops.reshape(vector, tuple(vector.shape) + (1,) * trailing)


def in_groups(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    axis: int,
    group_size: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Axis]:
    """Split a batch into groups of consecutive samples, if there is more than one.

    `x`, and a mask of its rank, become `(groups, group_size, ...)`, `gamma` and `beta`
    `(groups, channels)`, and `axis` a tuple. It is an error if the group size does not
    divide the batch size.
    """
    if group_size is None or x.shape[0] == group_size:
        return x, gamma, beta, mask, axis
    size = ops.shape(x)[0]
    wrong = (
        "Argument `group_size` must divide the batch size. "
        f"Received: group_size={group_size} with a batch size of "
    )
    if x.shape[0] is None:  # TensorFlow knows it when the graph runs.
        import tensorflow as tf

        check = tf.debugging.Assert(size % group_size == 0, [wrong, size])
        with tf.control_dependencies([check]):
            size = tf.identity(size)
    elif size % group_size:
        raise ValueError(f"{wrong}{size}")
    groups = size // group_size

    def cut(x):
        # XLA drops the check; its error then shows this name.
        with keras.name_scope("group_size_must_divide_the_batch_size"):
            return ops.reshape(x, (groups, group_size, *ops.shape(x)[1:]))

    if mask is not None:
        mask = cut(ops.broadcast_to(mask, (size, *ops.shape(mask)[1:])))
    axis = axis % len(x.shape)
    gamma, beta = (
        ops.broadcast_to(vector, (groups, x.shape[axis])) for vector in (gamma, beta)
    )
    return cut(x), gamma, beta, mask, (0, axis + 1)


def out_of_groups(y: Tensor, x: Tensor) -> Tensor:
    """`y` in the shape of the batch `x`."""
    return y if len(y.shape) == len(x.shape) else ops.reshape(y, ops.shape(x))


def channel_groups(shape: Any) -> int:
    """How many neighbouring positions a CPU should treat as separate channels.

    Its loops add the elements of a channel one by one. Shorter sums, combined
    afterwards, keep more digits, and longer rows are faster if there are few channels.
    Channels are last in `shape`, whose sizes may be `None`.
    """
    return _channel_groups(tuple(shape))


def sums_are_long(shape: Any) -> bool:
    """Whether a sample has no groups, so that a sum is over many rows of the batch."""
    return channel_groups((None, *shape[1:])) == 1


@functools.lru_cache  # it takes as long as a pass over 10,000 elements
def _channel_groups(shape):
    samples, *sizes, channels = shape
    positions = (sizes[-1] or 1) if None in sizes else math.prod(sizes)
    groups = _widest(positions, LONGEST_ROW // channels, channels)
    if groups == 1 and None not in shape and samples > _SHORT:
        # Rows of several samples are for the digits, and slower.
        groups = _widest(samples * positions, LONGEST_ROW // 4 // channels, channels)
    return groups


def _widest(positions, longest, channels):
    found = [n for n in range(1, max(longest, 1) + 1) if positions % n == 0]
    return max([n for n in found if n * channels % ALIGNED == 0] or found)
