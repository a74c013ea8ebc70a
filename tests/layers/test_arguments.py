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
from keras import layers, ops

from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from keras_norms._checks import arguments
from tests.support.backend import numpy

NORMS = (CBN, NoisyBN, LpNorm)
# Other values than the defaults: those of all norms, and of each layer.
COMMON = {
    "axis": 1,
    "momentum": 0.9,
    "epsilon": 1e-2,
    "center": False,
    "scale": False,
    "synchronized": True,
    "group_size": 3,
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


def changed(cls, but="group_size"):
    """Every argument of a layer but one, with another value than the default."""
    if cls in NORMS:
        given = COMMON | OWN[cls] | {"dtype": "mixed_bfloat16"}
        return {name: value for name, value in given.items() if name != but}
    if cls is FusedCBN:
        norm = CBN(rho=0.5, dtype="mixed_bfloat16")
        return {"layer": [inner(), inner()], "norm": norm}
    return {"layer": inner()} | OWN[cls]


@pytest.mark.parametrize(
    ("cls", "but"),  # The two exclude each other.
    [(cls, "group_size") for cls in OWN] + [(cls, "synchronized") for cls in NORMS],
)
def test_a_configuration_has_every_argument(cls, but):
    given = changed(cls, but)
    named = set(inspect.signature(cls).parameters) - {"kwargs", but}
    assert named == given.keys() - {"dtype"}
    layer = cls(**given, name="custom", trainable=False)
    default = cls(*(() if cls in NORMS else [layers.Conv2D(4, 3)])).get_config()
    config = layer.get_config()
    for name in given:
        assert config[name] != default[name], name

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
        (LpNorm, "gamma beta moving_mean moving_norm"),
        (lambda: LpNorm(center=False), "gamma moving_mean moving_norm"),
        (lambda: WS(layers.Dense(3)), "kernel bias"),
        (lambda: WS(layers.Dense(3), gain=True), "gain kernel bias"),
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
    optimizer = keras.optimizers.SGD(2.0)
    slopes = [ops.ones(4), ops.ones(4)]
    optimizer.apply(slopes, [layer.beta, layer.gamma])
    np.testing.assert_array_equal(numpy(layer.beta), np.zeros(4))
    np.testing.assert_allclose(np.linalg.norm(numpy(layer.gamma)), 1, rtol=1e-5)


# Wrong arguments


@pytest.mark.parametrize(
    ("cls", "name", "value", "expected"),
    [
        (CBN, "rho", 0, "a number, positive"),
        (CBN, "omega", -1e-9, "a number, non-negative"),
        (CBN, "momentum", 1, "a number, non-negative and less than 1"),
        (CBN, "axis", 1.0, "an integer"),
        (CBN, "center", 0, "True or False"),
        (CBN, "mean_gradient", "Shift", "one of 'shift', 'ratio'"),
        (CBN, "beta_initializer", "no_such", "an initializer of Keras, its name"),
        (
            CBN,
            "beta_regularizer",
            "no_such",
            "a regularizer of Keras, its name, or None",
        ),
        (NoisyBN, "scale_range", 0.99, "a number, at least 1"),
        (NoisyBN, "seed", 2**31, "an integer, non-negative and at most 2147483647"),
        (LpNorm, "p", 0.99, "a number of at least 1, `math.inf` included"),
    ],
)
def test_a_wrong_argument_says_what_it_must_be(cls, name, value, expected):
    with pytest.raises(ValueError) as error:
        cls(**{name: value})
    text = str(error.value)
    assert text.startswith(f"Argument `{name}` must be {expected}")
    assert text.endswith(f"Received: {name}={value!r}")


def test_numbers_may_be_of_any_kind():
    layer = CBN(np.int64(1), rho=2, omega=np.float32(0.5), epsilon=np.float64(1e-3))
    found = [layer.get_config()[name] for name in ("axis", "rho", "omega")]
    assert found == [1, 2.0, 0.5]
    assert all(type(value) in (int, float) for value in found)
    numbers = [np.float32(np.inf), "inf", np.int64(3), fractions.Fraction(3, 2)]
    for value, expected in zip(numbers, [math.inf, math.inf, 3.0, 1.5]):
        layer = LpNorm(value)
        assert type(layer.p) is float and layer.p == expected
        # JSON has no infinity.
        text = json.dumps(layer.get_config(), allow_nan=False)
        assert LpNorm.from_config(json.loads(text)).p == expected
    assert type(NoisyBN(seed=np.int64(3)).get_config()["seed"]) is int


# Wrong inputs


@norms
def test_axis_must_be_one_of_the_input(cls):
    shape = (3, 4, 5)
    for axis in range(-3, 3):
        assert arguments.channels(cls(axis=axis), shape) == shape[axis]
    expected = (
        r"`axis` must be an axis of the input, -3 to 2. "
        r"Received: axis=(3|-4) with input_shape=\("
    )
    for axis in (3, -4):
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


@pytest.mark.parametrize(
    ("mask", "axis", "expected"),
    [
        ((2,), -1, (2, 1, 1, 1)),
        ((2, 3), -1, (2, 3, 1, 1)),
        ((2, 3, 4), -1, (2, 3, 4, 1)),
        ((1, 3, 1, 5), -1, (1, 3, 1, 5)),
        ((2, 4), 1, (2, 1, 4, 1)),
        ((2, 4, 5), 1, (2, 1, 4, 5)),
        ((2, 3), 1, (2, 3, 1, 1)),
        ((3,), -1, None),
        ((2, 6), -1, None),
        ((2, 3, 5), -1, None),
        ((2, 3, 4, 5, 1), -1, None),
    ],
)
def test_a_mask_is_of_positions_or_broadcasts(mask, axis, expected):
    tensors = ops.ones(mask, "int32"), ops.zeros((2, 3, 4, 5))
    if expected:
        found = arguments.broadcast_mask(*tensors, axis)
        assert keras.backend.standardize_dtype(found.dtype) == "bool"
        assert tuple(found.shape) == expected
    else:
        with pytest.raises(ValueError, match="`mask` must have the shape") as error:
            arguments.broadcast_mask(*tensors, axis)
        received = f"mask.shape={mask}, inputs.shape=(2, 3, 4, 5)"
        assert str(error.value).endswith(f"Received: {received}")
