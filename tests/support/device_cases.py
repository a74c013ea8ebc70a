"""Layers that must do on many devices what they do on one."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import keras
import numpy as np

from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from tests.support.any_layer import QUIET

FEATURES = (5, 3)


class Case(NamedTuple):
    """How a layer is made: `make(synchronized=...)`, with `synchronized` if it knows.

    `error` bounds what outputs and their gradients may differ by, where they have 16
    bits and a last digit may be rounded otherwise.
    """

    make: Callable
    masked: bool = False
    error: float = 1e-5
    collectives: tuple = (2, 2)


def cbn(rate=0.02, **kwargs):
    layer = CBN(beta_initializer=keras.initializers.Constant(0.3), **kwargs)
    layer.set_learning_rate(rate)
    return layer


def fused(synchronized):
    dense = keras.layers.Dense(4, kernel_initializer=ramp)
    return FusedCBN(dense, cbn(synchronized=synchronized))


def ramp(shape, dtype=None):
    size = int(np.prod(shape))
    values = np.sin(np.arange(1, size + 1)).reshape(shape)
    return keras.ops.convert_to_tensor(values, dtype)


def wrapped(wrapper, synchronized):
    return wrapper(keras.layers.Dense(4, kernel_initializer=ramp))


def in_groups(make):
    """Of two samples, with which no device waits for another but for averages."""
    return lambda synchronized: make(group_size=2)


quiet_bn = partial(NoisyBN, seed=1, **QUIET)
lp = partial(LpNorm, epsilon=0.1)
half = 2**-7  # two units in the last place of bfloat16

CASES = {
    "cbn": Case(cbn),
    "cbn, ratio": Case(partial(cbn, mean_gradient="ratio")),
    "cbn, coupled": Case(partial(cbn, decouple=False)),
    "cbn, coupled, ratio": Case(partial(cbn, decouple=False, mean_gradient="ratio")),
    "cbn, rate unknown": Case(partial(cbn, rate=-1)),
    "cbn, masked": Case(cbn, masked=True),
    "cbn, ratio, masked": Case(partial(cbn, mean_gradient="ratio"), masked=True),
    "cbn, bfloat16": Case(partial(cbn, dtype="mixed_bfloat16"), error=half),
    "fused": Case(fused),
    "fused, masked": Case(fused, masked=True),
    "noisy": Case(quiet_bn),
    "noisy, masked": Case(quiet_bn, masked=True),
    "lp 1": Case(partial(lp, 1)),
    "lp 1, centered": Case(partial(lp, 1, norm_of="centered"), collectives=(3, 3)),
    "lp 2, masked": Case(lp, masked=True),
    "lp 2, centered": Case(partial(lp, norm_of="centered")),
    "lp 3": Case(partial(lp, 3), collectives=(2, 3)),
    "lp 3, centered, masked": Case(
        partial(lp, 3, norm_of="centered"), masked=True, collectives=(3, 4)
    ),
    "lp inf": Case(partial(lp, np.inf), collectives=(2, 3)),
    "lp inf, centered, masked": Case(
        partial(lp, np.inf, norm_of="centered"), masked=True, collectives=(2, 3)
    ),
    "ws": Case(partial(wrapped, WS), collectives=(0, 1)),
    "cwn": Case(partial(wrapped, CWN), collectives=(0, 1)),
    "wn": Case(partial(wrapped, WN), collectives=(0, 1)),
}
if keras.backend.backend() == "jax":
    # A replica of TensorFlow has no part in the groups of another.
    CASES |= {
        "cbn, groups": Case(in_groups(cbn), collectives=(0, 1)),
        "cbn, groups, masked": Case(in_groups(cbn), masked=True, collectives=(0, 1)),
        "noisy, groups": Case(in_groups(quiet_bn), collectives=(0, 1)),
        "lp 3, groups": Case(in_groups(partial(lp, 3)), collectives=(0, 1)),
    }


def data(case, batch):
    """Input, upstream gradient and, if the case has one, mask."""
    rng = np.random.default_rng(0)
    x = (2 * rng.normal(size=(batch, *FEATURES)) + 1).astype("float32")
    x[-1] = -x[0]  # the maximum is attained in two places, on two devices
    upstream = rng.normal(size=(batch, *FEATURES[:-1], 4)).astype("float32")
    mask = rng.normal(size=(batch, *FEATURES[:-1])) > 0
    return x, upstream, *([mask] if case.masked else [])


def build(case, batch, synchronized=False):
    layer = case.make(synchronized=synchronized)
    layer.build((batch, *FEATURES))
    return layer


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def errors(actual, expected):
    """The largest difference of each pair of arrays, relative to the largest element.

    Args:
        actual, expected: Dicts of lists of arrays.
    """
    assert actual.keys() == expected.keys()
    return {
        key: max(map(_error, actual[key], expected[key]), default=0.0)
        for key in expected
    }


def _error(actual, expected):
    actual, expected = (np.asarray(a, "float64") for a in (actual, expected))
    assert actual.shape == expected.shape
    largest = np.abs(expected).max(initial=0)
    return float(np.abs(actual - expected).max(initial=0) / (largest or 1))
