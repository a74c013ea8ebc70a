"""Small networks with every normalisation, batches for them, and what they hold."""

import keras
import numpy as np
from keras import layers

from keras_norms import AMAT, CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from tests.support.backend import BACKEND, later, numpy

FEATURES, CLASSES = 5, 3
# On the other backends, Keras operations turn float64 into float32.
WIDEST = "float64" if BACKEND == "tensorflow" else "float32"
PRECISIONS = [WIDEST, *later(*{"float32"} - {WIDEST})]
# TensorFlow takes longer to compile such networks than to run them; others do not.
EAGER = BACKEND == "tensorflow"


def batch(size=8, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, FEATURES)), rng.integers(0, CLASSES, size)


def regression_batch(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, FEATURES)), rng.normal(size=(8, 2))


def variables(model):
    """Copies of every value that the model holds, optimizer and metrics included."""
    found = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [numpy(variable).copy() for variable in found]


def float64(variable):
    return numpy(variable).astype("float64")


def weights_of(model):
    return [float64(variable) for variable in model.trainable_variables]


def assert_same(actual, expected):
    for value, wanted in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(value, wanted)


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


def compiled(model, loss=None, **settings):
    """Eager by default: compiling takes longer than a few gradients."""
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    usual = {"optimizer": keras.optimizers.SGD(0.1), "run_eagerly": True}
    model.compile(loss=loss, **usual | settings)
    return model


def sequential(*stack, shape=(FEATURES,), **settings):
    return compiled(keras.Sequential([keras.Input(shape), *stack]), **settings)


def train(model, *callbacks, size=24, **settings):
    x, y = batch(size)
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0, **settings}
    return model.fit(x, y, callbacks=[AMAT(), *callbacks], **settings)


def randomize(model):
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0.5, 0.5, variable.shape))


def cbn():
    layer = CBN()
    layer.set_learning_rate(0.02)
    return layer


# Name -> function that returns the layers between two Dense layers.
NETWORKS = {
    "none": list,
    "BatchNormalization": lambda: [layers.BatchNormalization()],
    "LayerNormalization": lambda: [layers.LayerNormalization()],
    "CBN": lambda: [cbn()],
    "CBN without a rate": lambda: [CBN()],
    "NoisyBN": lambda: [NoisyBN()],
    "LpNorm(inf)": lambda: [LpNorm("inf")],
    "dropout": lambda: [layers.BatchNormalization(), layers.Dropout(0.5)],
    "WS, CWN, WN": lambda: [wrap(layers.Dense(4)) for wrap in (WS, CWN, WN)],
    "FusedCBN": lambda: [FusedCBN(layers.Dense(4), cbn())],
}


class Subclassed(keras.Model):
    """Calls its layers itself, and adds a loss."""

    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def call(self, inputs, training=None):
        x = inputs
        for layer in self.stack:
            # Keras on JAX does not pass it when it trains such a model.
            told = {"training": training} if layer._call_has_training_arg else {}
            x = layer(x, **told)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def build(name, **settings):
    """A compiled network that returns logits; the one with dropout is subclassed."""
    keras.utils.set_random_seed(0)
    norms, hidden = NETWORKS[name](), layers.Dense(6, "tanh", name="hidden")
    stack = [hidden, *norms, layers.Dense(CLASSES)]
    model = keras.Sequential(stack) if name != "dropout" else Subclassed(stack)
    model(np.zeros((2, FEATURES), "float32"))
    return compiled(model, optimizer=keras.optimizers.SGD(0.5), **settings)
