"""Checks of arguments. Errors say which is wrong, what fits and what was received."""

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import constraints, initializers, ops, regularizers

from keras_norms._types import Constraint, Initializer, Regularizer, Shape, Tensor


def wrong(name: str, expected: str, value: object) -> ValueError:
    """Make the ValueError for an argument that must be something else."""
    return ValueError(
        f"Argument `{name}` must be {expected}. Received: {name}={shown(value)}"
    )


def shown(value: object) -> str:
    """Show a value in a message: `repr(value)`, where that is short."""
    try:
        text = repr(value)
    except Exception:  # Python prints no integer of more than 4300 digits.
        text = ""
    if text and len(text) <= 400:
        return text
    shape = getattr(value, "shape", None)
    of_shape = "" if shape is None else f" and shape {tuple(shape)}"
    return f"an object of class {type(value).__name__}{of_shape}"


_RELATIONS = {
    "above": ("greater than", operator.gt),
    "at_least": ("at least", operator.ge),
    "below": ("less than", operator.lt),
    "at_most": ("at most", operator.le),
}


def number(name: str, value: object, **limits: float) -> float:
    """Return `value` if it is a finite real number within limits of `_RELATIONS`."""
    return _within(limits, name, value, "a finite number", real(value))


def integer(name: str, value: Any, **limits: int) -> int:
    """Return `value` if it is an integer within limits of `_RELATIONS`."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    found = int(value) if is_integer else math.nan
    return _within(limits, name, value, "an integer", found)


def _within(limits, name, value, kind, found):
    expected, fits = [kind], -math.inf < found < math.inf
    for relation, limit in limits.items():
        words, compare = _RELATIONS[relation]
        fits = fits and compare(found, limit)
        expected.append(f"{words} {limit}")
    if not fits:
        raise wrong(name, ", ".join(expected), value)
    return found


def real(value: Any) -> float:
    """Return a real number as a float, `inf` where it is too large, or else `nan`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def boolean(name: str, value: object) -> bool:
    """Return `value` if it is a boolean."""
    if not isinstance(value, bool):
        raise wrong(name, "True or False", value)
    return value


def choice(name: str, value: Any, choices: Sequence) -> Any:
    """Return `value` if it is one of `choices`, strings and numbers."""
    # An array is compared by element.
    if not isinstance(value, (str, numbers.Real)) or value not in choices:
        raise wrong(name, f"one of {', '.join(map(repr, choices))}", value)
    return value


def initializer(name: str, value: Initializer) -> Initializer:
    """Return the initializer of Keras that `value` means."""
    found = _get(initializers.get, value)
    is_array = ops.is_tensor(value) or isinstance(value, (np.ndarray, np.generic))
    fills = not is_array or (value.shape and 0 not in value.shape and is_numeric(value))
    if not callable(found) or not fills:
        raise wrong(name, "an initializer, its name, or such a function", value)
    return found


def array(name: str, value: Tensor) -> np.ndarray:
    """Return `value`, array or tensor, as an array if it has elements, real numbers."""
    try:
        is_tensor = ops.is_tensor(value) or isinstance(value, keras.Variable)
        found = ops.convert_to_numpy(value) if is_tensor else np.asarray(value)
    except (TypeError, ValueError):  # Lists of lists of several lengths.
        found = np.asarray(None)
    if not found.size or not is_numeric(found):
        raise wrong(name, "an array of real numbers, with elements", value)
    return found


def is_numeric(array: Tensor) -> bool:
    """Whether elements of an array or tensor are real numbers or booleans."""
    try:
        dtype = keras.backend.standardize_dtype(array.dtype)
    except ValueError:  # Of text, objects, dates.
        return False
    return dtype.startswith(("bool", "int", "uint", "float", "bfloat"))


def regularizer(name: str, value: Regularizer) -> Regularizer:
    """Return the regularizer of Keras that `value` means, or `None`."""
    return _optional(name, value, regularizers.get, "a regularizer")


def constraint(name: str, value: Constraint) -> Constraint:
    """Return the constraint of Keras that `value` means, or `None`."""
    return _optional(name, value, constraints.get, "a constraint")


def _optional(name, value, get, kind):
    found = _get(get, value)
    if value is not None and not callable(found):
        raise wrong(name, f"{kind} of Keras, its name, or None", value)
    return found


def _get(get, value):
    try:
        return get(value)
    except Exception:  # A dictionary that is not a configuration raises many kinds.
        return None


def group_size(value: Any, synchronized: bool) -> int | None:
    """Return `value` if it is `None` or a number of samples."""
    if value is None:
        return None
    found = integer("group_size", value, at_least=1)
    if synchronized:
        raise ValueError(
            "Argument `group_size` must be None if `synchronized` is True. "
            f"Received: group_size={found} with synchronized=True"
        )
    return found


def channels(
    layer: keras.layers.Layer, input_shape: Shape, known: bool = True
) -> int | None:
    """Return the size of `layer.axis` in `input_shape`."""
    rank = len(input_shape)
    if rank < 2:
        raise ValueError(
            f"Layer '{layer.name}' needs an input of rank 2 or more. "
            f"Received: input_shape={tuple(input_shape)}"
        )
    expected = None
    if not -rank <= layer.axis < rank:
        expected = f"an axis of the input, {-rank} to {rank - 1}"
    elif known and input_shape[layer.axis] is None:
        expected = "an axis whose size is known"
    if expected:
        raise ValueError(
            f"Argument `axis` must be {expected}. "
            f"Received: axis={layer.axis} with input_shape={tuple(input_shape)}"
        )
    return input_shape[layer.axis]


def broadcast_mask(mask: Tensor | None, inputs: Tensor, axis: int) -> Tensor | None:
    """Return `mask` as a boolean tensor that broadcasts to `inputs`, of its rank.

    A mask of lower rank says which positions count: its axes are those of `inputs`
    without the channel axis. If that does not fit, they are the first axes of `inputs`,
    as in a mask over time steps when time is the channel axis.
    """
    if mask is None:
        return None
    rank, shape = len(inputs.shape), tuple(ops.shape(mask))
    ones = (1,) * (rank - len(shape))
    for at in (min(axis % rank, len(shape)), len(shape)):
        candidate = shape[:at] + ones[:1] + shape[at:] + ones[1:]
        if _broadcasts(candidate, inputs.shape):
            return ops.reshape(ops.cast(mask, "bool"), candidate)
    raise ValueError(
        "Argument `mask` must have the shape of `inputs` without the channel axis, or "
        "broadcast to `inputs`. "
        f"Received: mask.shape={tuple(mask.shape)}, inputs.shape={tuple(inputs.shape)}"
    )


def _broadcasts(shape, target):
    """Whether `shape`, of the same rank, can broadcast, as far as sizes are known."""
    return len(shape) == len(target) and all(
        not isinstance(size, int) or not isinstance(full, int) or size in (1, full)
        for size, full in zip(shape, target)
    )
