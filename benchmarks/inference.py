"""What normalisation costs at inference, before and after `fold`.

    python -m benchmarks.inference                      # TensorFlow, as a graph
    KERAS_BACKEND=jax python -m benchmarks.inference

Each network is timed in five forms: without normalisation; with BatchNormalization and
with CBN; and both folded. The candidates take turns, and other load on the machine
affects all of them. A ratio is the median over the rounds of time / time without
normalisation in the same round, and its spread is the interquartile range. All weights
of the norms are random, to have every shift that a trained network can have.

`resnet20` is the network of `recipes`, all of 3x3 convolutions: the worst case, since
each CBN leaves a shift before zero padding. The others are converted from
keras.applications; their form without normalisation is the folded BatchNormalization
network, which has no trace of it.

Prints a table; --output also writes it as JSON with versions and machine.
"""

import statistics
import warnings

import keras
import numpy as np
from absl import app, flags

from benchmarks import compare, networks, steps
from benchmarks.outputs import count, randomize
from keras_norms.surgery import convert, fold
from recipes.models import norms
from recipes.models.resnet import resnet

YARDSTICK = "no normalisation"


def forms(name, size):
    """The five networks by name, the yardstick first."""
    shape = (size, size, 3)
    with warnings.catch_warnings(action="ignore"):
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
            if left := count(plain, keras.layers.BatchNormalization):
                raise ValueError(
                    f"{name} has no form without normalisation to compare with: "
                    f"{left} of its norms do not fold."
                )
        return {
            YARDSTICK: plain,
            "BatchNormalization": bn,
            "BatchNormalization, folded": fold(bn),
            "CBN": cbn,
            "CBN, folded": fold(cbn),
        }


def shifts_that_stay(models, form):
    """How many `Rescaling` layers `fold` left in a form of the network."""
    original = models[form.removesuffix(", folded")]
    rescaling = keras.layers.Rescaling
    return count(models[form], rescaling) - count(original, rescaling)


def measure(name, size, batch, *, jit_compile, rounds):
    """Time every form of one network. Returns a list of rows."""
    models = forms(name, size)
    x = np.random.default_rng(1).uniform(-1, 1, (batch, size, size, 3))
    x = keras.ops.convert_to_tensor(x, "float32")
    timers = {
        form: compare.timer(steps.inference(model, x, jit_compile))
        for form, model in models.items()
    }
    times = compare.take_turns(timers, rounds)
    return [
        {
            "network": f"{name}, {batch} x {size}x{size}",
            "form": form,
            "milliseconds": 1e3 * statistics.median(measured),
            **compare.ratio(measured, times[YARDSTICK]),
            "shifts_that_stay": shifts_that_stay(models, form),
        }
        for form, measured in times.items()
    ]


def exists(name):
    """Whether a network is one of `recipes` or of keras.applications."""
    # A name in lower case may be that of a module there.
    return name.startswith("resnet") or callable(getattr(keras.applications, name, 0))


def define_flags():
    flags.DEFINE_list(
        "networks",
        ["resnet20:32:32", "ResNet50:96:4", "MobileNetV2:96:8"],
        "Networks as name:image size:batch size.",
    )
    networks.check_flag("networks", any_name=True)
    flags.register_validator(
        "networks",
        lambda given: all(exists(text.partition(":")[0]) for text in given),
        "must have names of keras.applications, or resnet and a depth",
    )
    flags.DEFINE_integer("rounds", 30, "Rounds to time.", lower_bound=4)
    flags.DEFINE_bool(
        "jit_compile",
        steps.BACKEND == "jax",
        "Whether XLA compiles the network (not PyTorch).",
    )
    flags.DEFINE_string("output", None, "JSON file to write.")


def main(_):
    values = flags.FLAGS
    settings = {"jit_compile": values.jit_compile, "rounds": values.rounds}
    rows = []
    for text in values.networks:
        rows += measure(*networks.parse(text, any_name=True), **settings)
        keras.utils.clear_session(free_memory=True)
    compare.report(values.output, "inference", rows, **settings)


if __name__ == "__main__":
    define_flags()
    app.run(main)
