"""Errors of the layers on hard inputs, beside those of keras.layers.BatchNormalization.

    KERAS_BACKEND=tensorflow python -m tests.numerics

prints a table for the backend: the largest errors of the output and of the gradient
with respect to the inputs against the float64 references, in units of the largest value
of the same channel, over training steps on the same input.
"""

import keras
import numpy as np

from keras_norms import CBN, LpNorm, NoisyBN
from tests.autodiff import MODES, training_step
from tests.batch_reference import BatchNormReference, LpNormReference
from tests.reference import CBNReference

CHANNELS = 3
SHAPE = (64, 8, 8, CHANNELS)
RATE = 0.0078125  # exact in float32
STEPS = 3
MODE = "graph" if "graph" in MODES else MODES[-1]


def _normal(mean=0.0, std=1.0, shape=SHAPE, dtype="float32"):
    def make(rng):
        x = mean + std * rng.normal(size=shape)
        return keras.ops.convert_to_numpy(keras.ops.cast(x, dtype))

    return make


# Name -> (function of a generator that returns inputs, dtype policy of the layer).
CASES = {
    "mean 0, deviation 1": (_normal(), "float32"),
    "mean / deviation = 1e2": (_normal(1e2), "float32"),
    "mean / deviation = 1e4": (_normal(1e4), "float32"),
    "deviation 1e-18": (_normal(1e-18, 1e-18), "float32"),
    "deviation 1e-9": (_normal(1e-9, 1e-9), "float32"),
    "deviation 1e9": (_normal(1e9, 1e9), "float32"),
    "deviation 1e18": (_normal(1e18, 1e18), "float32"),
    "denormal": (_normal(0, 1e-41), "float32"),
    "constant": (_normal(7.3, 0), "float32"),
    "one sample": (_normal(1, 1, (1, CHANNELS)), "float32"),
    "float16": (_normal(1, dtype="float16"), "mixed_float16"),
    "bfloat16": (_normal(1, dtype="bfloat16"), "mixed_bfloat16"),
    "float64": (_normal(1, dtype="float64"), "float64"),
}
LARGE = {
    "2^20 a channel": (_normal(1, 1, (256, 64, 64, CHANNELS)), "float32"),
    "2^24 a channel": (_normal(1, 1, (4096, 64, 64, 1)), "float32"),
}


def _without_noise(**arguments):
    return NoisyBN(
        mean_range=0, scale_range=1, mean_jitter=0, scale_jitter=0, **arguments
    )


# Name -> (function of keyword arguments that makes a layer, reference of channels).
KERAS = "BatchNormalization"
LAYERS = {
    KERAS: (keras.layers.BatchNormalization, BatchNormReference),
    "CBN": (CBN, CBNReference),
    "CBN, coupled": (
        lambda **arguments: CBN(decouple=False, **arguments),
        lambda channels: CBNReference(channels, decouple=False),
    ),
    "NoisyBN": (_without_noise, BatchNormReference),
    "LpNorm 1": (
        lambda **arguments: LpNorm(p=1, **arguments),
        lambda channels: LpNormReference(channels, p=1),
    ),
    "LpNorm 2": (LpNorm, LpNormReference),
    "LpNorm inf": (
        lambda **arguments: LpNorm(p=np.inf, **arguments),
        lambda channels: LpNormReference(channels, p=np.inf),
    ),
}


def errors(layer, case, steps=STEPS, mode=MODE):
    """The errors of a layer on an input.

    Args:
        layer: A key of `LAYERS`.
        case: A key of `CASES` or `LARGE`.
        steps: How many training steps.
        mode: See `tests.autodiff`.

    Returns:
        Array `(steps, 2)`: errors of the output and of the gradient with respect to the
        inputs, infinite where these are not finite.
    """
    rng = np.random.default_rng(0)
    make_input, policy = (CASES | LARGE)[case]
    x = make_input(rng)
    make_layer, make_reference = LAYERS[layer]
    layer, reference = make_layer(dtype=policy), make_reference(x.shape[-1])
    layer.build((None, *x.shape[1:]))
    gamma, beta = rng.normal(1, 0.3, x.shape[-1]), rng.normal(0, 0.3, x.shape[-1])
    gamma, beta = (np.float64(np.float32(v)) for v in (gamma, beta))
    layer.gamma.assign(gamma)
    layer.beta.assign(beta)
    if isinstance(layer, CBN):
        layer.set_learning_rate(RATE)
    g = rng.normal(size=x.shape).astype("float32")
    slope = keras.ops.convert_to_tensor(g)

    def loss(y):
        return keras.ops.sum(keras.ops.cast(y, "float32") * slope)

    step = training_step(layer, loss, mode)
    wide = x.astype("float64")
    found = []
    for _ in range(steps):
        y, dx, *_ = step(x)
        expected, wanted = _reference_step(reference, wide, gamma, beta, g)
        found.append((_error(y, expected), _error(dx, wanted)))
    return np.array(found)


def _reference_step(reference, x, gamma, beta, g):
    if isinstance(reference, CBNReference):
        y, constants = reference.train(x, gamma, beta, RATE)
        return y, reference.gradients(g, x, gamma, beta, constants)[0]
    y = reference.train(x, gamma, beta)
    return y, reference.gradients(g, x, gamma, beta)[0]


def _error(found, expected):
    found = np.asarray(found).astype("float64")
    axes = tuple(range(expected.ndim - 1))
    size = np.abs(expected).max(axes)
    size = np.where(size > 0, size, 1)
    with np.errstate(invalid="ignore"):
        error = (np.abs(found - expected).max(axes) / size).max()
    return error if np.isfinite(error) else np.inf


def main():
    """Prints a Markdown table: rows are inputs, columns layers."""
    print(f"{keras.backend.backend()}, {MODE}\n")
    print(f"| inputs | {' | '.join(LAYERS)} |")
    print(f"|---|{'---|' * len(LAYERS)}")
    for case in CASES | LARGE:
        worst = (errors(layer, case).max(0) for layer in LAYERS)
        cells = (f"{output:.0e}, {gradient:.0e}" for output, gradient in worst)
        print(f"| {case} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
