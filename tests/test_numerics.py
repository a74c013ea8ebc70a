"""Hard inputs: errors of outputs and gradients, and what must stay clean."""

import functools
import itertools

import keras
import numpy as np
import pytest

from keras_norms import CBN
from tests.programs import numerics
from tests.support.autodiff import training_step
from tests.support.backend import BACKEND, numpy, some
from tests.support.normalizations import linear_loss

# Largest errors of an output and of a gradient in a dtype; of float32, that of all
# tests of layers. TensorFlow comes to 2e-6 on a CPU, the others to 5e-7.
ROUNDING = {"float32": 1e-5, "mixed_float16": 2e-3, "mixed_bfloat16": 2e-2}
ROUNDING["float64"] = 1e-5 if BACKEND == "jax" else 1e-12
# A selection that compiles quickly: `python -m tests.programs.numerics` has all.
MODE = "jit_compile" if BACKEND == "jax" else "eager"
FEW = ["CBN", "NoisyBN", "LpNorm inf, centered"]
OURS = ["CBN, coupled, ratio", "LpNorm 1", "LpNorm 2", *FEW]
layers = pytest.mark.parametrize("layer", some(OURS, FEW))


@pytest.mark.parametrize(
    ("layer", "policy"),
    some(
        itertools.product([*OURS, *numerics.WEIGHTS], ROUNDING),
        [(layer, "float32") for layer in (*FEW, "WS")] + [(FEW[-1], "mixed_float16")],
    ),
)
def test_errors(layer, policy):
    of_weights = layer in numerics.WEIGHTS
    cases = [c for c in numerics.CASES if numerics.POLICIES.get(c, "float32") == policy]
    for case in cases:
        if of_weights and case in ("denormal", "one sample"):
            continue  # Nearly 0: the gradient, the output.
        found = numerics.errors(layer, case, MODE)
        if case == "deviation 1e18" and not of_weights:
            # The squares, added up, are no float32: nothing becomes NaN.
            assert np.isfinite(found).all()
            continue
        # A mean is rounded by half of its last bit at most, in units of the deviation.
        in_deviations = case.startswith("mean /") and not of_weights
        mean = numerics.CASES[case][0] if in_deviations else 1.0
        bounds = np.full(2, max(ROUNDING[policy], mean * 2**-24))
        if mean > 1 and layer == "LpNorm inf, centered":
            # One element receives the sum over the channel, with its rounding.
            bounds[1] = 1e-3
        assert np.all(found <= bounds), case


MOVING = [*OURS[:-1], "CBN, rate unknown", "LpNorm inf"]


@pytest.mark.parametrize("layer", some(MOVING, [OURS[0], "LpNorm inf"]))
def test_inputs_that_move(layer):
    """What came before may not be seen in the digits of a step."""
    for case, batches in numerics.SEQUENCES.items():
        mean = max(mean / deviation for mean, deviation in batches)
        bound = max(ROUNDING["float32"], mean * 2**-24)
        assert numerics.errors(layer, case, MODE).max() <= bound, case


# A channel with a bad element.
SHAPE = (12, 4, 3)
RNG = np.random.default_rng(0)
X = RNG.normal(1, 2, SHAPE).astype("float32")
G = RNG.normal(size=SHAPE).astype("float32")
OTHERS = [0, 2]


@functools.cache
def steps(name):
    """A layer after one step, its state then, and the step."""
    layer = numerics.make(name)
    layer.build(SHAPE)
    layer.beta.assign([0.3, -0.2, 0.1])
    if isinstance(layer, CBN):
        layer.set_learning_rate(numerics.RATE)
    layer(X, training=True)
    return layer, state(layer), training_step(layer, linear_loss(G), MODE)


def state(layer):
    """But for that of a generator of noise."""
    return [numpy(v) for v in layer.non_trainable_variables if "seed" not in v.path]


def results(name, x):
    """Output, gradients of input and weights, and the state after the step."""
    layer, start, step = steps(name)
    for variable, value in zip(layer.non_trainable_variables, start):
        variable.assign(value)
    return step(x.astype("float32")), state(layer)


def assert_same(found, expected, channels=slice(None)):
    for value, wanted in zip(found, expected, strict=True):
        of = (..., channels) if wanted.shape[-1:] == (3,) else ...
        np.testing.assert_array_equal(value[of], wanted[of])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@layers
def test_a_bad_channel_stays_alone_and_is_forgotten(layer, bad):
    """Its output shows it; other channels and the batches after it do not."""
    x = 2 * X + 1
    clean, clean_state = results(layer, x)
    x[3, 2, 1] = bad
    found, found_state = results(layer, x)
    assert_same(found, clean, OTHERS)
    assert_same(found_state, clean_state, OTHERS)
    if np.isfinite(bad):
        return
    _, before, step = steps(layer)
    assert np.isnan(found[0][..., 1]).any()
    for value, old in zip(found_state, before):
        if old.shape == (3,):
            assert value[1] == old[1] and np.all(value[OTHERS] != old[OTHERS])
    assert all(np.isfinite(value).all() for value in step(X))
    assert_same(results(layer, np.full_like(X, bad))[1], before)


@pytest.mark.parametrize("policy", some(["float16", "bfloat16"], ["float16"]))
@layers
def test_statistics_of_large_activations_in_half_precision(layer, policy):
    """Their squares are no float16: all that is kept is float32."""
    norm = numerics.make(layer, dtype=policy)
    for _ in range(3):
        y = norm((1000 + 300 * X).astype("float16"), training=True)
    assert keras.backend.standardize_dtype(y.dtype) == policy
    for variable in norm.weights:
        assert keras.backend.standardize_dtype(variable.dtype) == "float32"
        assert np.isfinite(numpy(variable)).all()
