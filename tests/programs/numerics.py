"""Errors of the layers on hard inputs, beside those of keras.layers.BatchNormalization.

    KERAS_BACKEND=tensorflow python -m tests.programs.numerics --output=found.json

writes the largest errors of the output and of the gradient of the inputs against the
float64 references, in units of the largest value of the same channel, over three steps
on the same input, or one on each of a sequence, and over the ways in which the backend
runs a step; of large inputs, of one step in one way. What is not finite is null. The
inputs of WS, CWN and WN are kernels, a channel is a unit.
"""

import argparse
import copy
import functools
import itertools

import keras
import numpy as np

from benchmarks import compare
from keras_norms import CBN, LpNorm, NoisyBN
from keras_norms.ops import weight_norms
from tests.support.any_layer import QUIET
from tests.support.autodiff import MODES, training_step
from tests.support.backend import BACKEND, numpy
from tests.support.normalizations import built, expected_step, linear_loss
from tests.support.weight_reference import AsLayer, WeightReference

CHANNELS = 3
SHAPE = (64, 8, 8, CHANNELS)
RATE = 0.0078125  # exact in float32
STEPS = 3
# Eager, JAX compiles the same operations one by one.
WAYS = MODES[-1:] if BACKEND == "jax" else MODES


# Name -> mean and deviation of the inputs, and perhaps their shape and dtype.
POLICIES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
POLICIES |= {"float64": "float64"}
SCALES = "1e-18", "1e-9", "1e9", "1e17", "1e18"
CASES = {
    "mean 0, deviation 1": (0, 1),
    "mean / deviation = 1e2": (1e2, 1),
    "mean / deviation = 1e4": (1e4, 1),
    **{f"deviation {scale}": (float(scale), float(scale)) for scale in SCALES},
    "denormal": (0, 1e-41),
    "constant": (7.3, 0),
    "one sample": (1, 1, (1, CHANNELS)),
    **{dtype: (1, 1, SHAPE, dtype) for dtype in POLICIES},
}
LARGE = {
    "2^20 a channel": (1, 1, (256, 64, 64, CHANNELS)),
    "2^24 a channel": (1, 1, (4096, 64, 64, 1)),
    "10^6 rows": (1, 1, (10**6, CHANNELS)),
}
# Batches whose means and deviations are not those of the batches before.
SEQUENCES = {
    f"mean 0, then {jump:.0e}": [*[(0, 1)] * 4, *[(jump, 1)] * 2]
    for jump in (1e2, 1e3, 1e4)
} | {
    "mean 1e4, then 0": [*[(1e4, 1)] * 4, *[(0, 1)] * 2],
    "deviation 1, then 1e6": [*[(1, 1)] * 4, *[(1e6, 1e6)] * 2],
    "deviation 1e6, then 1": [*[(1e6, 1e6)] * 4, *[(1, 1)] * 2],
    "deviation 1 to 1e-5": [(1, 10.0**-k) for k in range(6)],
    "mean 0 and 1e2 in turns": [(0, 1), (1e2, 1)] * 3,
    "mean 3e4 once": [(0, 1), (3e4, 1), (0, 1)],
}


# Name -> layer and arguments.
BATCH = {
    "keras BN": (keras.layers.BatchNormalization, {}),
    "CBN": (CBN, {}),
    "CBN, ratio": (CBN, {"mean_gradient": "ratio"}),
    "CBN, coupled": (CBN, {"decouple": False}),
    "CBN, coupled, ratio": (CBN, {"decouple": False, "mean_gradient": "ratio"}),
    "NoisyBN": (NoisyBN, QUIET | {"seed": 0}),
}
LP_NORMS = {
    f"LpNorm {p}{', centered' * (of == 'centered')}": (LpNorm, {"p": p, "norm_of": of})
    for of in ("input", "centered")
    for p in (1, 2, np.inf)
}
WEIGHTS = {"WS": weight_norms.ws, "CWN": weight_norms.cwn, "WN": weight_norms.wn}
UNKNOWN = "CBN, rate unknown"
LAYERS = BATCH | {UNKNOWN: (CBN, {})} | LP_NORMS


def make(name, **more):
    layer, arguments = LAYERS[name]
    return layer(**arguments, **more)


def errors(name, case, mode=MODES[-1]):
    """Errors of output and of dx in each step, infinite where not finite: (steps, 2).

    Args:
        name: A key of `LAYERS` or `WEIGHTS`.
        case: A key of `CASES`, `LARGE` or `SEQUENCES`.
    """
    inputs, policy = _inputs(case), POLICIES.get(case, "float32")
    layer, start, *parts, g, step = _compiled(name, policy, inputs[0].shape, mode)
    if start:
        layer.set_weights(start)
    reference, *affine = copy.deepcopy(parts)
    rate, found = -1.0 if name == UNKNOWN else RATE, []
    for x in inputs:
        y, dx, *_ = step(x)
        x = x.astype("float64")
        expected, wanted, *_ = expected_step(reference, x, *affine, g, rate)
        found.append((_error(y, expected), _error(dx, wanted)))
    return np.array(found)


@functools.lru_cache(1)
def _inputs(case):
    rng = np.random.default_rng(0)

    def inputs(mean, deviation, shape=SHAPE, dtype="float32"):
        x = mean + deviation * rng.normal(size=shape)
        return numpy(keras.ops.cast(x, dtype))

    if case in SEQUENCES:
        return [inputs(*pair) for pair in SEQUENCES[case]]
    return [inputs(*(CASES | LARGE)[case])] * (1 if case in LARGE else STEPS)


@functools.cache
def _compiled(name, policy, shape, mode):
    """Layer, its weights, reference, gamma, beta, dy and a step for such inputs."""
    rng = np.random.default_rng(1)
    if name in WEIGHTS:
        axes, start = tuple(range(len(shape) - 1)), []
        layer = AsLayer(lambda w: keras.ops.cast(WEIGHTS[name](w, axes), w.dtype))
        reference = WeightReference(name.lower())
        reference.train = reference.forward
        parts = reference, np.ones(shape[-1]), axes
    else:
        layer, arguments = LAYERS[name]
        layer, *parts = built(shape, rng, layer, dtype=policy, **arguments)
        if isinstance(layer, CBN) and name != UNKNOWN:
            layer.set_learning_rate(RATE)
        start = layer.get_weights()
    g = rng.normal(size=shape).astype("float32")
    loss = linear_loss(g)
    step = training_step(layer, lambda y: loss(keras.ops.cast(y, "float32")), mode)
    return layer, start, *parts, g, step


def _error(found, expected):
    found = np.asarray(found).astype("float64")
    axes = tuple(range(expected.ndim - 1))
    size = np.abs(expected).max(axes)
    size = np.where(size > 0, size, 1)
    with np.errstate(invalid="ignore"):
        error = (np.abs(found - expected).max(axes) / size).max()
    return error if np.isfinite(error) else np.inf


def row(layer, case):
    """The largest errors of a layer on a case, as the report has them."""
    modes = WAYS[:2][-1:] if case in LARGE else WAYS
    largest = np.max([errors(layer, case, mode) for mode in modes], (0, 1))
    if case in LARGE:
        _compiled.cache_clear()
    # JSON has no infinity.
    values = [float(f"{e:.2g}") if np.isfinite(e) else None for e in largest]
    return {"layer": layer, "inputs": case, "output": values[0], "gradient": values[1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", help="A JSON file.")
    pairs = [*itertools.product(BATCH | LP_NORMS | WEIGHTS, CASES | LARGE)]
    for layer in ("WS", "CWN"):  # A unit of these has several weights.
        pairs.remove((layer, "one sample"))
    pairs += itertools.product(LAYERS, SEQUENCES)
    rows = [row(*pair) for pair in pairs]
    compare.report(parser.parse_args().output, "numerics", rows, ways=WAYS)
