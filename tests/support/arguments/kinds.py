"""Kinds of arguments: which values of a pool of all sorts fit, and which do not."""

import math
import numbers
from typing import Any, NamedTuple

import numpy as np

NAN, INF = math.nan, math.inf
POOL = [None, "no_such", "", b"bytes", True, False, 0, 1, -1, 2, 0.5, -0.5, 1.5, 1e30]
POOL += [NAN, INF, -INF, 10**400, -(10**400), 10**5000, 1j, object(), object, len]
POOL += [[], [None], [1.0], ["no_such"], (), (1, 2), (0.5, NAN), {}, {"a": 1}, set()]
POOL += [np.float32(NAN), np.array(1.0), np.array([1.0, 2.0]), np.array([NAN, NAN])]
POOL += [np.array([]), np.array(["a"]), np.array([None, {}]), np.array([1j, 2j])]
POOL += [np.ones((2, 3, 4)), np.ones(1000)]
# One of each kind.
FEW = [None, "no_such", object(), -1, NAN, [None], np.array([NAN, NAN])]


class Argument(NamedTuple):
    """A predicate that says which values of `POOL` fit, and more that do not."""

    fits: Any
    wrong: tuple = ()

    def refuses(self, *wrong):
        return self._replace(wrong=(*self.wrong, *wrong))

    def or_none(self):
        return self._replace(fits=lambda v: v is None or self.fits(v))


def is_real(v):
    return isinstance(v, numbers.Real) and not isinstance(v, bool)


def is_integer(v):
    return isinstance(v, numbers.Integral) and not isinstance(v, bool)


def is_array(v, *ndim):
    """Whether it is an array of numbers with elements, of one of the ranks."""
    fits = isinstance(v, np.ndarray) and v.dtype.kind in "biuf" and v.size > 0
    return fits and v.ndim in ndim


def like_array(v, *ndim):
    """Whether NumPy makes such an array of it."""
    try:
        return is_array(np.asarray(v), *ndim)
    except ValueError:  # lists of several lengths
        return False


def is_vector(v):
    return like_array(v, 1) and bool(np.all(np.isfinite(np.asarray(v))))


def is_pair(v):
    """Whether it is a tuple of two positive numbers in order."""
    is_tuple = isinstance(v, tuple) and len(v) == 2 and all(map(is_real, v))
    return is_tuple and 0 < v[0] < v[1] < INF


def integer(least=-INF, most=INF):
    return Argument(lambda v: is_integer(v) and least <= v <= most)


def number(above=-INF, least=-INF, most=INF, below=INF):
    def fits(v):
        if not is_real(v):
            return False
        try:
            v = float(v)
        except OverflowError:
            return False
        return math.isfinite(v) and above < v < below and least <= v <= most

    return Argument(fits)


def choice(*values):
    return Argument(lambda v: isinstance(v, (str, int, float)) and v in values)


# None of the pool: layers, models, structures of arrays.
NEVER = Argument(lambda v: False)
ONLY_NONE = Argument(lambda v: v is None)
TEXT = Argument(lambda v: isinstance(v, str))
SWITCH = Argument(lambda v: isinstance(v, bool))
POSITIVE, NOT_NEGATIVE = number(above=0), number(least=0)
COUNT = integer(1)
# What a function takes, nobody knows before it is called.
FUNCTION = Argument(lambda v: v is len or v is object)
INITIALIZER = Argument(lambda v: v is len or is_array(v, 1, 2, 3))
OPTIONAL_OBJECT = Argument(lambda v: v is None or v is len)
VECTOR = Argument(is_vector)
ANY_RANK = Argument(lambda v: like_array(v, 1, 2, 3))
VARYING = Argument(lambda v: is_vector(v) and np.ptp(np.asarray(v, "float64")) > 0)
