"""Arguments of layers: those kept by a configuration, and wrong ones, by name.

Every wrong value of every argument: `tests/test_public_arguments.py`.
"""

import fractions
import inspect
import json
import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, ops

from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from keras_norms._checks import arguments
from tests.support.backend import BACKEND, numpy

NORMS = (CBN, NoisyBN, LpNorm)
# Other values than the defaults: those of all norms, and of each layer.
COMMON = {
    "axis": 1,
    "momentum": 0.9,
    "epsilon": 1e-2,
    "center": False,
    "scale": False,
    "synchronized": BACKEND != "torch",
    "beta_initializer": keras.initializers.Constant(0.1),
    "gamma_initializer": "zeros",
    "moving_mean_initializer": "ones",
    "beta_regularizer": "l2",
    "gamma_regularizer": keras.regularizers.L1(0.1),
    "beta_constraint": "non_neg",
    "gamma_constraint": keras.constraints.MaxNorm(2),
}
OWN = {
    CBN: {
        "rho": 0.5,
        "omega": 3.0,
        "decouple": False,
        "mean_gradient": "ratio",
        "moving_square_initializer": "zeros",
    },
    NoisyBN: {
        "mean_range": 0.7,
        "scale_range": 1.5,
        "mean_jitter": 0.2,
        "scale_jitter": 0.3,
        "noise_at_inference": True,
        "seed": 7,
        "moving_variance_initializer": "zeros",
    },
    LpNorm: {
        "p": 1.5,
        "norm_of": "centered",
        "moving_norm_initializer": keras.initializers.Constant(2),
    },
    WS: {"gain": True, "epsilon": 1e-3},
    CWN: {
        "scale": 2.0,
        "gain": True,
        "gain_initializer": keras.initializers.Constant(0.5),
        "epsilon": 1e-3,
    },
    WN: {"epsilon": 1e-3},
    FusedCBN: {},
}
norms = pytest.mark.parametrize("cls", NORMS)


def inner():
    return layers.Conv2D(4, 3, activation="relu", dtype="mixed_bfloat16")


def changed(cls):
    """Every argument of a layer, with another value than the default."""
    if cls in NORMS:
        return COMMON | OWN[cls] | {"dtype": "mixed_bfloat16"}
    if cls is FusedCBN:
        norm = CBN(rho=0.5, dtype="mixed_bfloat16")
        return {"layer": [inner(), inner()], "norm": norm}
    return {"layer": inner()} | OWN[cls]


@pytest.mark.parametrize("cls", OWN)
def test_a_configuration_has_every_argument(cls):
    given = changed(cls)
    named = set(inspect.signature(cls).parameters) - {"kwargs"}
    assert named == given.keys() - {"dtype"}
    layer = cls(**given, name="custom", trainable=False)
    default = cls(*(() if cls in NORMS else [layers.Conv2D(4, 3)])).get_config()
    config = layer.get_config()
    for name in given:
        same = name == "synchronized" and BACKEND == "torch"
        assert (config[name] == default[name]) == same, name

    text = json.dumps(keras.saving.serialize_keras_object(layer))
    again = keras.saving.deserialize_keras_object(json.loads(text))
    assert type(again) is cls
    assert again.get_config() == config
    assert cls.from_config(config).get_config() == config
    for name, value in OWN[cls].items():
        if name != "rho" and "_initializer" not in name:  # `rho` is a weight.
            assert getattr(again, name) == value
    registered = f"keras_norms>{cls.__name__}"
    assert keras.saving.get_registered_name(cls) == registered
    assert keras.saving.get_registered_object(registered) is cls


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (CBN, "gamma beta moving_mean moving_square average_weight rho learning_rate"),
        (NoisyBN, "gamma beta moving_mean moving_variance"),
        (lambda: NoisyBN(scale=False), "beta moving_mean moving_variance"),
        (LpNorm, "gamma beta moving_mean moving_norm"),
        (lambda: LpNorm(center=False), "gamma moving_mean moving_norm"),
        (lambda: WS(layers.Dense(3)), "kernel bias"),
        (lambda: WS(layers.Dense(3), gain=True), "gain kernel bias"),
        (lambda: CWN(layers.Dense(3)), "kernel bias"),
        (lambda: CWN(layers.Dense(3), gain=True), "gain kernel bias"),
        (lambda: WN(layers.Dense(3)), "gain kernel bias"),
    ],
)
def test_weights_by_name(make, names):
    layer = make()
    layer.build((None, 4))
    # Those that are trained come first.
    assert [v.name for v in layer.weights] == names.split()
    trained = {"gamma", "beta", "gain", "kernel", "bias"} & set(names.split())
    assert {v.name for v in layer.trainable_weights} == trained


@norms
def test_initializers(cls):
    names = [n for n in inspect.signature(cls).parameters if "_initializer" in n]
    assert len(names) == 4
    values = {name: keras.initializers.Constant(i) for i, name in enumerate(names, 2)}
    layer = cls(**values)
    layer.build((None, 3))
    for i, name in enumerate(names, 2):
        weight = getattr(layer, name.removesuffix("_initializer"))
        np.testing.assert_array_equal(numpy(weight), np.full(3, i))


@norms
def test_regularizers_and_constraints(cls):
    layer = cls(
        beta_initializer="ones",
        beta_regularizer=keras.regularizers.L2(0.25),
        gamma_regularizer=keras.regularizers.L1(0.5),
        beta_constraint="non_neg",
        gamma_constraint=keras.constraints.UnitNorm(axis=0),
    )
    layer.build((None, 4))
    assert float(numpy(sum(layer.losses))) == pytest.approx(4 * 0.25 + 4 * 0.5)
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    error = np.mean((numpy(model(x)) - x) ** 2)
    assert model.evaluate(x, x, verbose=0) == pytest.approx(error + 3, rel=1e-5)

    optimizer = keras.optimizers.SGD(2.0)
    slopes = [ops.ones(4), ops.ones(4)]
    optimizer.apply(slopes, [layer.beta, layer.gamma])
    np.testing.assert_array_equal(numpy(layer.beta), np.zeros(4))
    np.testing.assert_allclose(np.linalg.norm(numpy(layer.gamma)), 1, rtol=1e-5)


# Wrong arguments


def refusal(cls, name, value):
    """The message of the ValueError for a constructor argument."""
    given = {} if cls in NORMS else {"layer": layers.Dense(3)}
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        cls(**given, **{name: value})
    message = str(error.value)
    assert f"Received: {name}={value!r}" in message
    return message


# Argument, what it must be, and values that it is not.
WRONG = {
    CBN: [
        ("rho", "a number, positive", [0, -1.0, None, "1", True, 1j, np.inf, np.nan]),
        ("omega", "a number, non-negative", [-1e-9, [1.0], np.array([1.0])]),
        ("momentum", "non-negative and less than 1", [1, -0.1, math.nan, ()]),
        ("epsilon", "a number, positive", [0.0, -1e-5, "1", {}]),
        ("axis", "an integer", [None, 1.0, "1", True, (0, 1)]),
        ("center", "True or False", [None, 0, 1, "True"]),
        ("scale", "True or False", [None, 1.0, []]),
        ("decouple", "True or False", [0]),
        ("synchronized", "True or False", ["yes"]),
        ("mean_gradient", "one of 'shift', 'ratio'", ["Shift", "", None, 1, ["shift"]]),
    ],
    NoisyBN: [
        ("mean_range", "a number, non-negative", [-0.1, None, np.inf]),
        ("scale_range", "at least 1", [0.99, True, np.array([1.0, 2.0])]),
        ("mean_jitter", "a number, non-negative", [-1, "1"]),
        ("scale_jitter", "a number, non-negative", [-1e-9, np.nan]),
        ("noise_at_inference", "True or False", [1, None]),
        ("seed", "an integer", [1.0, "1", True, -1, 2**31]),
        ("momentum", "less than 1", [1.0]),
        ("epsilon", "positive", [0.0]),
        ("axis", "an integer", [1.0]),
    ],
    LpNorm: [
        (
            "p",
            "at least 1, `math.inf` included",
            [0.99, None, "Inf", True, 2j, -np.inf],
        ),
        ("p", "at least 1, `math.inf` included", [np.nan, np.array([2.0]), object]),
        ("norm_of", "one of 'input', 'centered'", ["Input", "", None, True]),
        ("momentum", "less than 1", [1]),
        ("epsilon", "positive", [-1e-5]),
        ("axis", "an integer", ["1"]),
    ],
    WS: [("epsilon", "positive", [0]), ("gain", "True or False", [None, 1, "yes"])],
    CWN: [
        ("epsilon", "positive", [-1e-5, None, True]),
        ("scale", "positive", [0, -1.0, None, True, np.nan]),
        ("gain", "True or False", [0]),
    ],
    WN: [("epsilon", "positive", ["1", np.nan, np.inf])],
}


@pytest.mark.parametrize(
    ("cls", "name", "expected", "values"),
    [(cls, *wrong) for cls, cases in WRONG.items() for wrong in cases],
)
def test_a_wrong_argument_says_what_it_must_be(cls, name, expected, values):
    for value in values:
        assert expected in refusal(cls, name, value)


@norms
def test_unknown_objects_are_refused(cls):
    for name in COMMON:
        if name.startswith(("beta", "gamma", "moving")):
            assert "of Keras" in refusal(cls, name, "no_such_thing")
    with pytest.raises(ValueError, match="no_such_thing"):
        cls(no_such_thing=1)
    if BACKEND == "torch":
        assert "PyTorch" in refusal(cls, "synchronized", True)


@settings(deadline=None)
@given(
    rho=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    omega=st.floats(min_value=0, allow_infinity=False),
    momentum=st.floats(min_value=0, max_value=1, exclude_max=True),
    p=st.floats(min_value=1),
)
def test_every_number_in_range_is_stored_unchanged(rho, omega, momentum, p):
    layer = CBN(rho=rho, omega=omega, momentum=momentum, epsilon=rho)
    config = layer.get_config()
    assert (config["rho"], config["epsilon"]) == (rho, rho)
    assert (layer.omega, layer.momentum) == (omega, momentum)
    layer = LpNorm(p)
    assert layer.p == LpNorm.from_config(layer.get_config()).p == p


def test_numbers_may_be_of_any_kind():
    layer = CBN(np.int64(1), rho=2, omega=np.float32(0.5), epsilon=np.float64(1e-3))
    found = [layer.get_config()[name] for name in ("axis", "rho", "omega")]
    assert found == [1, 2.0, 0.5]
    assert all(type(value) in (int, float) for value in found)
    numbers = [np.float32(np.inf), np.int64(3), fractions.Fraction(3, 2)]
    for value, expected in zip(numbers, [math.inf, 3.0, 1.5]):
        p = LpNorm(value).p
        assert type(p) is float and p == expected
    assert type(NoisyBN(seed=np.int64(3)).get_config()["seed"]) is int


# Wrong inputs


@settings(deadline=None)
@given(rank=st.integers(2, 5), axis=st.integers(-7, 6), cls=st.sampled_from(NORMS))
def test_axis_must_be_one_of_the_input(rank, axis, cls):
    shape = tuple(range(3, 3 + rank))
    if -rank <= axis < rank:
        assert arguments.channels(cls(axis=axis), shape) == shape[axis]
        return
    expected = (
        rf"`axis` must be an axis of the input, .*{-rank} to {rank - 1}. "
        rf"Received: axis={axis} with input_shape=\("
    )
    for use in (cls(axis=axis).build, cls(axis=axis).compute_output_shape):
        with pytest.raises(ValueError, match=expected):
            use(shape)


@norms
def test_inputs_that_do_not_fit(cls):
    with pytest.raises(ValueError, match="`axis`.*known.*axis=1.*None, None, 3"):
        cls(axis=1)(keras.Input((None, 3)))
    for shape in ((), (4,)):
        expected = r"'few'.*rank 2 or more.*Received: input_shape="
        with pytest.raises(ValueError, match=expected):
            cls(name="few")(np.zeros(shape, "float32"))
    layer = cls()
    layer.build((2, 3))
    with pytest.raises(ValueError, match="expected axis -1 .* value 3.*shape .2, 4"):
        layer(np.zeros((2, 4), "float32"))
    x, mask = np.ones((4, 6, 3), "float32"), np.ones((4, 5), bool)
    with pytest.raises(ValueError, match="`mask`.*Received: mask.shape=.4, 5"):
        cls()(x, training=True, mask=mask)


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


@pytest.mark.parametrize("mask", [(3,), (2, 6), (2, 3, 5), (2, 3, 4, 5, 1)])
def test_a_mask_of_another_shape_is_refused(mask):
    with pytest.raises(ValueError, match="`mask` must have the shape") as error:
        mask_shape(mask, (2, 3, 4, 5), -1)
    assert f"mask.shape={mask}, inputs.shape=(2, 3, 4, 5)" in str(error.value)
