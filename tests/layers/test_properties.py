"""What holds for every batch, every weight and every state, on every backend.

Each training step equals the float64 reference of its formulas, so that backends and
modes equal each other. Elsewhere: what every version and backend has written
(`tests/test_golden.py`).

`--hypothesis-profile=many` has twenty times the examples of each.
"""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_norms import CBN, CWN, WN, WS, FusedCBN
from tests.support.any_layer import (
    CHANNELS,
    call,
    case,
    example,
    last,
    reference_of,
    slope_of,
    step_of,
)
from tests.support.autodiff import FAST, compiled, training_step
from tests.support.backend import numpy, thorough_on

# The default profile of Hypothesis has 100, of which backends would compile too many.
few = settings(deadline=None, max_examples=max(settings.default.max_examples // 20, 1))
fewer = settings(few, max_examples=max(few.max_examples // 2, 1))
FORMS = ("CBN", "CBN(ratio)", "CBN(coupled)", "NoisyBN", "LpNorm(1)", "LpNorm(inf)")
FORMS += ("LpNorm(2.5, centered)",)
DENSE = (6, 4)
forms, seeds = st.sampled_from(FORMS), st.integers(0, 2**32 - 1)
# A rate of CBN, for `eta` from 1 to 0; unknown where it is negative.
rates = st.sampled_from([-1.0, 0.2]) | st.floats(1e-4, 0.1)


def vectors(form, **arguments):
    """One shape for all examples, which is compiled once."""
    return case(form, DENSE, **{"axis": -1, **arguments})


def assert_near(actual, expected, size=1.0, bound=3e-5):
    """The deviation is small next to the largest expected number, or to `size`."""
    limit = bound * max(np.abs(expected).max(), size)
    assert np.abs(np.asarray(actual, "float64") - expected).max() <= limit


def assert_is_reference(each, seed, rate, bound=3e-5):
    """Outputs, gradients, state, and inference after it: on each backend the same."""
    x, start = example(each, seed, rate, hard=True)
    each.assign(start)
    reference, values = reference_of(each), each.values(x)
    y = reference.train(values)
    gradients = reference.gradients(slope_of(each) + y, values)
    actual, *found = step_of(each)(x)
    assert_near(actual, y, bound=bound)
    size = sizes(slope_of(each), y, last(each, x))
    for value, (name, expected) in zip(found, gradients.items(), strict=True):
        assert_near(value, expected, size[name], bound)
    state = each.state()
    for name, expected in reference.state().items():
        assert_near(state[name], expected, np.abs(x).max(), bound)
    y, _ = call(each, x)
    assert_near(y, reference.inference(values), bound=bound)


def sizes(g, y, x):
    """Of what the gradients of x, gamma and beta are differences of."""
    largest = np.abs(g + y).max()
    sums = largest * x[..., 0].size
    # One element has no deviation.
    slope = largest * np.abs(y).max() / (np.abs(x - x.mean()).max() or 1)
    return {
        "x": slope,
        "gamma": sums * np.abs(y).max(),
        "beta": sums * max(np.abs(y).max(), 1),
    }


# In `make test`, `test_every_layer` has each form in some states.
@pytest.mark.thorough
@few
@given(form=st.sampled_from(list(CHANNELS)), seed=seeds, rate=rates)
def test_a_step_is_that_of_the_formulas(form, seed, rate):
    assert_is_reference(case(form), seed, rate)


SHAPES = st.integers(2, 5).flatmap(lambda rank: st.tuples(*[st.integers(1, 4)] * rank))


# Each example is compiled.
@pytest.mark.parametrize("_", [pytest.param(0, marks=thorough_on("jax"))])
@fewer
@given(form=forms, shape=SHAPES, axis=st.integers(0, 4), p=st.floats(1, 20), seed=seeds)
def test_any_shape_any_axis_and_any_norm(_, form, shape, axis, p, seed):
    norm = {"p": p} if form == "LpNorm(2.5, centered)" else {}
    # Where a channel is constant, epsilon is all that it is divided by.
    each = case(form, shape, axis=axis % len(shape), epsilon=0.1, **norm)
    assert_is_reference(each, seed, 0.03, bound=1e-4)


def moved(values, **changes):
    return {k: changes.get(k, lambda v: v)(v) for k, v in values.items()}


def outcome(each, values, x):
    """The output in training, the state after it, and the output at inference."""
    each.assign(values)
    y = step_of(each)(x)[0]
    return y, each.state(), call(each, x)[0]


@few
@given(
    form=st.sampled_from([f for f in FORMS if f not in ("LpNorm(1)", "LpNorm(inf)")]),
    seed=seeds,
    rate=rates,
    shift=st.floats(-16, 16, width=16),
)
def test_a_shift_does_not_matter(form, seed, rate, shift):
    """Of the batch and what the layer remembers of means. LpNorm of inputs has no such
    property, for their norm depends on their mean."""
    each = vectors(form)
    x, values = example(each, seed, rate, hard=True)
    y, state, after = outcome(each, values, x)
    there = moved(values, moving_mean=lambda v: v + np.float32(shift))
    actual, shifted, later = outcome(each, there, x + np.float32(shift))
    size = np.abs(y).max() * (1 + abs(shift) / x.std())
    assert_near(actual, y, size)
    assert_near(later, after, size)
    assert_near(shifted["moving_mean"], state["moving_mean"] + shift, abs(shift))


@few
@given(
    form=forms, seed=seeds, rate=rates, scale=st.sampled_from([-8, -0.5, -1, 0.3, 7])
)
def test_a_scale_does_not_matter(form, seed, rate, scale):
    """Of the batch and of what has its unit; only the sign remains.

    `beta` has the unit of the input where it is added before the division.
    """
    each = vectors(form, epsilon=1e-12)
    x, values = example(each, seed, rate, hard=True)
    y, _, after = outcome(each, values, x)
    inside = isinstance(each.layer, CBN) and each.layer.decouple
    unit, sign = np.float32(scale), np.float32(np.sign(scale))
    there = moved(
        values,
        beta=lambda v: v * (unit if inside else sign),
        moving_mean=lambda v: v * unit,
        moving_square=lambda v: v * unit**2,
        moving_variance=lambda v: v * unit**2,
        moving_norm=lambda v: v * abs(unit),
    )
    actual, _, later = outcome(each, there, x * unit)
    assert_near(actual, sign * y)
    assert_near(later, sign * after)


@few
@given(form=forms, seed=seeds, rate=rates)
def test_channels_do_not_know_each_other(form, seed, rate):
    """Permuted, with their weights and state, they give the same, permuted."""
    each = case(form)
    x, values = example(each, seed, rate, hard=True)
    order = np.random.default_rng(seed).permutation(each.channels)
    each.assign(values)
    y, dx, *rest = step_of(each)(x)
    state = each.state()
    each.assign({k: v[order] if v.ndim else v for k, v in values.items()})
    actual = step_of(each)(x.take(order, each.axis))
    expected = y.take(order, each.axis), dx.take(order, each.axis)
    expected = *expected, *(v[order] for v in rest)
    for found, wanted in zip(actual, expected, strict=True):
        assert_near(found, wanted)
    for name, found in each.state().items():
        assert_near(found, state[name][order] if found.ndim else state[name])


@few
@given(form=forms, seed=seeds, rate=rates)
def test_identical_batches_make_inference_what_training_is(form, seed, rate):
    """CBN's averages are debiased: one batch is enough, at any rate. Others need as
    many as their momentum takes; here half of the difference is left by each."""
    each = vectors(form)
    x, values = example(each, seed, rate, hard=True)
    if isinstance(each.layer, CBN):
        values["average_weight"] = np.float32(0)
    each.assign(values)
    for _ in range(1 if isinstance(each.layer, CBN) else 30):
        y = step_of(each)(x)[0]
    # The difference that is left counts as much as the statistics did at the start.
    assert_near(call(each, x)[0], y, np.abs(y).max(), 1e-4)


@functools.cache
def masked_step_of(each):
    return training_step(each.layer, ops.sum, FAST)


@few
@given(
    form=forms,
    seed=seeds,
    rate=rates,
    rows=st.permutations(range(6)),
    kept=st.integers(1, 6),
)
def test_what_is_masked_is_not_there(form, seed, rate, rows, kept):
    """Whatever it holds, the rest is as it is without."""
    each = vectors(form)
    x, values = example(each, seed, rate, hard=True)
    mask = np.isin(np.arange(6), rows[:kept])
    noise = np.random.default_rng(seed).normal(size=x.shape) * 1e3
    results = []
    for batch in (x, np.where(mask[:, None], x, noise).astype("float32")):
        each.assign(values)
        reference = reference_of(each)
        y = masked_step_of(each)(batch, mask=mask)[0][mask]
        results.append((y, *each.state().values()))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
    # By the formulas: each number of samples would be compiled.
    assert_near(results[0][0], reference.train(each.values(x[mask])))


@functools.cache
def fused_pair():
    pair = keras.Sequential([CBN(), keras.layers.Dense(3, activation="tanh")])
    pair.build((6, 4))
    fused = FusedCBN(keras.layers.Dense(3, activation="tanh"), CBN())
    fused.build((6, 4))
    steps = [training_step(each, ops.sum, FAST) for each in (pair, fused)]
    return pair, fused, steps


@few
@given(seed=seeds, rate=rates)
def test_fused_is_both(seed, rate):
    pair, fused, (plain, at_once) = fused_pair()
    x, values = example(vectors("CBN"), seed, rate, hard=True)
    kernel = np.random.default_rng(seed).normal(size=(4, 3))
    for norm, dense in (pair.layers, (fused.norm, fused.layers[0])):
        for name, value in values.items():
            getattr(norm, name).assign(value)
        dense.kernel.assign(kernel)
    y, *gradients = plain(x)
    actual, *found = at_once(x)
    assert_near(actual, y)
    largest = max(np.abs(g).max() for g in gradients)
    for each, expected in zip(found, gradients, strict=True):
        assert_near(each, expected, largest)
    for each, expected in zip(fused.get_weights(), pair.get_weights(), strict=True):
        assert_near(each, expected)


WRAPPERS = {
    "WS": functools.partial(WS, gain=True, epsilon=1e-12),
    "CWN": functools.partial(CWN, scale=2.0, gain=True, epsilon=1e-12),
    "WN": functools.partial(WN, epsilon=1e-12),
}


@functools.cache
def wrapped(name):
    """The layer, and its output for an input, a kernel and a gain."""
    layer = WRAPPERS[name](keras.layers.Dense(3))
    layer.build((5, 6))
    # The order of its variables differs from wrapper to wrapper.
    variables = layer.trainable_variables
    names = [v.name for v in variables]

    def call(training, x, **values):
        parameters = [values[n] for n in names]
        return layer.stateless_call(parameters, [], x, training=training)[0]

    functions = [
        compiled(functools.partial(_positional, call, training, names), FAST)
        for training in (True, False)
    ]

    def outputs(x, training=True, **values):
        arguments = [ops.convert_to_tensor(values[n], "float32") for n in names]
        function = functions[not training]
        return numpy(function(ops.convert_to_tensor(x, "float32"), *arguments))

    return outputs


def _positional(call, training, names, x, *arguments):
    return call(training, x, **dict(zip(names, arguments)))


@few
@given(
    name=st.sampled_from(list(WRAPPERS)),
    seed=seeds,
    scale=st.floats(0.1, 10),
    shift=st.floats(-4, 4),
    inputs=st.permutations(range(6)),
    units=st.permutations(range(3)),
)
def test_normalized_kernels(name, seed, scale, shift, inputs, units):
    """Size and mean of a unit do not matter (to WN, the size); order is kept."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(5, 6))
    values = {"kernel": rng.normal(size=(6, 3)), "gain": rng.normal(size=3)}
    values["bias"] = rng.normal(size=3)
    outputs = wrapped(name)
    y = outputs(x, **values)
    np.testing.assert_array_equal(outputs(x, training=False, **values), y)
    there = values["kernel"] * scale + shift * (name != "WN")
    size = np.abs(y).max() * (1 + abs(shift) / scale)
    assert_near(outputs(x, **{**values, "kernel": there}), y, size)
    permuted = {k: v[..., units] for k, v in values.items()}
    permuted["kernel"] = permuted["kernel"][inputs, :]
    assert_near(outputs(x[:, inputs], **permuted), y[:, units])
