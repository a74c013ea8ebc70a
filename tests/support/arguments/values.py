"""A model that must not be called, and kinds of arguments that many functions have."""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

import keras_norms
from keras_norms import diagnostics
from tests.support.arguments.kinds import (
    NEVER,
    ONLY_NONE,
    POSITIVE,
    SWITCH,
    Argument,
    choice,
)


class Tripwire(layers.Layer):
    """No wrong argument gets as far as a call of the model."""

    armed = False

    def call(self, inputs):
        if Tripwire.armed:
            raise AssertionError("The model was called.")
        return inputs


class Entry(NamedTuple):
    """A callable, arguments that fit, and the kind of each argument.

    Where it is quick, what fits is tried as well.
    """

    call: Any
    good: dict
    kinds: dict
    is_quick: bool = False


MODEL = keras.Sequential(
    [
        keras.Input((4,)),
        Tripwire(),
        layers.Dense(3, name="hidden"),
        layers.BatchNormalization(name="norm"),
        keras_norms.CBN(name="cbn"),
        layers.Dense(2, name="outputs"),
    ]
)
MODEL.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
PLAIN = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
X = np.random.default_rng(0).uniform(size=(6, 4)).astype("float32")
Y = np.arange(6) % 2
TEXTS = np.full((6, 4), "a")
WEIGHTS = [np.zeros(v.shape) for v in MODEL.trainable_variables]
OBJECTIVE = diagnostics.Objective(MODEL, X, Y)
DENSE, CBN = layers.Dense(3), keras_norms.CBN()
WN = keras_norms.WN(layers.Dense(3))
WN.build((None, 4))

# What many functions take.
BUILT = NEVER.refuses(keras.Sequential([DENSE]), keras.Model(), keras.Model, DENSE)
NORMALIZED = BUILT.refuses(PLAIN)
INPUTS = NEVER.refuses(X[:0], X[:, :3], X[:, None, :], TEXTS, [X, X], [X, X[:3]])
TARGETS = ONLY_NONE.refuses(Y[:0], Y[:5], [Y, Y[:5]], TEXTS)
LOSS = Argument(lambda v: v is None or callable(v)).refuses([3], ["no_such"], [None])
LAYER = NEVER.refuses("Hidden", layers.Dense(2), layers.Dense, ["hidden"])
LAYERS = Argument(lambda v: v is None or (isinstance(v, list) and v == ["no_such"]))
LAYERS = LAYERS.refuses("hidden", {"hidden"}, [layers.Dense], ["hidden", 3])
OF_MODEL = ONLY_NONE.refuses(*LAYERS.wrong, ["Hidden"], [layers.Dense(2)])
RATE = POSITIVE.or_none()
DATA = NEVER.refuses(X[:0], X[:, :3], TEXTS, [X, X[:, :2]], [None, X], (TEXTS, Y))
BATCH = {"model": MODEL, "x": X, "y": Y}
ON_BATCH = {"model": BUILT, "x": INPUTS, "y": TARGETS, "loss": LOSS}
IN_TRAINING = {**ON_BATCH, "training": SWITCH}
ACTIVATION = {"layer": LAYER.or_none(), "side": choice("input", "output")}
