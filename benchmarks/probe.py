"""What LandscapeProbe costs in training, as a share of the time without it.

    python -m benchmarks.probe                      # TensorFlow, as a graph
    KERAS_BACKEND=jax python -m benchmarks.probe

ResNet-20 on 32x32x3 images is trained with `fit` for a few steps, in turns without and
with a probe before the first of them; other load on the machine affects both. A probe
costs the difference, including moving state back and forth; with
`LandscapeProbe(every=N)` the cost is spread over N steps:

    share = (seconds with - seconds without) / (N * seconds of a step)

The seconds of a step are those of a `fit`, minus those of a `fit` of one step, divided
by the difference in steps: what `fit` does only once does not count.

The share is the median over the rounds, its spread the interquartile range. The probe
has the batch size of training and its default 8 points, which take 9 gradients.
Compilation is timed separately: the first probe minus the median one.

Prints a table; --output also writes it as JSON with versions and machine.
"""

import statistics
import time

import keras
import numpy as np
from absl import app, flags

from benchmarks import compare, networks, training
from keras_norms.diagnostics import LandscapeProbe

_NORMS = compare.define_names("norms", ["bn", "cbn"], networks.ALL_NORMS)
_BATCH = flags.DEFINE_integer(
    "batch_size", 128, "Images, of a step and the probe.", lower_bound=1
)
_EVERY = flags.DEFINE_integer(
    "every", 200, "Steps from one probe to the next.", lower_bound=1
)
_STEPS = flags.DEFINE_integer("steps", 10, "Steps of one fit.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 8, "Rounds to time.", lower_bound=4)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")


def measure(norm):
    """Time training of one network with and without a probe. Returns a row."""
    keras.utils.set_random_seed(0)
    model = training.compile_model(networks.build("resnet20", norm))
    rng = np.random.default_rng(0)
    samples = _BATCH.value * _STEPS.value
    x = rng.normal(size=(samples, 32, 32, 3)).astype("float32")
    y = rng.integers(0, 10, samples)
    batch = (x[: _BATCH.value], y[: _BATCH.value])

    def seconds(*probe, steps=_STEPS.value):
        callbacks = [*training.callbacks_for(model), *probe]
        images, labels = x[: steps * _BATCH.value], y[: steps * _BATCH.value]
        start = time.perf_counter()
        model.fit(
            images, labels, batch_size=_BATCH.value, callbacks=callbacks, verbose=0
        )
        # The counter is available once the last step is done.
        keras.ops.convert_to_numpy(model.optimizer.iterations)
        return time.perf_counter() - start

    def with_probe():
        # The step count continues from fit to fit: one probe in each.
        probe = LandscapeProbe(batch, every=_STEPS.value)
        result = seconds(probe)
        assert len(probe.history["step"]) == 1
        return result

    seconds()
    first = with_probe()
    turns = {"without": seconds, "with": with_probe, "one": lambda: seconds(steps=1)}
    without, with_one, one = compare.take_turns(turns, _ROUNDS.value).values()
    steps = [(w - o) / (_STEPS.value - 1) for w, o in zip(without, one)]
    probes = [w - wo for w, wo in zip(with_one, without)]
    shares = [probe / (step * _EVERY.value) for probe, step in zip(probes, steps)]
    low, _, high = statistics.quantiles(shares, n=4)
    return {
        "network": "resnet20",
        "norm": norm,
        "batch_size": _BATCH.value,
        "every": _EVERY.value,
        "step_milliseconds": 1e3 * statistics.median(steps),
        "probe_milliseconds": 1e3 * statistics.median(probes),
        "compile_seconds": first - statistics.median(with_one),
        "share": statistics.median(shares),
        "share_quartiles": [low, high],
    }


def main(_):
    rows = [measure(norm) for norm in _NORMS.value]
    compare.report(
        _OUTPUT.value, "probe", rows, rounds=_ROUNDS.value, steps=_STEPS.value
    )


if __name__ == "__main__":
    app.run(main)
