"""A wrong argument of CBN says what it is, what it got and what is possible."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_norms import CBN
from keras_norms._checks import arguments


def refusal(name, value):
    """The message of the ValueError that CBN raises for a constructor argument."""
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        CBN(**{name: value})
    message = str(error.value)
    assert f"Received: {name}={value!r}" in message
    return message


NOT_NUMBERS = [None, "1", "", [1.0], (), {}, True, False, 1j, np.inf, -np.inf, np.nan]
NOT_NUMBERS += [np.array([1.0]), object]


@pytest.mark.parametrize("name", ["rho", "omega", "momentum", "epsilon"])
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_numbers_must_be_finite_real_numbers(name, value):
    assert "must be a number" in refusal(name, value)


@given(value=st.floats(max_value=0, allow_infinity=False))
@pytest.mark.parametrize("name", ["rho", "epsilon"])
def test_positive_numbers(name, value):
    assert "positive" in refusal(name, value)


@given(value=st.floats(max_value=0, exclude_max=True, allow_infinity=False))
def test_omega_is_not_negative(value):
    assert "non-negative" in refusal("omega", value)


@given(
    value=st.floats(max_value=0, exclude_max=True, allow_infinity=False)
    | st.floats(min_value=1, allow_infinity=False)
)
def test_momentum_is_from_0_to_less_than_1(value):
    message = refusal("momentum", value)
    assert "non-negative" in message
    assert "less than 1" in message


@settings(deadline=None)  # The first layer of a process takes seconds.
@given(
    rho=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    omega=st.floats(min_value=0, allow_infinity=False),
    momentum=st.floats(min_value=0, max_value=1, exclude_max=True),
)
def test_every_number_in_range_is_stored_unchanged(rho, omega, momentum):
    layer = CBN(rho=rho, omega=omega, momentum=momentum, epsilon=rho)
    assert layer.get_config()["rho"] == rho
    assert layer.get_config()["epsilon"] == rho
    assert (layer.omega, layer.momentum) == (omega, momentum)


def test_numbers_may_be_integers_or_numpy_scalars():
    layer = CBN(
        axis=np.int64(1), rho=2, omega=np.float32(0.5), epsilon=np.float64(1e-3)
    )
    config = layer.get_config()
    assert [config[name] for name in ("axis", "rho", "omega")] == [1, 2.0, 0.5]
    assert all(type(config[name]) in (int, float) for name in ("axis", "rho", "omega"))


@pytest.mark.parametrize("value", [None, 1.0, "1", True, [1], (0, 1)], ids=repr)
def test_axis_is_an_integer(value):
    assert "must be an integer" in refusal("axis", value)


@pytest.mark.parametrize("name", ["center", "scale", "decouple", "synchronized"])
@pytest.mark.parametrize("value", [None, 0, 1, 1.0, "True", []], ids=repr)
def test_switches_are_booleans(name, value):
    assert "must be True or False" in refusal(name, value)


@pytest.mark.parametrize("value", ["Shift", "", None, 1, True, ["shift"], {}], ids=repr)
def test_mean_gradient_is_one_of_two(value):
    assert "must be one of 'shift', 'ratio'" in refusal("mean_gradient", value)


@pytest.mark.parametrize(
    "name",
    [
        "beta_initializer",
        "gamma_initializer",
        "moving_mean_initializer",
        "moving_square_initializer",
        "beta_regularizer",
        "gamma_regularizer",
        "beta_constraint",
        "gamma_constraint",
    ],
)
def test_unknown_objects_are_refused(name):
    with pytest.raises(ValueError, match="no_such_thing"):
        CBN(**{name: "no_such_thing"})


def test_an_unknown_argument_is_refused():
    with pytest.raises(ValueError, match="no_such_thing"):
        CBN(no_such_thing=1)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="others synchronize")
def test_synchronized_is_refused_on_torch():
    assert "PyTorch" in refusal("synchronized", True)


@given(rank=st.integers(2, 5), axis=st.integers(-7, 6))
def test_axis_must_be_one_of_the_input(rank, axis):
    shape = tuple(range(3, 3 + rank))
    if -rank <= axis < rank:
        assert arguments.channels(CBN(axis), shape) == shape[axis]
        return
    expected = (
        rf"`axis` must be an axis of the input, .*{-rank} to {rank - 1}. "
        rf"Received: axis={axis} with input_shape=\("
    )
    with pytest.raises(ValueError, match=expected):
        CBN(axis).build(shape)
    with pytest.raises(ValueError, match=expected):
        CBN(axis).compute_output_shape(shape)


def test_axis_must_have_a_known_size():
    with pytest.raises(ValueError, match="`axis`.*known.*axis=1.*None, None, 3"):
        CBN(axis=1)(keras.Input((None, 3)))


@pytest.mark.parametrize("shape", [(), (4,)])
def test_inputs_have_rank_2_or_more(shape):
    with pytest.raises(
        ValueError, match=r"'few'.*rank 2 or more.*Received: input_shape="
    ):
        CBN(name="few")(np.zeros(shape, "float32"))


def test_a_built_layer_refuses_another_number_of_channels():
    layer = CBN()
    layer(np.zeros((2, 3), "float32"))
    with pytest.raises(ValueError, match="expected axis -1 .* value 3.*shape .2, 4"):
        layer(np.zeros((2, 4), "float32"))


def mask_shape(mask, inputs, axis):
    """The shape that a mask gets for inputs of a shape."""
    mask = arguments.broadcast_mask(
        ops.ones(mask, "bool"), ops.zeros(inputs), axis % len(inputs)
    )
    assert keras.backend.standardize_dtype(mask.dtype) == "bool"
    return tuple(mask.shape)


@pytest.mark.parametrize(
    ("mask", "axis", "expected"),
    [
        ((2,), -1, (2, 1, 1, 1)),
        ((2, 3), -1, (2, 3, 1, 1)),
        ((2, 3, 4), -1, (2, 3, 4, 1)),
        ((2, 3, 4, 5), -1, (2, 3, 4, 5)),
        ((1, 3, 1, 5), -1, (1, 3, 1, 5)),
        ((2,), 1, (2, 1, 1, 1)),
        ((2, 4), 1, (2, 1, 4, 1)),
        ((2, 4, 5), 1, (2, 1, 4, 5)),
        ((2, 3), 1, (2, 3, 1, 1)),
    ],
)
def test_a_mask_is_of_positions_or_broadcasts(mask, axis, expected):
    assert mask_shape(mask, (2, 3, 4, 5), axis) == expected


@pytest.mark.parametrize(
    "mask", [(3,), (2, 6), (2, 3, 5), (2, 3, 4, 6), (2, 3, 4, 5, 1)]
)
def test_a_mask_of_another_shape_is_refused(mask):
    with pytest.raises(ValueError, match="`mask` must have the shape") as error:
        mask_shape(mask, (2, 3, 4, 5), -1)
    assert f"mask.shape={mask}, inputs.shape=(2, 3, 4, 5)" in str(error.value)
