"""One process of a training on many: run by `tests/devices/test_processes.py`.

    python -m tests.programs.process <directory> <addresses> <number>

Without the last two it trains alone. It writes its weights to <directory>, and backups,
as docs/tpu.md shows.
"""

import faulthandler
import pathlib
import re
import sys

import jax
import keras
import numpy as np

from keras_norms import AMAT
from recipes.engine import devices
from tests.support import small

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tpu.md"
BATCH, STEPS, EPOCHS = 32, 10, 8


def backup(directory):
    """The callback of the page: process 0 writes, all read."""
    names = {"keras": keras, "jax": jax}
    exec(re.search(r"class Backup.*?\n\n\n", PAGE.read_text(), re.DOTALL)[0], names)
    return names["Backup"](directory, double_checkpoint=True, delete_checkpoint=False)


def part(array):
    """The rows of each batch that this process has, batch after batch."""
    count = jax.process_count()
    batches = array.reshape(-1, count, BATCH // count, *array.shape[1:])
    return batches[:, jax.process_index()].reshape(-1, *array.shape[1:])


def main(directory, addresses=None, number=None):
    directory = pathlib.Path(directory)
    # A collective holds one of XLA's threads, of which there are as many as cores.
    # Steps that run ahead of it could take them all.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    several = (addresses, 2, int(number)) if addresses else ()
    strategy = devices.get("data_parallel", *several)
    epochs = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: print(f"epoch {epoch}", flush=True)
    )
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, 8, 8, 1)).astype("float32")
    y = rng.integers(10, size=len(x)).astype("int32")
    with strategy.scope():
        # A smooth activation: with ReLU, rounding grows in these 80 steps.
        model = small.convolutions("", x.shape[1:], 10, "cbn", "sigmoid")
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
            [25], [0.01, 0.001]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(schedule, momentum=0.9), loss)
    batch = BATCH // jax.process_count()
    callbacks = [AMAT(), backup(directory / "backup"), epochs]
    settings = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
    model.fit(part(x), part(y), batch, EPOCHS, **settings)
    arrays = map(keras.ops.convert_to_numpy, model.variables)
    np.savez(directory / f"weights{number or ''}.npz", *arrays)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(180)  # Says where a process waits in vain.
    main(*sys.argv[1:])
