import keras
import keras_tuner
import numpy as np
import pytest

from keras_norms import AMAT, CBN, FusedCBN, convert
from tests.support.backend import numpy, thorough_on
from tuner import ranges, spaces

pytestmark = thorough_on("jax")


def network():
    fused = FusedCBN(keras.layers.Dense(5), CBN(name="fused"))
    norms = keras.Sequential([CBN(name="inner")]), fused, CBN(name="outer")
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), *norms])


def tune(values, model=None, **arguments):
    """The space that was made, and the CBN layers by their names."""
    hp, model = keras_tuner.HyperParameters(), model or network()
    hp.values.update(values)
    assert spaces.cbn(hp, model, **arguments) is model
    layers = [each for each in model._flatten_layers() if isinstance(each, CBN)]
    return hp.space, {layer.name: layer for layer in layers}


def test_one_rho_and_omega_for_a_network():
    space, layers = tune({"rho": 0.25, "omega": 30.0})
    assert set(layers) == {"inner", "fused", "outer"}
    for layer in layers.values():
        assert float(layer.rho.value) == layer.get_config()["rho"] == 0.25
        assert layer.omega == layer.get_config()["omega"] == 30.0
    found = [(e.name, e.min_value, e.max_value, e.sampling, e.default) for e in space]
    assert found[0] == ("rho", 0.125, 8.0, "log", 1.0)
    assert found[1:] == [("omega", 0.0, 100.0, "linear", 10.0)]


def test_a_rho_for_each_layer_or_group():
    def side(layer):
        return "out" if layer.name == "outer" else "in"

    rhos = {"inner": 0.5, "fused": 2.0, "outer": 4.0}
    for per, values, expected in (
        ("layer", rhos, rhos),
        (side, {"in": 0.25, "out": 8.0}, {"inner": 0.25, "fused": 0.25, "outer": 8.0}),
    ):
        _, layers = tune({f"rho_{key}": rho for key, rho in values.items()}, per=per)
        assert {name: layer.initial_rho for name, layer in layers.items()} == expected
        assert {name: float(e.rho.value) for name, e in layers.items()} == expected


def test_each_layer_has_a_rho_where_names_are_shared():
    norms = [CBN(name="norm") for _ in range(2)]
    model = keras.Sequential(
        [keras.Input((4,)), *(keras.Sequential([norm]) for norm in norms)]
    )
    tune({"rho_norm": 0.5, "rho_norm_2": 2.0}, model, per="layer")
    assert [norm.initial_rho for norm in norms] == [0.5, 2.0]


def test_names_that_keras_made_are_the_same_in_every_build():
    def build(norm):
        dense = [keras.layers.Dense(3, activation="tanh") for _ in range(3)]
        steps = dense[0], norm(), dense[1], norm(), dense[2]
        return keras.Sequential([keras.Input((3,)), *steps])

    for make in (
        lambda: build(CBN),
        lambda: convert(build(keras.layers.BatchNormalization), CBN, preserve=False),
    ):
        make()
        first, second = (tune({}, make(), per="layer", omega=None)[0] for _ in "ab")
        assert [each.name for each in first] == [each.name for each in second]
        assert len(first) == 2


def test_what_is_not_tuned_stays():
    space, layers = tune({}, rho=(2.0, 4.0), omega=None)
    assert {(e.initial_rho, e.omega) for e in layers.values()} == {(2.0, 10.0)}
    assert [each.name for each in space] == ["rho"]
    # What is usual, or the nearest bound.
    space, _ = tune({}, rho=(0.25, 0.5), omega=(1.0, 5.0))
    assert [each.default for each in space] == [0.5, 5.0]
    # Before the layers are built, too.
    model = keras.Sequential([keras.layers.Dense(3), CBN(rho=0.5)])
    space, _ = tune({"rho": 3.0}, model, rho=None, omega=(20.0, 30.0))
    model.build((None, 2))
    assert float(model.layers[1].rho.value) == 0.5 and model.layers[1].omega == 20.0
    assert [(each.name, each.default) for each in space] == [("omega", 20.0)]


def test_omega_of_a_model_that_has_trained():
    norm, means = CBN(rho=2.0), []
    model = keras.Sequential([keras.Input((4,)), norm])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    start = model.get_weights()
    for omega in (50.0, 2.0, 50.0):
        tune({"omega": omega}, model, rho=None)
        model.set_weights(start)
        model.fit(x, x, 4, shuffle=False, callbacks=[AMAT()], verbose=0)
        means.append(numpy(norm.moving_mean))
    np.testing.assert_allclose(means[2], means[0])
    assert np.abs(means[1] - means[0]).max() > 1e-3


@pytest.mark.parametrize(
    "argument, values",
    {
        "hp": [None, keras_tuner.HyperParameters],
        "model": [None, keras.layers.Dense(3), keras.Sequential()],
        "rho": [1, "12", (0, 1), (2, 1), (1, 10**400), (True, 2), (1, float("nan"))],
        "omega": [(-1, 1), (2, 2), (1, float("inf")), ("1", "2"), (1, 2, 3)],
        "per": [None, "stage"],
    }.items(),
)
def test_wrong_arguments(argument, values):
    good = {"hp": keras_tuner.HyperParameters(), "model": network()}
    for value in values:
        with pytest.raises(ValueError, match=f"`{argument}`.* Received: {argument}="):
            spaces.cbn(**good | {argument: value})


def test_parse():
    rho, rate = ranges.parse("rho, learning_rate=0.01..0.5")
    assert rho == ranges.RANGES["rho"]
    assert (rate.low, rate.high, rate.default) == (0.01, 0.5, 0.1)
    assert rate.grid == (0.01, 0.03, 0.1, 0.3, 0.5)
    (omega,) = ranges.parse("omega=40..50")
    assert omega.grid == (40.0, 50.0) and omega.default == 40.0
    for tune, message in (
        (" , ", "at least one hyperparameter of rho, omega"),
        ("rho,depth", "where depth is unknown"),
        ("rho=0..2", "`rho` must be two finite numbers, positive"),
        ("omega=5..5", "the less one first"),
        ("rho,rho", "name each hyperparameter once"),
        ("rho=1", "bounds like rho=0.5..2"),
        ("rho=a..b", "bounds like rho=0.5..2"),
        ("momentum=0..1", "`momentum` must be less than 1"),
    ):
        with pytest.raises(ValueError, match=message):
            ranges.parse(tune)
