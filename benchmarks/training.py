"""Training through `fit`, with data that costs nothing, timed without the start."""

import functools
import itertools
import time

import keras
import numpy as np

from keras_norms import AMAT, CBN
from keras_norms.layers import layers_of

LEARNING_RATE = 0.01


def compile_model(model, jit_compile="auto", learning_rate=LEARNING_RATE):
    """Compile a network that returns logits: SGD with momentum, cross-entropy."""
    model.compile(
        keras.optimizers.SGD(learning_rate, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return model


def endless_batch(model, batch):
    """Data for `fit`: one random batch on the device, again and again.

    TensorFlow on a GPU copies it to the device in every step, as with all datasets.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (batch, *model.input_shape[1:])).astype("float32")
    y = rng.integers(0, model.output_shape[-1], batch).astype("int32")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensors((x, y)).repeat()
    x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
    return ((x, y) for _ in itertools.count())


def callbacks_for(model):
    """AMAT if there is a CBN layer: otherwise it would warn that there is none."""
    return [AMAT()] if layers_of(model, CBN) else []


def wait_for_device(model):
    """Inside `fit`, between two steps: wait until the first one is done."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        # All results of a step become available together.
        jax.block_until_ready([*model._jax_state["optimizer_variables"]])
    elif backend == "tensorflow":
        import tensorflow as tf

        tf.test.experimental.sync_devices()
    else:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Clock(keras.callbacks.Callback):
    """Times the steps of a `fit` except the first and the last, to their very end.

    The first includes the start of training. That a step is over shows only in the next
    one: a callback at the end of each step would make `fit` wait for all of them.

    Args:
        steps: How many of the `steps + 2` steps to time.

    Attributes:
        seconds: Seconds per step, the mean.
    """

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.seconds = None

    def on_train_batch_begin(self, batch, logs=None):
        # Not `self.model`: on JAX that would fetch all state from the trainer.
        if batch == 1:
            wait_for_device(self._model)
            self._start = time.perf_counter()
        elif batch == self.steps + 1:
            wait_for_device(self._model)
            self.seconds = (time.perf_counter() - self._start) / self.steps


def turn(model, batch, steps, callbacks=()):
    """Warm up a compiled network. Returns `seconds_per_step` without arguments."""
    data = endless_batch(model, batch)
    run = functools.partial(seconds_per_step, model, data, steps, callbacks)
    for _ in range(2):
        run()
    return run


def seconds_per_step(model, data, steps, callbacks=()):
    """Train for `steps + 2` steps and return the seconds of one of the inner steps.

    The steps include what callbacks do.
    """
    clock = Clock(steps)
    model.fit(
        data,
        steps_per_epoch=steps + 2,
        verbose=0,
        shuffle=False,
        callbacks=[*callbacks, clock],
    )
    return clock.seconds
