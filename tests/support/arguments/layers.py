"""The arguments of layers, of `AMAT`, and of surgery."""

import inspect

import keras
from keras import layers

import keras_norms
from keras_norms import surgery
from tests.support.arguments.kinds import (
    COUNT,
    INITIALIZER,
    NEVER,
    NOT_NEGATIVE,
    ONLY_NONE,
    OPTIONAL_OBJECT,
    POSITIVE,
    SWITCH,
    Argument,
    choice,
    integer,
    is_array,
    is_real,
    number,
)
from tests.support.arguments.values import (
    BUILT,
    CBN,
    DATA,
    DENSE,
    MODEL,
    NORMALIZED,
    TEXTS,
    WN,
    Entry,
    X,
)

IS_TORCH = keras.backend.backend() == "torch"
KERNEL = NEVER.refuses(layers.ReLU(), layers.Dense, MODEL)


def of_channels(cls, **kinds):
    """The entry of a layer that normalises activations."""
    common = {"axis": integer(), "momentum": number(least=0, below=1)}
    common |= {"epsilon": POSITIVE, "center": SWITCH, "scale": SWITCH}
    common["synchronized"] = Argument(
        lambda v: v is False or (v is True and not IS_TORCH)
    )
    for name in inspect.signature(cls).parameters:
        if name.endswith("_initializer"):
            common[name] = INITIALIZER
        elif name.endswith(("_regularizer", "_constraint")):
            common[name] = OPTIONAL_OBJECT
    return Entry(cls, {}, {**common, **kinds}, is_quick=True)


def of_kernel(cls, **kinds):
    """The entry of a layer that normalises kernels."""
    kinds = {"layer": KERNEL.refuses([DENSE]), "epsilon": POSITIVE, **kinds}
    return Entry(cls, {"layer": DENSE}, kinds, is_quick=True)


LAYERS = {
    "AMAT": Entry(keras_norms.AMAT, {}, {}),
    "CBN": of_channels(
        keras_norms.CBN,
        rho=POSITIVE,
        omega=NOT_NEGATIVE,
        decouple=SWITCH,
        mean_gradient=choice("shift", "ratio").refuses("Shift"),
    ),
    "NoisyBN": of_channels(
        keras_norms.NoisyBN,
        mean_range=NOT_NEGATIVE,
        scale_range=number(least=1),
        mean_jitter=NOT_NEGATIVE,
        scale_jitter=NOT_NEGATIVE,
        noise_at_inference=SWITCH,
        seed=integer(0, 2**31 - 1).or_none().refuses(2**31),
    ),
    "LpNorm": of_channels(
        keras_norms.LpNorm,
        p=Argument(lambda v: is_real(v) and v >= 1),
        norm_of=choice("input", "centered"),
    ),
    "WS": of_kernel(keras_norms.WS, gain=SWITCH),
    "CWN": of_kernel(
        keras_norms.CWN, scale=POSITIVE, gain=SWITCH, gain_initializer=INITIALIZER
    ),
    "WN": of_kernel(keras_norms.WN),
    "WN.data_init": Entry(
        WN.data_init,
        {},
        {"x": Argument(lambda v: is_array(v, 3)).refuses(X[:0], TEXTS, X[:, :3])},
    ),
    "FusedCBN": Entry(
        keras_norms.FusedCBN,
        {"layer": DENSE},
        {
            "layer": KERNEL.refuses([DENSE, layers.ReLU()]),
            "norm": ONLY_NONE.refuses(layers.BatchNormalization(), keras_norms.CBN),
        },
        is_quick=True,
    ),
    "FollowsLearningRate.set_learning_rate": Entry(
        CBN.set_learning_rate,
        {},
        {"rate": Argument(lambda v: number().fits(v) or is_array(v, 0))},
        is_quick=True,
    ),
    "FollowsLearningRate.follow": Entry(
        CBN.follow, {}, {"schedule": ONLY_NONE, "iterations": ONLY_NONE}, is_quick=True
    ),
}
SURGERY = {
    "convert": Entry(
        surgery.convert,
        {"model": MODEL, "norm": "cbn"},
        {
            "model": BUILT,
            "norm": Argument(lambda v: v is len).refuses(keras.Model, MODEL, "CBN"),
            "preserve": SWITCH,
            "data": DATA.or_none(),
            "skip": Argument(
                lambda v: (
                    v is None
                    or callable(v)
                    or (isinstance(v, (list, tuple, set)) and not v)
                )
            ).refuses(["hidden", 3], "Hidden", {"hidden": 1}),
            "fused": SWITCH,
            "inline": SWITCH,
        },
    ),
    "fold": Entry(surgery.fold, {"model": MODEL}, {"model": BUILT, "inline": SWITCH}),
    "recalibrate": Entry(
        surgery.recalibrate,
        {"model": MODEL, "data": X},
        {
            "model": NORMALIZED,
            "data": DATA,
            "steps": COUNT.or_none(),
            "batch_size": COUNT.or_none(),
            "verbose": choice("auto", 0, 1, 2),
        },
    ),
    "prune": Entry(
        surgery.prune,
        {"model": MODEL, "data": X},
        {
            "model": NORMALIZED,
            "data": DATA,
            "gamma": NOT_NEGATIVE.or_none(),
            "similarity": number(above=0, most=1).or_none(),
            "steps": COUNT.or_none(),
            "batch_size": COUNT,
            "inline": SWITCH,
        },
    ),
}
