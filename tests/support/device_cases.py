"""Layers that must do the same on many devices as on one."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import keras
import numpy as np

from benchmarks import compare
from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from tests.support.any_layer import QUIET

FEATURES = (5, 3)


class Case(NamedTuple):
    """How a layer is made: `make(synchronized=...)`, with `synchronized` if it knows.

    `error` bounds the difference of outputs and their gradients if they have 16 bits,
    where the last digit may be rounded differently.
    """

    make: Callable
    masked: bool = False
    error: float = 1e-5
    collectives: tuple = (2, 2)


def cbn(rate=0.02, **kwargs):
    """A layer that knows its learning rate."""
    layer = CBN(beta_initializer=keras.initializers.Constant(0.3), **kwargs)
    layer.set_learning_rate(rate)
    return layer


def dense():
    uniform = keras.initializers.RandomUniform(-1, 1, seed=0)
    return keras.layers.Dense(4, kernel_initializer=uniform)


def fused(synchronized):
    return FusedCBN(dense(), cbn(synchronized=synchronized))


def in_groups(make):
    """Groups of two samples: devices wait for each other only for the averages."""
    return lambda synchronized: make(group_size=2)


quiet_bn = partial(NoisyBN, seed=1, **QUIET)
lp = partial(LpNorm, epsilon=0.1)
centered = partial(lp, norm_of="centered")
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
    "lp 1, centered": Case(partial(centered, 1), collectives=(3, 3)),
    "lp 2, masked": Case(lp, masked=True),
    "lp 2, centered": Case(centered),
    "lp 3": Case(partial(lp, 3), collectives=(2, 3)),
    "lp 3, centered, masked": Case(partial(centered, 3), True, collectives=(3, 4)),
    "lp inf": Case(partial(lp, np.inf), collectives=(2, 3)),
    "lp inf, centered, masked": Case(partial(centered, np.inf), True, 1e-5, (2, 3)),
    "ws": Case(lambda synchronized: WS(dense()), collectives=(0, 1)),
    "cwn": Case(lambda synchronized: CWN(dense()), collectives=(0, 1)),
    "wn": Case(lambda synchronized: WN(dense()), collectives=(0, 1)),
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


def errors(actual, expected):
    """The largest difference of arrays in dicts of lists, relative to the largest."""

    def error(a, b):
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        assert a.shape == b.shape
        return np.abs(a - b).max(initial=0) / (np.abs(b).max(initial=0) or 1)

    pairs = {key: zip(actual[key], b, strict=True) for key, b in expected.items()}
    return {key: max((error(*p) for p in of), default=0.0) for key, of in pairs.items()}


def check_noise(noisy):
    """Noise per element differs between devices; noise per channel is the same.

    `noisy(make, x)` is a layer's output on two devices that have the same input.
    """
    x = data(CASES["noisy"], 6)[0]
    for jitter in (0.1, 0.0):
        make = partial(NoisyBN, seed=3, mean_jitter=jitter, scale_jitter=jitter)
        first, second = noisy(make, x)
        apart = np.abs(first - second).max()
        assert apart > 0.1 if jitter else apart < 1e-5, apart


def main(compared, sizes, *checks):
    """Prints the errors of the cases that arguments name, as JSON, or writes a report.

    `compared(case, *size)` returns a dict of numbers for each of `sizes[name]`, or else
    `sizes[None]`; a size begins with the number of devices. If neither cases nor a
    report are requested, `checks` are called too.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--output")
    names, output = vars(parser.parse_args()).values()
    cases = {"keras BN": Case(keras.layers.BatchNormalization)} if output else {}
    cases |= {name: CASES[name] for name in names or CASES}
    rows = [
        {"layer": name, "devices": size[0], **compared(case, *size)}
        for name, case in cases.items()
        for size in sizes.get(name, sizes[None])
    ]
    if output:
        compare.report(output, "devices", rows)
        return
    for check in () if names else checks:
        check()
    print(json.dumps(rows))
