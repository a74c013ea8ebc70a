"""What the AMAT callback costs, as a share of a training step.

    python -m benchmarks.amat                             # TensorFlow
    KERAS_BACKEND=jax python -m benchmarks.amat

ResNet-20 with CBN through Keras `fit`, with the learning rate from

* `constant`: a number;
* `schedule`: a `LearningRateSchedule`, which AMAT puts into the compiled step;
* `callback`: a callback that changes the rate before every step, which makes AMAT
  assign it to every layer in every step.

Measured in two ways. *Direct*: the seconds that AMAT's own methods take, divided by
those of the steps around them. *Interleaved*: steps with AMAT and steps without it (the
layers got a rate once) take turns; the median of the ratios, its quartiles, and the
notches of a box plot (McGill et al. 1978: median +- 1.57 * interquartile range /
sqrt(rounds)), between which the true median is in 9 of 10 runs. Only the second sees
the schedule inside the step. Without AMAT, `callback` still has the callback that
changes the rate.

Prints a table; --output also writes it as JSON with versions and machine.
"""

import math
import statistics
import time

import keras
from absl import app, flags

from benchmarks import compare, networks, training
from keras_norms import AMAT

RATES = ("constant", "schedule", "callback")


class TimedAMAT(AMAT):
    """AMAT that adds up the seconds it takes in the steps that the clock times.

    With `waits`, it first waits for the previous step: waiting is not AMAT's work.
    """

    def __init__(self, waits):
        super().__init__()
        self.waits = waits
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        if self.waits and batch:
            training.wait_for_device(self._model)
        start = time.perf_counter()
        super().on_train_batch_begin(batch, logs)
        if batch > 1:  # the clock starts after the callbacks of batch 1
            self.seconds.append(time.perf_counter() - start)


class ChangeRate(keras.callbacks.Callback):
    """Changes the learning rate before every step."""

    def on_train_batch_begin(self, batch, logs=None):
        rate = training.LEARNING_RATE / (1 + batch)
        self.model.optimizer.learning_rate = rate


def interval(row, rounds):
    """The interval of the median ratio, from its quartiles."""
    low, high = row["ratio_quartiles"]
    reach = 1.57 * (high - low) / math.sqrt(rounds)
    return row["ratio"] - reach, row["ratio"] + reach


def candidate(rate, with_amat, network, size, batch, steps):
    """Compile and warm up. Returns a function that trains for a turn, and its AMAT."""
    learning_rate = training.LEARNING_RATE
    if rate == "schedule":
        learning_rate = keras.optimizers.schedules.CosineDecay(learning_rate, 10**6)
    model = networks.build(network, "cbn", size, learning_rate=training.LEARNING_RATE)
    training.compile_model(model, learning_rate=learning_rate)
    # A changed rate is read, which waits anyway.
    amat = TimedAMAT(waits=rate == "callback") if with_amat else None
    callbacks = [ChangeRate()] if rate == "callback" else []
    callbacks += [amat] if with_amat else []
    turn = training.turn(model, batch, steps, callbacks)
    if with_amat:
        amat.seconds.clear()
    return turn, amat


def measure(rate, network, size, batch, *, steps, rounds):
    """One row.

    Args:
        rate: A name in `RATES`.
        network: A name in `networks.NETWORKS`.
        size: Height and width of the images.
        batch: Images per step.
        steps: Steps per turn.
        rounds: Turns with AMAT, and without, 3 or more: two have no quartiles.
    """
    case = network, size, batch, steps
    plain, _ = candidate(rate, False, *case)
    told, amat = candidate(rate, True, *case)
    times = compare.take_turns({"plain": plain, "told": told}, rounds)
    row = {
        "rate": rate,
        "seconds_per_step": statistics.median(times["told"]),
        "amat_seconds": statistics.median(amat.seconds),
        "direct_share": sum(amat.seconds) / (sum(times["told"]) * steps),
        **compare.ratio(times["told"], times["plain"]),
    }
    return {**row, "ratio_interval": interval(row, rounds)}


def define_flags():
    compare.define_names("rates", [*RATES], RATES, "Where the rate comes from.")
    flags.DEFINE_string(
        "network", "resnet20:32:128", "Network as name:image size:batch size."
    )
    networks.check_flag("network")
    flags.DEFINE_integer("steps", 4, "Steps of a turn.", lower_bound=1)
    flags.DEFINE_integer("rounds", 20, "Rounds to time.", lower_bound=3)
    flags.DEFINE_string("output", None, "JSON file to write.")


def main(_):
    values = flags.FLAGS
    case = networks.parse(values.network)
    settings = {"steps": values.steps, "rounds": values.rounds}
    rows = []
    for rate in values.rates:
        rows.append(measure(rate, *case, **settings))
        keras.utils.clear_session(free_memory=True)
    compare.report(values.output, "amat", rows, network=values.network, **settings)


if __name__ == "__main__":
    define_flags()
    app.run(main)
