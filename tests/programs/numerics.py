"""Errors of the layers on hard inputs, beside those of keras.layers.BatchNormalization.

    KERAS_BACKEND=tensorflow python -m tests.programs.numerics

prints tables in Markdown for the backend. A cell has the largest errors of the output
and of the gradient with respect to the inputs against the float64 references, in units
of the largest value of the same channel, over three training steps on the same input,
or one on each of a sequence, and over the ways in which the backend runs a step (on
TensorFlow eager, graph and jit_compile); of the large inputs, of one step in one way.
The inputs of WS, CWN and WN are kernels, a channel is a unit.
"""

import functools
import os
import platform

import keras
import numpy as np

from keras_norms import CBN, LpNorm, NoisyBN
from keras_norms.ops import spheres
from tests.support.autodiff import MODES, training_step
from tests.support.backend import BACKEND, numpy
from tests.support.batch_reference import BatchNormReference, LpNormReference
from tests.support.cbn_reference import CBNReference
from tests.support.normalizations import expected_step, linear_loss
from tests.support.weight_reference import AsLayer, WeightReference

CHANNELS = 3
SHAPE = (64, 8, 8, CHANNELS)
RATE = 0.0078125  # exact in float32
STEPS = 3
# Eager, JAX compiles the same operations one by one.
WAYS = MODES[-1:] if BACKEND == "jax" else MODES


# Name -> mean and deviation of the inputs, their shape and dtype.
CASES = {
    "mean 0, deviation 1": (0, 1, SHAPE, "float32"),
    "mean / deviation = 1e2": (1e2, 1, SHAPE, "float32"),
    "mean / deviation = 1e4": (1e4, 1, SHAPE, "float32"),
    "deviation 1e-18": (1e-18, 1e-18, SHAPE, "float32"),
    "deviation 1e-9": (1e-9, 1e-9, SHAPE, "float32"),
    "deviation 1e9": (1e9, 1e9, SHAPE, "float32"),
    "deviation 1e17": (1e17, 1e17, SHAPE, "float32"),
    "deviation 1e18": (1e18, 1e18, SHAPE, "float32"),
    "denormal": (0, 1e-41, SHAPE, "float32"),
    "constant": (7.3, 0, SHAPE, "float32"),
    "one sample": (1, 1, (1, CHANNELS), "float32"),
    "float16": (1, 1, SHAPE, "float16"),
    "bfloat16": (1, 1, SHAPE, "bfloat16"),
    "float64": (1, 1, SHAPE, "float64"),
}
LARGE = {
    "2^20 a channel": (1, 1, (256, 64, 64, CHANNELS), "float32"),
    "2^24 a channel": (1, 1, (4096, 64, 64, 1), "float32"),
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


def policy(case):
    """The dtype policy of a layer for inputs of a case."""
    dtype = (CASES | LARGE)[case][-1] if case not in SEQUENCES else "float32"
    return f"mixed_{dtype}" if "float16" in dtype else dtype


def _pair(layer, reference, **form):
    return functools.partial(layer, **form), functools.partial(reference, **form)


def _weights(kind):
    """The map of kernels of WS, CWN or WN in the place of a layer."""

    def make(dtype):
        def normalize(w):
            axes = tuple(range(len(w.shape) - 1))
            return keras.ops.cast(getattr(spheres, kind)(w, axes), w.dtype)

        return AsLayer(normalize)

    return make, lambda channels: WeightReference(kind)


# Name -> (function of keyword arguments that makes a layer, reference of channels).
KERAS = "keras BN"
QUIET = {"mean_range": 0, "scale_range": 1, "mean_jitter": 0, "scale_jitter": 0}
BATCH = {
    KERAS: (keras.layers.BatchNormalization, BatchNormReference),
    "CBN": (CBN, CBNReference),
    "CBN, ratio": _pair(CBN, CBNReference, mean_gradient="ratio"),
    "CBN, coupled": _pair(CBN, CBNReference, decouple=False),
    "CBN, coupled, ratio": _pair(
        CBN, CBNReference, decouple=False, mean_gradient="ratio"
    ),
    "NoisyBN": (functools.partial(NoisyBN, **QUIET, seed=0), BatchNormReference),
}
LP_NORMS = {
    f"LpNorm {p}{', centered' * (of == 'centered')}": _pair(
        LpNorm, LpNormReference, p=p, norm_of=of
    )
    for of in ("input", "centered")
    for p in (1, 2, np.inf)
}
WEIGHTS = {kind.upper(): _weights(kind) for kind in ("ws", "cwn", "wn")}
UNKNOWN_RATE = {"CBN, rate unknown": BATCH["CBN"]}
LAYERS = BATCH | UNKNOWN_RATE | LP_NORMS | WEIGHTS


def errors(layer, case, steps=STEPS, mode=MODES[-1]):
    """Errors of output and of dx in each step, infinite where not finite: (steps, 2).

    Args:
        layer: A key of `LAYERS`.
        case: A key of `CASES`, `LARGE` or `SEQUENCES`, which have steps of their own.
    """
    inputs = _inputs(case, steps)
    shape = inputs[0].shape
    gamma, beta, g = _affine_and_slope(shape)
    reference = LAYERS[layer][1](shape[-1])
    rate = -1.0 if layer in UNKNOWN_RATE else RATE
    norm, start, step = _step(layer, policy(case), shape, mode, rate)
    if start:
        norm.set_weights(start)
    found = []
    for x in inputs:
        y, dx, *_ = step(x)
        expected = _reference_step(reference, x.astype("float64"), gamma, beta, g, rate)
        found.append((_error(y, expected[0]), _error(dx, expected[1])))
    return np.array(found)


@functools.lru_cache(1)
def _inputs(case, steps):
    rng = np.random.default_rng(0)

    def inputs(mean, deviation, shape=SHAPE, dtype="float32"):
        x = mean + deviation * rng.normal(size=shape)
        return numpy(keras.ops.cast(x, dtype))

    if case in SEQUENCES:
        return [inputs(*pair) for pair in SEQUENCES[case]]
    return [inputs(*(CASES | LARGE)[case])] * steps


@functools.lru_cache(1)
def _affine_and_slope(shape):
    """gamma, beta and the gradient with respect to the output."""
    rng = np.random.default_rng(1)
    gamma, beta = rng.normal(1, 0.3, shape[-1]), rng.normal(0, 0.3, shape[-1])
    gamma, beta = (np.float64(np.float32(v)) for v in (gamma, beta))
    return gamma, beta, rng.normal(size=shape).astype("float32")


@functools.cache
def _step(name, policy, shape, mode, rate):
    """A layer, its weights, and its training step, compiled once for such inputs."""
    layer = LAYERS[name][0](dtype=policy)
    gamma, beta, g = _affine_and_slope(shape)
    if name not in WEIGHTS:
        layer.build((None, *shape[1:]))
        layer.gamma.assign(gamma)
        layer.beta.assign(beta)
    if isinstance(layer, CBN):
        layer.set_learning_rate(rate)
    start = [] if name in WEIGHTS else layer.get_weights()
    loss = linear_loss(g)
    step = training_step(layer, lambda y: loss(keras.ops.cast(y, "float32")), mode)
    return layer, start, step


def _reference_step(reference, x, gamma, beta, g, rate):
    if isinstance(reference, WeightReference):
        axes, gain = tuple(range(x.ndim - 1)), np.ones(x.shape[-1])
        y = reference.forward(x, gain, axes)
        return y, reference.gradients(g, x, gain, axes)[0]
    return expected_step(reference, x, gamma, beta, g, rate)[:2]


def _error(found, expected):
    found = np.asarray(found).astype("float64")
    axes = tuple(range(expected.ndim - 1))
    size = np.abs(expected).max(axes)
    size = np.where(size > 0, size, 1)
    with np.errstate(invalid="ignore"):
        error = (np.abs(found - expected).max(axes) / size).max()
    return error if np.isfinite(error) else np.inf


def _table(layers, cases):
    print(f"\n| inputs | {' | '.join(layers)} |\n|---|{'---|' * len(layers)}")
    for case in cases:
        cells = []
        for layer in layers:
            if case == "one sample" and layer in ("WS", "CWN"):
                cells.append("")  # A unit of these has several weights.
                continue
            modes, steps = (WAYS[:2][-1:], 1) if case in LARGE else (WAYS, STEPS)
            found = [errors(layer, case, steps, mode) for mode in modes]
            if case in LARGE:
                _step.cache_clear()
            cells.append("{:.0e}, {:.0e}".format(*np.max(found, (0, 1))))
        print(f"| {case} | {' | '.join(cells)} |", flush=True)


def main():
    version = __import__(BACKEND).__version__
    print(
        f"{BACKEND} {version} ({', '.join(WAYS)}), Keras {keras.__version__}, "
        f"NumPy {np.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    for layers in (BATCH, LP_NORMS, WEIGHTS):
        _table(layers, CASES | LARGE)
    for layers in (BATCH | UNKNOWN_RATE, LP_NORMS):
        _table(layers, SEQUENCES)


if __name__ == "__main__":
    main()
