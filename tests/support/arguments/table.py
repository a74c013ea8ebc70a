"""Which values of a mixed pool fit each public argument, mostly by its name."""

import math
import numbers
import sys
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

import keras_norms
from keras_norms import diagnostics
from tests.support.wrapped import Doubled, Halved

NAN, INF, LARGEST = math.nan, math.inf, sys.float_info.max
POOL = [None, "no_such", "", b"bytes", True, False, 0, 1, -1, 2, 0.5, -0.5, 1.5, 1e30]
POOL += [NAN, INF, -INF, 10**400, -(10**400), 10**5000, 1j, object(), object, len]
POOL += [[], [None], [1.0], ["no_such"], (), (1, 2), (0.5, NAN), {}, {"a": 1}, set()]
POOL += [np.float32(NAN), np.array(1.0), np.array([1.0, 2.0]), np.array([NAN, NAN])]
POOL += [np.array([]), np.array(["a"]), np.array([None, {}]), np.array([1j, 2j])]
POOL += [np.ones((2, 3, 4)), np.ones(1000)]
# One of each kind.
FEW = [None, "no_such", object(), -1, NAN, [None], np.array([NAN, NAN])]


class Argument(NamedTuple):
    """A predicate for the values of `POOL` that fit, and more values that do not."""

    fits: Any
    wrong: tuple = ()

    def refuses(self, *wrong):
        return self._replace(wrong=(*self.wrong, *wrong))

    def or_none(self):
        return self._replace(fits=lambda v: v is None or self.fits(v))


def is_real(v):
    return isinstance(v, numbers.Real) and not isinstance(v, bool)


def is_integer(v):
    return isinstance(v, numbers.Integral) and not isinstance(v, bool)


def is_array(v, *ndim):
    """Whether it is a non-empty array of numbers, with one of the ranks."""
    fits = isinstance(v, np.ndarray) and v.dtype.kind in "biuf" and v.size > 0
    return fits and v.ndim in ndim


def is_vector(v):
    return is_array(np.asarray(v), 1) and bool(np.all(np.isfinite(np.asarray(v))))


def is_pair(v):
    """Whether it is a tuple of two positive numbers in order."""
    is_tuple = isinstance(v, tuple) and len(v) == 2 and all(map(is_real, v))
    return is_tuple and 0 < v[0] < v[1] < INF


def integer(least=-INF, most=INF):
    return Argument(lambda v: is_integer(v) and least <= v <= most)


def number(above=-INF, least=-LARGEST, most=LARGEST, below=INF):
    return Argument(lambda v: is_real(v) and above < v < below and least <= v <= most)


def choice(*values):
    return Argument(lambda v: isinstance(v, (str, int, float)) and v in values)


# Nothing in the pool fits: layers, models, structures of arrays.
NEVER = Argument(lambda v: False)
ONLY_NONE = Argument(lambda v: v is None)
TEXT = Argument(lambda v: isinstance(v, str))
SWITCH = Argument(lambda v: isinstance(v, bool))
POSITIVE, NOT_NEGATIVE = number(above=0), number(least=0)
COUNT = integer(1)
# What a function takes is unknown before it is called.
FUNCTION = Argument(lambda v: v is len or v is object)
CALLABLE = Argument(callable)
INITIALIZER = Argument(lambda v: v is len or is_array(v, 1, 2, 3))
OPTIONAL_OBJECT = Argument(lambda v: v is None or v is len)
VECTOR, ARRAY = Argument(is_vector), Argument(lambda v: is_array(v, 1, 2, 3))
ANY_RANK = Argument(lambda v: is_array(np.asarray(v), 1, 2, 3))
OF_RANK_3 = Argument(lambda v: is_array(v, 3))
VARYING = Argument(lambda v: is_vector(v) and np.ptp(np.asarray(v, "float64")) > 0)


# The arguments


class Tripwire(layers.Layer):
    """No wrong argument gets far enough to call the model."""

    armed = False

    def call(self, inputs):
        if Tripwire.armed:
            raise AssertionError("The model was called.")
        return inputs


STACK = [keras.Input((4,)), Tripwire(), layers.Dense(3, name="hidden")]
STACK += [layers.BatchNormalization(name="norm"), keras_norms.CBN(name="cbn")]
MODEL = keras.Sequential([*STACK, layers.Dense(2, name="outputs")])
MODEL.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
PLAIN = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
X = np.random.default_rng(0).uniform(size=(6, 4)).astype("float32")
Y = np.arange(6) % 2
Z = np.random.default_rng(1).normal(size=6)
TEXTS = np.full((6, 4), "a")
SYMBOLIC = keras.KerasTensor((None, 4))
WEIGHTS = [np.zeros(v.shape) for v in MODEL.trainable_variables]
OBJECTIVE = diagnostics.Objective(MODEL, X, Y)
SIZE = OBJECTIVE.start.size
DENSE, RELU, BN = layers.Dense(3), layers.ReLU(), layers.BatchNormalization()
CBN, WN = keras_norms.CBN(), keras_norms.WN(layers.Dense(3))
WN.build((None, 4))
PATCHED = layers.Dense(3)
PATCHED.call = lambda inputs: inputs


class Padded(layers.Conv2D):
    """Computes something other than a Conv2D layer, without a `call`."""

    def convolution_op(self, inputs, kernel):
        return super().convolution_op(keras.ops.pad(inputs, 1, "reflect"), kernel)


def is_list_of_names(v):
    return isinstance(v, (list, tuple)) and v and all(isinstance(x, str) for x in v)


BUILT = NEVER.refuses(keras.Sequential([DENSE]), keras.Model(), keras.Model, DENSE)
NORMALIZED = BUILT.refuses(PLAIN)
INPUTS = NEVER.refuses(X[:0], X[:, :3], X[:, None, :], TEXTS, [X, X], [X, X[:3]])
INPUTS = INPUTS.refuses(SYMBOLIC)
LAYER = NEVER.refuses("Hidden", layers.Dense(2), layers.Dense, ["hidden"])
LAYERS = Argument(is_list_of_names).or_none()
LAYERS = LAYERS.refuses("hidden", {"hidden"}, [layers.Dense], ["hidden", 3])
OF_MODEL = ONLY_NONE.refuses(*LAYERS.wrong, ["Hidden"], [layers.Dense(2)])
KERNEL = NEVER.refuses(RELU, layers.Dense, MODEL)
# Kernels that are not a single weight.
QUANTIZED, LORA = layers.Dense(3), layers.Dense(3)
QUANTIZED.build((None, 4))
LORA.build((None, 4))
QUANTIZED.quantize("int8")
LORA.enable_lora(2)
WEIGHT = KERNEL.refuses([DENSE], layers.Embedding(4, 5), QUANTIZED, WN, LORA, Halved(3))
WEIGHT = WEIGHT.refuses(layers.SimpleRNNCell(3), layers.MultiHeadAttention(2, 3), PLAIN)
WEIGHT = WEIGHT.refuses(layers.SpectralNormalization(DENSE))
WEIGHT = WEIGHT.refuses(layers.Dense(3, dtype="int8_from_float32"))
# What FusedCBN does not compute.
NOT_FUSED = KERNEL.refuses(layers.Flatten(), layers.Conv2DTranspose(3, 3), Doubled(3))
NOT_FUSED = NOT_FUSED.refuses(layers.Conv1D(3, 3, padding="causal"), Padded(3, 3))
NOT_FUSED = NOT_FUSED.refuses(layers.Dense(3, activity_regularizer="l2"), PATCHED)
DATA = NEVER.refuses(X[:0], X[:, :3], TEXTS, [X, X[:, :2]], [None, X], (TEXTS, Y))
DATA = DATA.refuses(SYMBOLIC, DENSE)
PAIRS = NEVER.refuses([X, X], X, [(X, Y), X], [(X, Y, Y)] * 2, [(None, Y)] * 2)
OTHER_WEIGHTS = (WEIGHTS[:2], WEIGHTS[::-1])
OF_SIX = NEVER.refuses(Z[:5], np.ones((6, 1)), [*Z[:5], NAN], ["a"] * 6)
SKIP = Argument(lambda v: v is len or type(v) in (list, tuple, set) and not v)
STEP_RANGE = Argument(lambda v: is_pair(v) or np.array_equal(v, [1, 2]))

# Arguments by name, except those below.
KINDS = {
    "model": BUILT,
    "x": INPUTS,
    "y": ONLY_NONE.refuses(Y[:0], Y[:5], [Y, Y[:5]], TEXTS),
    "loss": CALLABLE.or_none().refuses([3], ["no_such"], [None]),
    "data": DATA,
    "batch": FUNCTION.refuses((X, Y, Y), (X, Y[:3]), [X], (None, Y)),
    "batches": PAIRS,
    "layer": LAYER.or_none(),
    "layers": LAYERS,
    "source": LAYER.or_none(),
    "labels": ONLY_NONE.refuses(Y[:5], Y + 0.5, TEXTS),
    "updated": ONLY_NONE.refuses(*OTHER_WEIGHTS, [X, None]),
    "values": NEVER.refuses(*OTHER_WEIGHTS),
    "vector": NEVER.refuses(WEIGHTS),
    "point": ONLY_NONE.refuses(WEIGHTS),
    "seed": integer(0),
    "verbose": choice("auto", 0, 1, 2),
    "step_range": STEP_RANGE.refuses((2, 1), (0, 1), (1, INF), "12", [1, None]),
    "direction": choice("gradient", "random"),
    "bounds": ONLY_NONE.refuses((0, 0.5), (1, 0), "01", (0, [1, 1]), (0, None)),
    "count": integer(1, SIZE - 1).refuses(SIZE),
    "which": choice("LA", "SA", "LM"),
    "samples": integer(2),
    "side": choice("input", "output"),
    "v": ANY_RANK,
    "axes": integer(-2, 1).refuses((0, 2), (0, 0), (1, -1), [0.0], "0"),
    "log_dir": TEXT.or_none(),
    # Of layers.
    "axis": integer(),
    "momentum": number(least=0, below=1),
    "mean_gradient": choice("shift", "ratio").refuses("Shift"),
    "scale_range": number(least=1),
    "p": Argument(lambda v: is_real(v) and v >= 1),
    "norm_of": choice("input", "centered"),
    "rate": Argument(lambda v: number().fits(v) or is_array(v, 0)).refuses(
        np.bool_(True), np.array(True)
    ),
    # Of surgery.
    "skip": SKIP.or_none().refuses(
        ["hidden", 3], "Hidden", {"hidden": 1}, DENSE, [DENSE], layers.Dense
    ),
    "gamma": NOT_NEGATIVE.or_none(),
    "ratio": number(least=0, below=1).or_none(),
    "similarity": number(above=0, most=1).or_none(),
}
SAME = {
    ONLY_NONE: "iterations schedule",
    COUNT: "batch_size every points round_to steps",
    COUNT.or_none(): "gradient_accumulation_steps group_size",
    POSITIVE.or_none(): "learning_rate step_size",
    POSITIVE: "deviation epsilon rho",
    NOT_NEGATIVE: "noise omega mean_jitter mean_range scale_jitter tolerance",
    INITIALIZER: "beta_initializer gamma_initializer gain_initializer "
    "moving_mean_initializer moving_square_initializer moving_variance_initializer "
    "moving_norm_initializer",
    OPTIONAL_OBJECT: "beta_constraint beta_regularizer gamma_constraint "
    "gamma_regularizer",
    SWITCH: "affine center decouple fused gain inline log noise_at_inference preserve "
    "scale synchronized training",
}
KINDS |= {name: kind for kind, names in SAME.items() for name in names.split()}
ATTACK = {
    "x": INPUTS.refuses(X.astype("int32")),
    "y": NEVER.refuses(Y[:0], Y[:5], Y + 0.5, TEXTS, np.zeros((6, 1))),
    "epsilon": NOT_NEGATIVE,
    "norm": choice("inf", 2),
}
THEOREM = dict.fromkeys(("g", "x", "optimum"), OF_SIX) | {
    "y": VARYING,
    "w": VECTOR,
    "gamma": number(),
    "largest": NOT_NEGATIVE,
    "hessian": NEVER.refuses(Z, np.eye(5), np.ones((6, 5)), np.eye(6) * NAN),
}
MAYBE = {"steps": COUNT.or_none(), "batch_size": COUNT.or_none()}
BATCH = Argument(lambda v: v is None or callable(v) or is_array(v, 1, 2, 3))
OWN = {
    "NoisyBN": {"seed": integer(0, 2**31 - 1).or_none().refuses(2**31)},
    "WS": {"layer": WEIGHT},
    "CWN": {"layer": WEIGHT, "scale": POSITIVE},
    "WN": {"layer": WEIGHT},
    "WN.data_init": {"x": OF_RANK_3.refuses(X[:0], TEXTS, X[:, :3])},
    "FusedCBN": {
        "layer": NOT_FUSED.refuses([DENSE, RELU], PLAIN),
        "norm": ONLY_NONE.refuses(BN, keras_norms.CBN),
    },
    "convert": {
        "norm": Argument(lambda v: v is len).refuses(keras.Model, MODEL, "CBN"),
        "data": DATA.or_none(),
    },
    "recalibrate": {"model": NORMALIZED, **MAYBE},
    "Recalibrate": {
        "data": ARRAY.refuses(X[:0], TEXTS, [None, X], (TEXTS, Y), SYMBOLIC, MODEL),
        **MAYBE,
    },
    "freeze": {"model": NORMALIZED},
    "unfreeze": {"model": NORMALIZED},
    "prune": {"model": NORMALIZED, "steps": COUNT.or_none()},
    "bim": ATTACK,
    "robustness": ATTACK,
    "blindness": {"layers": OF_MODEL},
    "covariate_shift": {"layers": OF_MODEL},
    "second_order": {"layer": LAYER},
    "lipschitz_terms": {"layer": LAYER.refuses("hidden")},
    "weight_geometry": {"tolerance": POSITIVE},
    "hessian_vector_product": {"vector": NEVER.refuses(*OTHER_WEIGHTS)},
    "GradientNoiseProbe": {"batches": PAIRS.refuses([(X, Y)])},
    "BatchStatistics": {"batch": BATCH.refuses(X[:0], TEXTS, [X, None])},
}

# Fitting values for required arguments.
GOOD = dict.fromkeys(("x", "v", "data"), X) | {
    "model": MODEL,
    "y": Y,
    "batch": (X, Y),
    "batches": [(X, Y), (X, Y)],
    "layer": DENSE,
    "norm": "cbn",
    "values": WEIGHTS,
    "vector": WEIGHTS,
    "rate": 0.1,
}
GOOD_FOR_THEOREM = {"g": Z, "w": Z, "x": Z, "y": Z**2, "optimum": Z + 0.1}
GOOD_FOR_THEOREM |= {"hessian": np.eye(6), "largest": 1.0}
OWN_GOOD = {
    "second_order": {"layer": "hidden"},
    "lipschitz_terms": {"layer": "norm"},
    "Objective.hessian_vector_product": {"vector": OBJECTIVE.start},
}
