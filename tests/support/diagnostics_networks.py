"""Small networks with every normalisation, batches for them, and what they hold."""

from typing import NamedTuple

import keras
import numpy as np
from keras import layers

from keras_norms import AMAT, CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from tests.support import diagnostics_reference as reference
from tests.support.backend import BACKEND, later, numpy, precision

FEATURES, CLASSES = 5, 3
# Operations of Keras return float32 of float64 on the other backends.
WIDEST = "float64" if BACKEND == "tensorflow" else "float32"
PRECISIONS = [WIDEST, *later(*{"float32"} - {WIDEST})]
# TensorFlow compiles longer than it runs such networks, other backends do not.
EAGER = BACKEND == "tensorflow"


def batch(size=8, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, FEATURES)), rng.integers(0, CLASSES, size)


def regression_batch(size=8, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, FEATURES)), rng.normal(size=(size, 2))


def variables(model):
    """Copies of every value that the model holds, optimizer and metrics included."""
    found = [*model.variables, *model.metrics_variables]
    if getattr(model, "optimizer", None) is not None:
        found += model.optimizer.variables
    return [numpy(variable).copy() for variable in found]


def float64(variable):
    return numpy(variable).astype("float64")


def weights_of(model):
    return [float64(variable) for variable in model.trainable_variables]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for value, wanted in zip(actual, expected):
        np.testing.assert_array_equal(value, wanted)


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


class Case(NamedTuple):
    """A network that tests only read, a batch, and its weights in float64."""

    model: keras.Model
    x: np.ndarray
    y: np.ndarray
    weights: list
    dtype: str


def compiled(model, loss=None, optimizer=None, **settings):
    """Eager where nothing is said: to compile takes longer than a few gradients."""
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss, **{"run_eagerly": True, **settings})
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


def _case(dtype, *stack):
    with precision(dtype):
        loss = keras.losses.MeanSquaredError()
        model = sequential(*(f() for f in stack), loss=loss, run_eagerly=False)
    randomize(model)
    return Case(model, *regression_batch(), weights_of(model), dtype)


def nonlinear(dtype):
    """The network of `reference`."""
    l2 = keras.regularizers.L2(reference.L2)
    return _case(
        dtype,
        lambda: layers.Dense(4, "tanh", kernel_regularizer=l2, name="hidden"),
        lambda: layers.BatchNormalization(epsilon=reference.EPSILON, name="norm"),
        lambda: layers.Dense(2, name="outputs"),
    )


def linear(dtype):
    """`L = mean((x W - y)^2)`: a quadratic function of the weights."""
    return _case(dtype, lambda: layers.Dense(2, use_bias=False))


def cbn():
    layer = CBN()
    layer.set_learning_rate(0.02)
    return layer


def _normalised(*norms):
    hidden = layers.Dense(6, activation="tanh", name="hidden")
    return [hidden, *norms, layers.Dense(CLASSES)]


# Name -> function that returns the layers.
NETWORKS = {
    "none": lambda: _normalised(),
    "BatchNormalization": lambda: _normalised(layers.BatchNormalization()),
    "LayerNormalization": lambda: _normalised(layers.LayerNormalization()),
    "CBN": lambda: _normalised(cbn()),
    "CBN without a rate": lambda: _normalised(CBN()),
    "NoisyBN": lambda: _normalised(NoisyBN()),
    "LpNorm(inf)": lambda: _normalised(LpNorm("inf")),
    "dropout": lambda: _normalised(layers.BatchNormalization(), layers.Dropout(0.5)),
    "WS, CWN, WN": lambda: _normalised(
        WS(layers.Dense(4)), CWN(layers.Dense(4)), WN(layers.Dense(4))
    ),
    "FusedCBN": lambda: [*_normalised()[:1], FusedCBN(layers.Dense(CLASSES), cbn())],
}


class Subclassed(keras.Model):
    """A model that calls its layers itself, and adds a loss."""

    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def call(self, inputs, training=None):
        x = inputs
        for layer in self.stack:
            # Keras on JAX does not tell them when it trains such a model.
            told = {"training": training} if layer._call_has_training_arg else {}
            x = layer(x, **told)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def build(name, kind="Sequential", **settings):
    """A compiled network that returns logits."""
    keras.utils.set_random_seed(0)
    stack, optimizer = NETWORKS[name](), keras.optimizers.SGD(0.5)
    if kind == "Sequential":
        return sequential(*stack, optimizer=optimizer, **settings)
    model = Subclassed(stack)
    model(np.zeros((2, FEATURES), "float32"))
    return compiled(model, optimizer=optimizer, **settings)
