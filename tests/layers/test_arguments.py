"""Arguments of layers: those kept by a configuration, and wrong ones, by name.

Every wrong value of every argument: `tests/test_public_arguments.py`.
"""

import fractions
import inspect
import json

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from tests.support.arguments.public import ENTRIES
from tests.support.backend import numpy

NORMS = (CBN, NoisyBN, LpNorm)
norms = pytest.mark.parametrize("cls", NORMS)
OBJECTS = {
    "initializer": keras.initializers.Constant(0.1),
    "regularizer": keras.regularizers.L1(0.1),
    "constraint": keras.constraints.MaxNorm(2),
}


def inner():
    return layers.Conv2D(4, 3, activation="relu", dtype="mixed_bfloat16")


def changed(cls, but):
    """Arguments, all but one, with other values than the defaults and each other."""
    if cls is FusedCBN:
        norm = CBN(rho=0.5, dtype="mixed_bfloat16")
        return {"layer": [inner(), inner()], "norm": norm}
    given = {"dtype": "mixed_bfloat16"} if cls in NORMS else {"layer": inner()}
    for i, (name, kind) in enumerate(ENTRIES[cls.__name__].kinds.items(), 1):
        if name not in (but, *given):
            default = inspect.signature(cls).parameters[name].default
            values = ("ratio", "centered", False, True, i + 1, 1 + i / 32, i / 32)
            fits = (v for v in values if kind.fits(v) and v != default)
            given[name] = OBJECTS.get(name.rpartition("_")[2]) or next(fits)
    return given


@pytest.mark.parametrize(
    ("cls", "but"),  # The two exclude each other.
    [(cls, "group_size") for cls in (*NORMS, WS, CWN, WN, FusedCBN)]
    + [(cls, "synchronized") for cls in NORMS],
)
def test_a_configuration_has_every_argument(cls, but):
    given = changed(cls, but)
    layer = cls(**given, name="custom", trainable=False)
    default = cls(*(() if cls in NORMS else [layers.Conv2D(4, 3)])).get_config()
    config = layer.get_config()
    for name in given:
        assert config[name] != default[name], name

    text = json.dumps(keras.saving.serialize_keras_object(layer))
    again = keras.saving.deserialize_keras_object(json.loads(text))
    assert type(again) is cls
    assert again.get_config() == config
    for name, value in given.items():
        if name not in ("rho", "dtype") and isinstance(value, (int, float, str)):
            assert getattr(again, name) == value  # `rho` is a weight.
    assert keras.saving.get_registered_name(cls) == f"keras_norms>{cls.__name__}"


@norms
def test_initializers_regularizers_and_constraints(cls):
    names = [n for n in inspect.signature(cls).parameters if "_initializer" in n]
    values = {name: keras.initializers.Constant(i) for i, name in enumerate(names, 2)}
    layer = cls(
        **values,
        beta_regularizer=keras.regularizers.L2(0.25),
        gamma_regularizer=keras.regularizers.L1(0.5),
        beta_constraint="non_neg",
        gamma_constraint=keras.constraints.UnitNorm(axis=0),
    )
    layer.build((None, 4))
    for i, name in enumerate(names, 2):
        weight = getattr(layer, name.removesuffix("_initializer"))
        np.testing.assert_array_equal(numpy(weight), np.full(4, i))
    beta, gamma = (numpy(layer.beta)[0], numpy(layer.gamma)[0])
    losses = float(numpy(sum(layer.losses)))
    assert len(names) == 4 and losses == beta**2 + 2 * gamma
    optimizer = keras.optimizers.SGD(10.0)
    optimizer.apply([ops.ones(4), ops.ones(4)], [layer.beta, layer.gamma])
    np.testing.assert_array_equal(numpy(layer.beta), np.zeros(4))
    np.testing.assert_allclose(np.linalg.norm(numpy(layer.gamma)), 1, rtol=1e-5)


def test_defaults_are_those_of_the_papers():
    defaults = {"axis": -1, "momentum": 0.99, "center": True, "scale": True}
    noise = {"mean_range": 0.5, "scale_range": 1.25}
    noise |= {"mean_jitter": 0.1, "scale_jitter": 0.1}
    for cls, own in {
        CBN: {"rho": 1, "omega": 10, "epsilon": 1e-5},
        NoisyBN: {"epsilon": 1e-3, **noise},
        LpNorm: {"p": 2, "norm_of": "input", "epsilon": 1e-5},
    }.items():
        assert defaults | own == {k: cls().get_config()[k] for k in defaults | own}
    for cls in (WS, CWN, WN):
        assert cls(inner()).get_config()["epsilon"] == 1e-5


def test_numbers_may_be_of_any_kind():
    found = CBN(np.int64(1), rho=2, omega=np.float32(0.5)).get_config()
    found = [found[name] for name in ("axis", "rho", "omega")]
    assert found == [1, 2, 0.5] and {*map(type, found)} <= {int, float}
    for value in (np.float32(np.inf), "inf", np.int64(3), fractions.Fraction(3, 2)):
        # JSON has no infinity.
        text = json.dumps(LpNorm(value).get_config(), allow_nan=False)
        p = LpNorm.from_config(json.loads(text)).p
        assert type(p) is float and p == float(value)


# Wrong inputs


@norms
def test_inputs_that_do_not_fit(cls):
    expected = r"`axis` .* -3 to 2. Received: axis=(3|-4) with input_shape=\("
    for axis in (3, -4):
        for use in (cls(axis=axis).build, cls(axis=axis).compute_output_shape):
            with pytest.raises(ValueError, match=expected):
                use((3, 4, 5))
    with pytest.raises(ValueError, match="`axis`.*known.*axis=1.*None, None, 3"):
        cls(axis=1)(keras.Input((None, 3)))
    for shape in ((), (4,)):
        with pytest.raises(ValueError, match="'few'.*rank 2.*Received: input_shape="):
            cls(name="few")(np.zeros(shape, "float32"))
    layer = cls()
    layer.build((2, 3))
    with pytest.raises(ValueError, match="expected axis -1 .* value 3.*shape .2, 4"):
        layer(np.zeros((2, 4), "float32"))


@pytest.mark.parametrize(
    ("axis", "shape", "expected"),
    [
        (-1, (2,), (2, 1, 1, 1)),
        (-1, (2, 3), (2, 3, 1, 1)),
        (-1, (2, 3, 4), (2, 3, 4, 1)),
        (-1, (1, 3, 1, 5), (1, 3, 1, 5)),
        (1, (2, 4), (2, 1, 4, 1)),
        (1, (2, 4, 5), (2, 1, 4, 5)),
        (1, (2, 3), (2, 3, 1, 1)),
        *[(-1, shape, None) for shape in ((3,), (2, 6), (2, 3, 5), (2, 3, 4, 5, 1))],
    ],
)
def test_a_mask_is_of_positions_or_broadcasts(axis, shape, expected):
    x, mask = np.random.default_rng(0).normal(size=(2, 3, 4, 5)), np.ones(shape, bool)
    mask[(0,) * mask.ndim] = False
    layer = CBN(axis)
    if expected is None:
        with pytest.raises(ValueError, match="`mask`.*Received: mask.shape="):
            layer(x, training=True, mask=mask)
        return
    full = np.broadcast_to(mask.reshape(expected), x.shape)
    y, same = (numpy(layer(x, training=True, mask=m)) for m in (mask, full))
    np.testing.assert_allclose(y, same, rtol=1e-5, atol=1e-6)


def test_a_mask_is_of_positions_where_sizes_are_equal():
    x = np.random.default_rng(0).normal(size=(2, 3, 3)).astype("float32")
    mask = np.array([[True, True, False], [True, False, False]])
    layer = CBN(axis=1)
    layer(x, training=True, mask=mask)
    expected = np.moveaxis(x, 1, -1)[mask].mean(0)
    np.testing.assert_allclose(numpy(layer.moving_mean), expected, rtol=1e-5)
