"""Hard inputs: errors of outputs and gradients, and what must stay clean."""

import functools

import keras
import numpy as np
import pytest

from keras_norms import CBN
from tests.programs import numerics
from tests.support.autodiff import BACKEND, training_step

# Largest errors of an output and of a gradient in a dtype; of float32, that of all
# tests of layers. TensorFlow comes to 2e-6 on a CPU, the others to 5e-7.
ROUNDING = {"float32": 1e-5, "mixed_float16": 2e-3, "mixed_bfloat16": 2e-2}
ROUNDING["float64"] = 1e-5 if BACKEND == "jax" else 1e-12
# A selection that compiles quickly: `python -m tests.programs.numerics` has all.
MODE = "jit_compile" if BACKEND == "jax" else "eager"
OURS = ["CBN", "CBN, coupled, ratio", "NoisyBN", "LpNorm 1", "LpNorm 2"]
OURS += ["LpNorm inf, centered"]
layers = pytest.mark.parametrize("layer", OURS)
# The squares of 1e18, added up, are no float32.
CASES = numerics.CASES.keys() - {"deviation 1e18"}


@functools.cache
def largest_errors(layer, case):
    return numerics.errors(layer, case, mode=MODE).max(0)


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize(
    "layer", ["CBN", "NoisyBN", "LpNorm 1", "LpNorm inf, centered"]
)
def test_errors(layer, case):
    # A mean is rounded by half of its last bit at most, in units of the deviation.
    mean = float(case.split("= ")[1]) if case.startswith("mean /") else 1.0
    bound = max(ROUNDING[numerics.CASES[case][1]], mean * 2**-24)
    bounds = np.array([bound, bound])
    if mean > 1 and layer == "LpNorm inf, centered":
        # One element receives the sum over the channel, with what its rounding moved.
        bounds[1] = 1e-3
    assert np.all(largest_errors(layer, case) <= bounds)


@pytest.mark.parametrize("layer", [*OURS[:-1], "CBN, rate unknown", "LpNorm inf"])
def test_inputs_that_move(layer):
    """What came before may not be seen in the digits of a step."""
    means = {"1e+02": 1e2, "1e+03": 1e3, "1e+04": 1e4, "to 1e-5": 1e5, "turns": 1e2}
    means |= {"mean 1e4, then 0": 1e4, "mean 3e4 once": 3e4}
    for case in numerics.SEQUENCES:
        mean = max(v for k, v in (means | {"": 1.0}).items() if k in case)
        bound = max(ROUNDING["float32"], mean * 2**-24)
        assert numerics.errors(layer, case, mode=MODE).max() <= bound, case


@pytest.mark.parametrize("layer", numerics.WEIGHTS)
def test_errors_of_kernels(layer):
    for case, (_, policy) in numerics.CASES.items():
        if case in ("denormal", "one sample"):  # nearly 0: the gradient, the output
            continue
        found = numerics.errors(layer, case, steps=1, mode=MODE)
        assert found.max() <= ROUNDING[policy], case


@layers
def test_nothing_becomes_nan_where_squares_are_too_large(layer):
    assert np.isfinite(numerics.errors(layer, "deviation 1e18", mode=MODE)).all()


# A channel with a bad element, and positions that a mask hides.
SHAPE = (12, 4, 3)
RNG = np.random.default_rng(0)
X = RNG.normal(1, 2, SHAPE).astype("float32")
G = RNG.normal(size=SHAPE).astype("float32")
VISIBLE = RNG.random(SHAPE[:-1]) < 0.6
MASKS = {"none": None, "some": VISIBLE, "all": np.zeros_like(VISIBLE)}
OTHERS = [0, 2]


@pytest.mark.skipif(BACKEND == "jax", reason="float64 is a process-wide switch of JAX")
@pytest.mark.parametrize("layer", ["CBN", "NoisyBN", "LpNorm 2"])
def test_squares_have_more_room_in_float64(layer):
    layer = numerics.LAYERS[layer][0](dtype="float64")
    wide = X.astype("float64")
    small, large = (layer(scale * wide, training=True) for scale in (1e8, 1e30))
    np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (small, large)))


@functools.cache
def steps(name, hidden):
    """A layer after one step, its state then, and the step with a mask."""
    layer = numerics.LAYERS[name][0]()
    layer.build(SHAPE)
    layer.beta.assign([0.3, -0.2, 0.1])
    if isinstance(layer, CBN):
        layer.set_learning_rate(numerics.RATE)
    layer(X, training=True)
    mask = MASKS[hidden]
    g = G if mask is None else np.where(mask[..., None], G, 0)
    arguments = {} if mask is None else {"mask": keras.ops.convert_to_tensor(mask)}

    def loss(y):
        return keras.ops.sum(y * keras.ops.convert_to_tensor(g))

    return layer, state(layer), training_step(layer, loss, MODE, **arguments)


def state(layer):
    return [keras.ops.convert_to_numpy(v) for v in layer.non_trainable_variables]


def results(name, x, hidden="none"):
    """Output, gradients of input and weights, and the state after the step."""
    layer, start, step = steps(name, hidden)
    for variable, value in zip(layer.non_trainable_variables, start):
        variable.assign(value)
    values = step(x.astype("float32"))
    return values, state(layer)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@layers
def test_a_bad_channel_stays_alone(layer, bad):
    x = X.copy()
    x[3, 2, 1] = bad
    (clean, clean_state), (found, found_state) = (results(layer, v) for v in (X, x))
    for value, wanted in zip((*found, *found_state), (*clean, *clean_state)):
        channels = (..., OTHERS) if wanted.shape[-1:] == (3,) else ...
        np.testing.assert_array_equal(value[channels], wanted[channels])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@layers
def test_a_bad_batch_is_forgotten(layer, bad):
    """Its output shows it; statistics and the batches after it do not."""
    x = 2 * X + 1
    x[3, 2, 1] = bad
    norm, before, step = steps(layer, "none")
    (y, *_), after = results(layer, x)
    assert np.isnan(y[..., 1]).any()
    for variable, value, wanted in zip(norm.non_trainable_variables, after, before):
        if variable.shape == (3,):
            np.testing.assert_array_equal(value[1], wanted[1])
            assert np.all(value[OTHERS] != wanted[OTHERS])
    assert all(np.isfinite(value).all() for value in step(X))
    everywhere = results(layer, np.full_like(X, bad))[1]
    for variable, value, wanted in zip(
        norm.non_trainable_variables, everywhere, before
    ):
        if "seed" not in variable.path:
            np.testing.assert_array_equal(value, wanted)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@layers
def test_statistics_of_large_activations_in_half_precision(layer, policy):
    """Their squares are no float16: all that is kept is float32."""
    norm = numerics.LAYERS[layer][0](dtype=policy)
    x = (1000 + 300 * X).astype("float16")
    for _ in range(3):
        y = norm(x, training=True)
    assert keras.backend.standardize_dtype(y.dtype) == policy
    for variable in norm.weights:
        if "seed" not in variable.path:
            assert keras.backend.standardize_dtype(variable.dtype) == "float32"
            assert np.isfinite(keras.ops.convert_to_numpy(variable)).all()


@layers
def test_hidden_elements_may_be_anything(layer):
    visible = VISIBLE[..., None]
    clean, clean_state = results(layer, np.where(visible, X, 0), "some")
    assert all(np.isfinite(value).all() for value in clean)
    for hidden in (np.nan, np.inf, 1e38):
        found, found_state = results(layer, np.where(visible, X, hidden), "some")
        found = np.where(visible, found[0], clean[0]), *found[1:]
        for value, wanted in zip((*found, *found_state), (*clean, *clean_state)):
            np.testing.assert_array_equal(value, wanted)


@layers
def test_a_mask_that_hides_everything(layer):
    """No statistic moves, and everything is a number."""
    values, after = results(layer, X, "all")
    assert all(np.isfinite(value).all() for value in values)
    norm, before, _ = steps(layer, "all")
    for variable, value, wanted in zip(norm.non_trainable_variables, after, before):
        if "seed" not in variable.path:
            np.testing.assert_array_equal(value, wanted)
    outputs = [
        keras.ops.convert_to_numpy(norm(X, training=False, mask=mask))
        for mask in (None, MASKS["all"])
    ]
    np.testing.assert_array_equal(*outputs)
    if isinstance(norm, CBN):  # what was seen before is all it has
        np.testing.assert_allclose(values[0], outputs[0], rtol=1e-5, atol=1e-6)
