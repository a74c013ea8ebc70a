"""Checks of layer arguments: a wrong one says what it is, what it got and what fits."""

import math
import numbers

import keras
from keras import ops


def number(name, value, *, above=None, at_least=None, below=None):
    """Return `value` if it is a finite real number in the given range."""
    limits = []
    if above is not None:
        limits.append("positive" if above == 0 else f"greater than {above}")
    if at_least is not None:
        limits.append("non-negative" if at_least == 0 else f"at least {at_least}")
    if below is not None:
        limits.append(f"less than {below}")
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Real)
        or not math.isfinite(value)
        or (above is not None and value <= above)
        or (at_least is not None and value < at_least)
        or (below is not None and value >= below)
    ):
        raise ValueError(
            f"Argument `{name}` must be a number, {' and '.join(limits)}. "
            f"Received: {name}={value!r}"
        )
    return float(value)


def integer(name, value):
    """Return `value` if it is an integer."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(
            f"Argument `{name}` must be an integer. Received: {name}={value!r}"
        )
    return int(value)


def boolean(name, value):
    """Return `value` if it is a boolean."""
    if not isinstance(value, bool):
        raise ValueError(
            f"Argument `{name}` must be True or False. Received: {name}={value!r}"
        )
    return value


def choice(name, value, choices):
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        possible = ", ".join(repr(c) for c in choices)
        raise ValueError(
            f"Argument `{name}` must be one of {possible}. Received: {name}={value!r}"
        )
    return value


def synchronized(value):
    """Return `value` if it is a boolean that the backend supports."""
    if boolean("synchronized", value) and keras.backend.backend() == "torch":
        raise ValueError(
            "Argument `synchronized` must be False on the PyTorch backend, where "
            "statistics are those of each replica. Received: synchronized=True"
        )
    return value


def channels(layer, input_shape, known=True):
    """Return the size of `layer.axis` in `input_shape`."""
    rank = len(input_shape)
    if rank < 2:
        raise ValueError(
            f"Layer '{layer.name}' needs an input of rank 2 or more. "
            f"Received: input_shape={tuple(input_shape)}"
        )
    if not -rank <= layer.axis < rank:
        raise ValueError(
            f"Argument `axis` must be an axis of the input, {-rank} to {rank - 1}. "
            f"Received: axis={layer.axis} with input_shape={tuple(input_shape)}"
        )
    size = input_shape[layer.axis]
    if known and size is None:
        raise ValueError(
            "Argument `axis` must be an axis whose size is known. "
            f"Received: axis={layer.axis} with input_shape={tuple(input_shape)}"
        )
    return size


def broadcast_mask(mask, inputs, axis):
    """Return `mask` as a boolean tensor that broadcasts to `inputs`, of its rank.

    A mask of lower rank says which positions count: its axes are those of `inputs`
    without the channel axis. Where that does not fit, they are the leading axes of
    `inputs`, as in a mask over time steps when time itself is the channel axis.
    """
    if mask is None:
        return None
    rank, axis = len(inputs.shape), axis % len(inputs.shape)
    shape = tuple(ops.shape(mask))
    fill = (1,) * (rank - len(shape))
    candidates = [shape]
    if len(shape) < rank:
        at = min(axis, len(shape))
        candidates = [shape[:at] + (1,) + shape[at:] + fill[1:], shape + fill]
    for candidate in candidates:
        if len(candidate) == rank and _broadcasts(candidate, inputs.shape):
            return ops.reshape(ops.cast(mask, "bool"), candidate)
    raise ValueError(
        "Argument `mask` must have the shape of `inputs` without the channel axis, or "
        "broadcast to `inputs`. "
        f"Received: mask.shape={tuple(mask.shape)}, inputs.shape={tuple(inputs.shape)}"
    )


def _broadcasts(shape, target):
    """Whether `shape` can broadcast to `target`, as far as sizes are known."""
    return all(
        not isinstance(size, int) or not isinstance(full, int) or size in (1, full)
        for size, full in zip(shape, target)
    )
