"""The arguments of LpNorm: a wrong one says what it is, what it got and what fits."""

import fractions
import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_norms import LpNorm


def refusal(name, value):
    """The message of the ValueError for a constructor argument."""
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        LpNorm(**{name: value})
    message = str(error.value)
    assert f"Received: {name}={value!r}" in message
    return message


WRONG = [None, "1", "", "Inf", [1.0], (), {}, True, False, 2j, object, 0, -np.inf]
WRONG += [np.nan, np.array([2.0]), np.array([1.0, 2.0]), np.array("inf")]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_p_must_be_a_number(value):
    assert "at least 1, `math.inf` included" in refusal("p", value)


@settings(deadline=None)
@given(value=st.floats(max_value=1, exclude_max=True))
def test_p_must_be_at_least_1(value):
    assert "at least 1, `math.inf` included" in refusal("p", value)


@settings(deadline=None)  # The first layer of a process takes seconds.
@given(value=st.floats(min_value=1))
def test_every_p_in_range_is_kept(value):
    layer = LpNorm(value)
    assert layer.p == value
    assert LpNorm.from_config(layer.get_config()).p == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("inf", math.inf),
        (np.float32(np.inf), math.inf),
        (np.int64(3), 3.0),
        (fractions.Fraction(3, 2), 1.5),
    ],
)
def test_p_may_be_any_kind_of_number(value, expected):
    p = LpNorm(value).p
    assert type(p) is float and p == expected


@pytest.mark.parametrize("value", ["Input", "", None, 1, True, ["input"]], ids=repr)
def test_norm_of_is_one_of_two(value):
    assert "must be one of 'input', 'centered'" in refusal("norm_of", value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("momentum", 1, "less than 1"),
        ("momentum", -0.1, "non-negative"),
        ("momentum", math.nan, "must be a number"),
        ("epsilon", 0, "positive"),
        ("epsilon", -1e-5, "positive"),
        ("epsilon", "1", "must be a number"),
    ],
)
def test_values_out_of_range(name, value, expected):
    assert expected in refusal(name, value)


def test_weights_by_name():
    layer = LpNorm()
    layer.build((None, 3))
    names = ["gamma", "beta", "moving_mean", "moving_norm"]
    assert [v.name for v in layer.weights] == names
    assert [v.name for v in layer.trainable_weights] == names[:2]


def test_the_norm_is_that_of_the_input_by_default():
    """Santurkar et al. remove the mean after the norm is taken."""
    x = np.array([[1.0], [2.0], [6.0]], "float32")
    for p, norm in ((1, 3), (2, np.sqrt(41 / 3)), (np.inf, 6)):
        y = keras.ops.convert_to_numpy(LpNorm(p)(x, training=True))
        np.testing.assert_allclose(y, (x - 3) / norm, rtol=1e-5)
