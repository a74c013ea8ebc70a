"""CBN against keras BatchNormalization from a hundred elements to ten million.

    python -m benchmarks.sweep                      # TensorFlow, as a graph
    python -m benchmarks.sweep --jit_compile
    KERAS_BACKEND=jax python -m benchmarks.sweep    # or torch

Each takes about a minute on two idle cores. Times a training call with its gradients,
and a call at inference, of CBN with `decouple` true and false, for tensors of rank 2
and 4 and from 3 to 1,024 channels. The candidates take turns as in `benchmarks.layer`;
a ratio is the median over the rounds of CBN's time / BatchNormalization's time in the
same round. In a round a call is repeated until it takes two milliseconds.

Prints a table; --output also writes it as JSON with versions and machine.
"""

import math
import statistics

import keras
import numpy as np
from absl import app, flags

from benchmarks import compare, steps

_CHANNELS = (3, 64, 1024)
_FEWEST = 8  # elements per channel

_ROUNDS = flags.DEFINE_integer("rounds", 10, "Rounds to time.", lower_bound=4)
_JIT = flags.DEFINE_bool(
    "jit_compile",
    steps.BACKEND == "jax",
    "Whether the step is compiled by XLA (not PyTorch).",
)
_SMALLEST = flags.DEFINE_integer(
    "smallest", 10**2, "Elements of the smallest tensor.", lower_bound=100
)
_LARGEST = flags.DEFINE_integer(
    "largest", 10**7, "Elements of the largest tensor.", lower_bound=100
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")


def shapes(smallest, largest):
    """Shapes of rank 2 and 4, channels last, near each power of ten of elements."""
    for power in range(2, 9):
        for channels in _CHANNELS:
            count = 10**power // channels
            if not smallest <= 10**power <= largest or count < _FEWEST:
                continue
            yield 10**power, (count, channels)
            side = max(math.isqrt(count // 32), 2) if count >= 128 else 2
            yield 10**power, (count // side**2, side, side, channels)


CANDIDATES = {
    "bn": keras.layers.BatchNormalization,
    "decoupled": lambda: steps.cbn(decouple=True),
    "coupled": lambda: steps.cbn(decouple=False),
}
PHASES = "training", "inference"


def measure(shape, phase, rounds, jit_compile):
    """Time the candidates on one shape.

    Returns:
        Dict from their names to `milliseconds` and, except for the yardstick, `ratio`
        and `ratio_quartiles`.
    """
    rng = np.random.default_rng(0)
    x, g = (
        keras.ops.convert_to_tensor(rng.normal(size=shape), "float32") for _ in "xg"
    )
    timers = {}
    for name, make in CANDIDATES.items():
        layer = make()
        layer.build(shape)
        if phase == "training":
            run = steps.training_step(layer, x, g, jit_compile)
        else:
            run = steps.inference(layer, x, jit_compile)
        timers[name] = compare.timer(run, at_least=2e-3)
    times = compare.take_turns(timers, rounds)
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(measured),
            **(compare.ratio(measured, times["bn"]) if name != "bn" else {}),
        }
        for name, measured in times.items()
    }


def main(_):
    rows = []
    for phase in PHASES:
        for elements, shape in shapes(_SMALLEST.value, _LARGEST.value):
            timed = measure(shape, phase, _ROUNDS.value, _JIT.value)
            rows.append({"phase": phase, "elements": elements, "shape": shape, **timed})
            keras.utils.clear_session(free_memory=True)
    settings = {"jit_compile": _JIT.value, "rounds": _ROUNDS.value}
    compare.report(_OUTPUT.value, "sweep", rows, **settings)


if __name__ == "__main__":
    app.run(main)
