import keras
import keras_tuner
import numpy as np
import pytest

from keras_norms import AMAT, CBN, FusedCBN
from tests.support.backend import numpy, thorough_on
from tuner import spaces, trials

pytestmark = thorough_on("jax")


def network():
    inside = keras.Sequential([keras.layers.Input((6,)), CBN(name="inner")])
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(6, activation="tanh"),
            inside,
            FusedCBN(keras.layers.Dense(5), CBN(name="fused")),
            CBN(name="outer"),
            keras.layers.Dense(3),
        ]
    )


def layers_of(model):
    layers = [each for each in model._flatten_layers() if isinstance(each, CBN)]
    return {layer.name: layer for layer in layers}


def hyperparameters(**values):
    hp = keras_tuner.HyperParameters()
    hp.values.update(values)
    return hp


def test_one_rho_and_omega_for_a_network():
    hp, model = hyperparameters(rho=0.25, omega=30.0), network()
    assert spaces.cbn(hp, model) is model
    layers = layers_of(model)
    assert set(layers) == {"inner", "fused", "outer"}
    for layer in layers.values():
        assert float(layer.rho.value) == layer.get_config()["rho"] == 0.25
        assert layer.omega == layer.get_config()["omega"] == 30.0
    found = [
        (e.name, e.min_value, e.max_value, e.sampling, e.default) for e in hp.space
    ]
    assert found[0] == ("rho", 0.125, 8.0, "log", 1.0)
    assert found[1:] == [("omega", 0.0, 100.0, "linear", 10.0)]


def test_a_rho_for_each_layer_or_group():
    def side(layer):
        return "out" if layer.name == "outer" else "in"

    rhos = {"inner": 0.5, "fused": 2.0, "outer": 4.0}
    sides = {"in": 0.25, "out": 8.0}
    for per, values, expected in (
        ("layer", rhos, rhos),
        (side, sides, {"inner": 0.25, "fused": 0.25, "outer": 8.0}),
    ):
        hp = hyperparameters(**{f"rho_{key}": rho for key, rho in values.items()})
        layers = layers_of(spaces.cbn(hp, network(), per=per))
        assert {name: layer.initial_rho for name, layer in layers.items()} == expected
        assert {name: float(e.rho.value) for name, e in layers.items()} == expected


def test_what_is_not_tuned_stays():
    hp = hyperparameters()
    layers = layers_of(spaces.cbn(hp, network(), rho=(2.0, 4.0), omega=None))
    for layer in layers.values():
        assert layer.initial_rho == 2.0 and layer.omega == 10.0
    assert [each.name for each in hp.space] == ["rho"]
    hp = hyperparameters(rho=3.0)
    # Before the layers are built, too.
    model = keras.Sequential([keras.layers.Dense(3), CBN(rho=0.5)])
    spaces.cbn(hp, model, rho=None, omega=(20.0, 30.0))
    model.build((None, 2))
    assert float(model.layers[1].rho.value) == 0.5 and model.layers[1].omega == 20.0
    assert [(each.name, each.default) for each in hp.space] == [("omega", 20.0)]


def test_omega_of_a_model_that_has_trained():
    keras.utils.set_random_seed(0)
    layers = [CBN(rho=2.0), keras.layers.Dense(3)]
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    start, means = model.get_weights(), []
    for omega in (50.0, 2.0, 50.0):
        spaces.cbn(hyperparameters(omega=omega), model, rho=None)
        model.set_weights(start)
        model.fit(x, x[:, :3], 4, shuffle=False, callbacks=[AMAT()], verbose=0)
        means.append(numpy(layers[0].moving_mean))
    np.testing.assert_allclose(means[2], means[0])
    assert np.abs(means[1] - means[0]).max() > 1e-3


def test_parse():
    rho, rate = spaces.parse("rho, learning_rate=0.01..0.5")
    assert rho == spaces.RANGES["rho"]
    assert (rate.low, rate.high, rate.default) == (0.01, 0.5, 0.1)
    assert rate.grid == (0.01, 0.03, 0.1, 0.3, 0.5)
    (omega,) = spaces.parse("omega=40..50")
    assert omega.grid == (40.0, 50.0) and omega.default == 40.0
    for tune, message in (
        (" , ", "the space is empty. Known: rho, omega"),
        ("rho,depth", "where depth is unknown"),
        ("rho,rho", "each hyperparameter once"),
        ("rho=1", "bounds like rho=0.5..2. Received: tune with 'rho=1'"),
        ("rho=0..2", "`rho` must be positive"),
        ("omega=5..5", "first one less than the second"),
        ("momentum=0..1", "`momentum` must be less than 1"),
    ):
        with pytest.raises(ValueError, match=message):
            spaces.parse(tune)


def test_changes_of_the_settings():
    values = {"omega": 3.0, "tuner/epochs": 5, "learning_rate": 0.2, "rho": 0.5}
    expected = {"omega": 3.0, "learning_rate": 0.2, "rho": 0.5}
    assert trials.changes(values) == expected
    values = {"rho_stage1": 0.5, "rho_logits": 2.0, "omega": 3.0}
    expected = {"omega": 3.0, "stage_rho": "stage1=0.5,logits=2"}
    assert trials.changes(values) == expected
