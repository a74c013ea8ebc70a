"""Normalisation layers, forward and backward, against what Keras has.

    python -m benchmarks.layer                      # TensorFlow, as a graph
    KERAS_BACKEND=jax python -m benchmarks.layer
    python -m benchmarks.layer --kernels            # weight normalisations

Times a training call of each layer and its gradients with respect to the input and the
weights, moving statistics included. The yardstick is keras BatchNormalization; with
`--kernels`, a 3x3 convolution that keeps the number of channels is timed with and
without a normalised kernel. The candidates take turns, and other load on the machine
affects all of them. A ratio is the median over the rounds of time / the yardstick's
time in the same round, and its spread is the interquartile range. On a CPU there is
also the floor: the least time for the bytes that must move (forward: read x twice,
write y; backward: read x and the upstream gradient twice, write dx; all once if the
tensor fits into the last-level cache), at the copy bandwidth measured in the same run.

Prints a table; --output also writes it as JSON with versions and machine.
"""

import functools
import re
import statistics

import keras
import numpy as np
from absl import app, flags

from benchmarks import compare, machine, steps
from keras_norms import CWN, WN, WS, LpNorm, NoisyBN

_SHAPES = flags.DEFINE_list(
    "shapes",
    ["128x64", "128x1024", "32x8x8x64", "128x32x32x16", "128x32x32x64", "32x56x56x64"],
    "Input shapes, as 128x32x32x64.",
)
flags.register_validator(
    "shapes",
    lambda given: all(re.fullmatch(r"\d+(x\d+)+", text) for text in given),
    "must be like 128x64 or 128x32x32x64",
)
_AXIS = flags.DEFINE_integer(
    "axis", -1, "Channel axis of the shapes; 1 is channels first."
)
_GROUP_SIZE = flags.DEFINE_integer(
    "group_size",
    None,
    "Samples of a group with statistics of its own, in the norms of this package.",
    lower_bound=1,
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "Dtype of the activations."
)
_KERNELS = flags.DEFINE_bool("kernels", False, "Whether to time normalised kernels.")
_ROUNDS = flags.DEFINE_integer("rounds", 30, "Rounds to time.", lower_bound=4)
_JIT = flags.DEFINE_bool(
    "jit_compile",
    steps.BACKEND == "jax",
    "Whether the step is compiled by XLA (not PyTorch).",
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")
flags.register_multi_flags_validator(
    ["kernels", "axis"],
    lambda given: not given["kernels"] or given["axis"] == -1,
    "--kernels is for channels last",
)


def convolutions(channels):
    """Name -> function of the dtype that makes a layer; the first is the yardstick."""

    def convolution(dtype):
        return keras.layers.Conv2D(channels, 3, padding="same", dtype=dtype)

    return {
        "keras Conv2D": convolution,
        "WS(Conv2D)": lambda dtype: WS(convolution(dtype)),
        "CWN(Conv2D)": lambda dtype: CWN(convolution(dtype)),
        "WN(Conv2D)": lambda dtype: WN(convolution(dtype)),
    }


def norms():
    """The same for layers that normalise activations."""
    axis, yardstick = _AXIS.value, keras.layers.BatchNormalization
    layers = {"keras BatchNormalization": functools.partial(yardstick, axis=axis)}
    ours = {
        "CBN": steps.cbn,
        "LpNorm(1)": functools.partial(LpNorm, 1),
        "LpNorm(2)": functools.partial(LpNorm, 2),
        "LpNorm(inf)": functools.partial(LpNorm, "inf"),
        "NoisyBN": NoisyBN,
    }
    for name, make in ours.items():
        layers[name] = functools.partial(make, axis=axis, group_size=_GROUP_SIZE.value)
    if steps.BACKEND == "tensorflow" and axis == -1:
        layers["tf.nn.fused_batch_norm"] = fused_batch_norm
    return layers


def fused_batch_norm(dtype):
    """The fused operation with Keras's update of the moving statistics around it."""
    import tensorflow as tf

    class FusedBatchNorm(keras.layers.BatchNormalization):
        def call(self, inputs, training=None):
            shape = tf.shape(inputs)
            inputs = tf.reshape(inputs, (-1, 1, 1, inputs.shape[-1]))
            outputs, mean, variance = tf.compat.v1.nn.fused_batch_norm(
                inputs,
                self.gamma.value,
                self.beta.value,
                epsilon=self.epsilon,
                is_training=True,
            )
            moving = self.moving_mean, self.moving_variance
            for old, new in zip(moving, (mean, variance)):
                old.assign(old * self.momentum + new * (1 - self.momentum))
            return tf.reshape(outputs, shape)

    return FusedBatchNorm(dtype=dtype)


def measure(shape, dtype, rounds, copy_bandwidth, cache):
    """Time every candidate on one shape. Returns a list of rows."""
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=shape).astype("float32") for _ in range(2))
    policy = dtype if dtype == "float32" else f"mixed_{dtype}"
    candidates = convolutions(shape[-1]) if _KERNELS.value else norms()
    timers = {}
    for name, make in candidates.items():
        layer = make(dtype=policy)
        layer.build(shape)
        tensors = (keras.ops.cast(v, layer.compute_dtype) for v in (x, g))
        run = steps.training_step(layer, *tensors, _JIT.value)
        timers[name] = compare.timer(run, at_least=2e-3)
    times = compare.take_turns(timers, rounds)
    size = x.size * (4 if dtype == "float32" else 2)
    # A convolution is limited by arithmetic, so no floor is given.
    passes = 0 if _KERNELS.value else 8 if 3 * size > cache else 5
    return [
        {
            "shape": "x".join(map(str, shape)),
            "dtype": dtype,
            "layer": name,
            "milliseconds": 1e3 * statistics.median(measured),
            "floor_milliseconds": 1e3 * passes * size / copy_bandwidth,
            **compare.ratio(measured, times[next(iter(timers))]),
        }
        for name, measured in times.items()
    ]


def main(_):
    bandwidth = machine.copy_bandwidth()
    rows = []
    for text in _SHAPES.value:
        shape = tuple(map(int, text.split("x")))
        rows += measure(
            shape, _DTYPE.value, _ROUNDS.value, bandwidth, machine.cache_bytes()
        )
    compare.report(
        _OUTPUT.value,
        "layer",
        rows,
        axis=_AXIS.value,
        group_size=_GROUP_SIZE.value,
        jit_compile=_JIT.value,
        rounds=_ROUNDS.value,
        copy_gigabytes_per_second=bandwidth / 1e9,
    )


if __name__ == "__main__":
    app.run(main)
