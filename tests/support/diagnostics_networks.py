"""Small networks with every normalisation, batches for them, and what they hold."""

import contextlib

import keras
import numpy as np
from keras import layers

from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from tests.support import diagnostics_reference as reference

BACKEND = keras.backend.backend()
FEATURES, CLASSES = 5, 3
# Operations of Keras return float32 of float64 on the other backends.
PRECISIONS = ["float32", "float64"] if BACKEND == "tensorflow" else ["float32"]


@contextlib.contextmanager
def precision(dtype):
    """Models are made in `dtype`."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def batch(size=12, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, FEATURES)), rng.integers(0, CLASSES, size)


def regression_batch(size=12, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, FEATURES)), rng.normal(size=(size, 2))


def numpy(x):
    return np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(x)))


def variables(model):
    """Every value that the model holds, optimizer and metrics included."""
    found = [*model.variables, *model.metrics_variables]
    if getattr(model, "optimizer", None) is not None:
        found += model.optimizer.variables
    return [numpy(variable) for variable in found]


def weights_of(model):
    return [numpy(v).astype("float64") for v in model.trainable_variables]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for value, wanted in zip(actual, expected):
        np.testing.assert_array_equal(value, wanted)


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def reference_network(seed=0):
    """The network of `reference`, with random weights."""
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(
                4,
                activation="tanh",
                kernel_regularizer=keras.regularizers.L2(reference.L2),
                name="hidden",
            ),
            layers.BatchNormalization(epsilon=reference.EPSILON, name="norm"),
            layers.Dense(2, name="outputs"),
        ]
    )
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0.5, 0.5, variable.shape))
    model.compile("sgd", "mse")
    return model


def cbn():
    layer = CBN()
    layer.set_learning_rate(0.02)
    return layer


def hidden():
    return layers.Dense(6, activation="tanh", name="hidden")


def _normalised(*norms):
    return [hidden(), *norms, layers.Dense(CLASSES)]


# Name -> function that returns the layers.
NETWORKS = {
    "none": lambda: _normalised(),
    "BatchNormalization": lambda: _normalised(layers.BatchNormalization()),
    "LayerNormalization": lambda: _normalised(layers.LayerNormalization()),
    "CBN": lambda: _normalised(cbn()),
    "NoisyBN": lambda: _normalised(NoisyBN()),
    "LpNorm(inf)": lambda: _normalised(LpNorm("inf")),
    "dropout": lambda: _normalised(layers.BatchNormalization(), layers.Dropout(0.5)),
    "WS, CWN, WN": lambda: _normalised(
        WS(layers.Dense(4)), CWN(layers.Dense(4)), WN(layers.Dense(4))
    ),
    "FusedCBN": lambda: [
        hidden(),
        FusedCBN(layers.Dense(CLASSES), cbn()),
    ],
}


class Subclassed(keras.Model):
    """A model that calls its layers itself, and adds a loss."""

    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def call(self, inputs, training=None):
        x = inputs
        for layer in self.stack:
            takes_training = layer._call_has_training_arg
            x = layer(x, training=training) if takes_training else layer(x)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def build(name, kind="Sequential", dtype=None, **compile_arguments):
    """A compiled network that returns logits."""
    keras.utils.set_random_seed(0)
    policy = keras.config.dtype_policy()
    if dtype is not None:
        keras.config.set_dtype_policy(dtype)
    try:
        stack = NETWORKS[name]()
        if kind == "Sequential":
            model = keras.Sequential([keras.Input((FEATURES,)), *stack])
        elif kind == "Functional":
            inputs = x = keras.Input((FEATURES,))
            for layer in stack:
                x = layer(x)
            model = keras.Model(inputs, x)
        else:
            model = Subclassed(stack)
            model(np.zeros((2, FEATURES), "float32"))
    finally:
        keras.config.set_dtype_policy(policy)
    model.compile(
        keras.optimizers.SGD(0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **compile_arguments,
    )
    return model
