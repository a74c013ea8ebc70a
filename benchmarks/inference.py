"""What normalisation costs at inference, before and after `fold`.

    python -m benchmarks.inference                      # TensorFlow, as a graph
    KERAS_BACKEND=jax python -m benchmarks.inference

Each network is timed in five forms: without normalisation; with BatchNormalization and
with CBN; and both folded. The candidates take turns, so that whatever else the machine
does hits all of them; a ratio is the median over the rounds of time / time without
normalisation in the same round, and its spread is the interquartile range. All weights
of the norms are random, so that every shift is there that a trained network can have.

`resnet20` is the network of `recipes`, all of 3x3 convolutions: the worst case, since
each CBN leaves a shift before zero padding. The others are those of keras.applications,
converted; their form without normalisation is the folded BatchNormalization network, in
which no trace of it is left.

Prints a table; --output also writes it as JSON with versions and machine.
"""

import statistics
import warnings

import keras
import numpy as np
from absl import app, flags

from benchmarks import compare
from keras_norms.layers import layers_of
from keras_norms.surgery import convert, fold
from recipes.models import norms
from recipes.models.resnet import resnet

BACKEND = keras.backend.backend()
YARDSTICK = "no normalisation"

_NETWORKS = flags.DEFINE_list(
    "networks",
    ["resnet20:32:32", "ResNet50:96:4", "MobileNetV2:96:8"],
    "Networks as name:image size:batch size.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 30, "Rounds to time.", lower_bound=4)
_JIT = flags.DEFINE_bool(
    "jit_compile", BACKEND == "jax", "Whether XLA compiles the network (not PyTorch)."
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")


def randomize(model):
    """Random weights and statistics for all norms."""
    rng = np.random.default_rng(0)
    for weight in model.weights:
        shape = tuple(weight.shape)
        if weight.name in ("moving_mean", "beta"):
            weight.assign(rng.normal(0, 0.3, shape))
        elif weight.name in ("moving_variance", "moving_square", "gamma"):
            weight.assign(rng.uniform(0.5, 1.5, shape))
    return model


def forms(name, size):
    """The five networks by name, the yardstick first."""
    shape = (size, size, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name.startswith("resnet"):
            depth = int(name.removeprefix("resnet"))
            plain, bn, cbn = (
                randomize(resnet(depth, shape, 10, norms.get(norm), "relu"))
                for norm in ("none", "bn", "cbn")
            )
        else:
            make = getattr(keras.applications, name)
            bn = randomize(make(weights=None, input_shape=shape, classes=10))
            cbn = randomize(convert(bn, "cbn", preserve=False))
            plain = fold(bn)
        return {
            YARDSTICK: plain,
            "BatchNormalization": bn,
            "BatchNormalization, folded": fold(bn),
            "CBN": cbn,
            "CBN, folded": fold(cbn),
        }


def runner(model, x):
    """A function that runs the network once, to the end."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        call = tf.function(lambda x: model(x, training=False), jit_compile=_JIT.value)
        x = tf.constant(x)
        return lambda: call(x).numpy()
    if BACKEND == "jax":
        import jax

        trainable = [v.value for v in model.trainable_variables]
        others = [v.value for v in model.non_trainable_variables]

        def call(trainable, others, x):
            return model.stateless_call(trainable, others, x, training=False)[0]

        call, x = jax.jit(call) if _JIT.value else call, jax.numpy.asarray(x)
        return lambda: call(trainable, others, x).block_until_ready()
    import torch

    x = keras.ops.convert_to_tensor(x)

    def run():
        with torch.no_grad():
            y = model(x, training=False)
            if y.is_cuda:
                torch.cuda.synchronize()

    return run


def measure(name, size, batch, rounds):
    """Time every form of one network. Returns a list of rows."""
    models = forms(name, size)
    x = np.random.default_rng(1).uniform(-1, 1, (batch, size, size, 3))
    runs = {form: runner(model, x.astype("float32")) for form, model in models.items()}
    for run in runs.values():
        for _ in range(3):
            run()
    timers = {form: compare.timer(run) for form, run in runs.items()}
    times = compare.take_turns(timers, rounds)
    rows = []
    for form, measured in times.items():
        stay = [
            len(layers_of(models[form], cls))
            for cls in (keras.layers.BatchNormalization, keras.layers.Rescaling)
        ]
        rows.append(
            {
                "network": f"{name}, {batch} x {size}x{size}",
                "form": form,
                "milliseconds": 1e3 * statistics.median(measured),
                **compare.ratio(measured, times[YARDSTICK]),
                "shifts_that_stay": stay[1] if "folded" in form else 0,
            }
        )
    return rows


def main(_):
    rows = []
    for text in _NETWORKS.value:
        name, size, batch = text.split(":")
        rows += measure(name, int(size), int(batch), _ROUNDS.value)
        keras.utils.clear_session(free_memory=True)
    compare.report(
        _OUTPUT.value,
        "inference",
        rows,
        jit_compile=_JIT.value,
        rounds=_ROUNDS.value,
    )


if __name__ == "__main__":
    app.run(main)
