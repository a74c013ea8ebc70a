"""Models that show which rate CBN, and the optimizer, used in each step.

Batch number t holds a one in channel t and zeros elsewhere. Channel t of a moving mean
then keeps what entered in step t, and row t of a kernel with gradient 1 keeps what the
optimizer subtracted in step t.
"""

import keras
import numpy as np
import pytest
from keras import ops
from keras.optimizers.schedules import CosineDecay, PiecewiseConstantDecay

from keras_norms import CBN
from tests.support.backend import BACKEND, numpy, some

MOST_STEPS = 21
PER_EPOCH = 3

PIECEWISE = PiecewiseConstantDecay([1, 3, 7], [0.4, 0.3, 0.2, 0.1])
COSINE = CosineDecay(0.1, decay_steps=20, warmup_target=0.5, warmup_steps=3)


EAGER, XLA = {"run_eagerly": True}, {"jit_compile": True}
# An execution of two steps straddles epochs of three.
TWO_STEPS = {"steps_per_execution": 2}


# PyTorch lacks them; JAX takes XLA without being asked.
LEFT_OUT = {"torch": (XLA, TWO_STEPS), "jax": (XLA,)}.get(BACKEND, ())


def ways(*now, later=()):
    """Arguments of `compile` to try, those that make a difference."""
    ways = [way for way in (*now, *later) if way not in LEFT_OUT]
    return pytest.mark.parametrize("way", some(ways, now), ids=str)


class OneHot(keras.utils.PyDataset):
    """Batch `epoch * PER_EPOCH + i`: a one in the channel of that number."""

    epoch = 0

    def __len__(self):
        return PER_EPOCH

    def __getitem__(self, i):
        x = np.zeros((2, MOST_STEPS), "float32")
        x[:, self.epoch * PER_EPOCH + i] = 1
        return x, np.zeros((2, 1), "float32")


def fit(model, *callbacks, first=0, epochs=2, **kwargs):
    """Train for `epochs` epochs, from number `first` on."""
    data = OneHot()

    def tell_the_epoch(epoch, logs):  # also where a backup decides where to start
        data.epoch = epoch

    last = keras.callbacks.LambdaCallback(on_epoch_begin=tell_the_epoch)
    kwargs |= {"initial_epoch": first, "epochs": first + epochs, "shuffle": False}
    model.fit(data, callbacks=[*callbacks, last], verbose=0, **kwargs)
    return model


def branches(*norms):
    """A model that uses `norms` but learns only the kernel, with gradient 1."""
    inputs = keras.Input((MOST_STEPS,))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    y = dense(inputs)
    for norm in norms:
        y = y + 0 * ops.sum(norm(inputs), axis=-1, keepdims=True)
    return keras.Model(inputs, y)


def compiled(model, rate, **kwargs):
    """`model` with plain SGD, or with the optimizer given instead of a rate."""
    is_optimizer = isinstance(rate, keras.optimizers.Optimizer)
    optimizer = rate if is_optimizer else keras.optimizers.SGD(rate)
    model.compile(optimizer, lambda y, output: ops.mean(output, axis=-1), **kwargs)
    return model


def recorder(rate, **kwargs):
    """A compiled model and its CBN layer."""
    norm = CBN(omega=1)
    return compiled(branches(norm), rate, **kwargs), norm


def told(norm, calls=1):
    """The rates of the first steps, from the averages of a layer."""
    shares = numpy(norm.moving_mean).astype("float64")
    shares *= numpy(norm.average_weight)
    rates, later = [], 1.0
    for share in reversed(shares):
        entered = share / later
        later *= 1 - entered
        rates.append((1 - (1 - entered) ** (1 / calls)) / norm.omega)
    return np.array(rates[::-1])


def used(model):
    """The rates of the first steps, from the kernel that the optimizer moved."""
    kernel = next(w for w in model.trainable_weights if w.name == "kernel")
    return -numpy(kernel)[:, 0]


def close(rates, expected):
    """`rates` are the expected ones, and 0 for the steps that were not taken."""
    expected = np.pad(expected, (0, MOST_STEPS - len(expected)))
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-6)


def check(model, norm, expected):
    """The layer and the optimizer used the expected rates, and the last one stays."""
    close(used(model), expected)
    close(told(norm), expected)
    last = float(numpy(norm.learning_rate))
    np.testing.assert_allclose(last, float(expected[-1]), rtol=1e-5)


def rates_of(rate, steps):
    """Those of a schedule, or of a constant."""
    return [float(numpy(rate(step) if callable(rate) else rate)) for step in steps]


class Twice(keras.layers.Layer):
    """Calls the same norm twice, hidden from any graph."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def call(self, x, training=None):
        return self.norm(x, training=training) + self.norm(x, training=training)
