"""What holds for every batch, every weight and every state, on every backend.

Each training step equals the float64 reference of its formulas, so that backends and
modes equal each other, and what the formulas promise (a shift or a scale of the batch
does not matter, channels do not know each other) holds.

`--hypothesis-profile=many` has twenty times the examples of each.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.support.backend import later_on_jax

# The default profile of Hypothesis has 100, of which backends would compile too many.
few = settings(deadline=None, max_examples=max(settings.default.max_examples // 20, 1))
fewer = settings(few, max_examples=max(few.max_examples // 2, 1))
forms, seeds = st.sampled_from(list(CHANNELS)), st.integers(0, 2**32 - 1)
# A rate of CBN, for `eta` from 1 to 0; unknown where it is negative.
rates = st.sampled_from([-1.0, 0.2]) | st.floats(1e-4, 0.1)


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
@given(form=forms, seed=seeds, rate=rates)
def test_a_step_is_that_of_the_formulas(form, seed, rate):
    assert_is_reference(case(form), seed, rate)


SHAPES = st.integers(2, 5).flatmap(lambda rank: st.tuples(*[st.integers(1, 4)] * rank))


# Each example is compiled.
@later_on_jax
@fewer
@given(form=forms, shape=SHAPES, axis=st.integers(0, 4), p=st.floats(1, 20), seed=seeds)
def test_any_shape_any_axis_and_any_norm(form, shape, axis, p, seed):
    norm = {"p": p} if form == "LpNorm(2.5, centered)" else {}
    # Where a channel is constant, epsilon is all that it is divided by.
    each = case(form, shape, axis=axis % len(shape), epsilon=0.1, **norm)
    assert_is_reference(each, seed, 0.03, bound=1e-4)
