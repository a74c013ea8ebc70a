"""Axes of activations: that of the channels, and the others."""

import math
from typing import Any

from keras import ops

from keras_norms._types import Tensor

_LONGEST_ROW = 4096


def reduction_axes(ndim: int, axis: int) -> tuple[int, ...]:
    """Return every axis of a tensor of rank `ndim` but the channel axis."""
    return tuple(i for i in range(ndim) if i != axis % ndim)


def per_channel(vector: Tensor, ndim: int, axis: int) -> Tensor:
    """Reshape `(channels,)` so that it broadcasts against a tensor of rank `ndim`."""
    trailing = ndim - 1 - axis % ndim
    if not trailing or not len(vector.shape):
        return vector
    return ops.reshape(vector, tuple(vector.shape) + (1,) * trailing)


def channel_groups(shape: Any) -> int:
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
