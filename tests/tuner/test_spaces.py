import keras
import keras_tuner
import numpy as np
import pytest

from keras_norms import AMAT, CBN, FusedCBN
from tuner import spaces, trials


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
    return {
        layer.name: layer for layer in model._flatten_layers() if isinstance(layer, CBN)
    }


def hyperparameters(**values):
    hp = keras_tuner.HyperParameters()
    hp.values.update(values)
    return hp


def test_one_rho_and_omega_for_a_network():
    hp = hyperparameters(rho=0.25, omega=30.0)
    model = network()
    assert spaces.cbn(hp, model) is model
    layers = layers_of(model)
    assert set(layers) == {"inner", "fused", "outer"}
    for layer in layers.values():
        assert float(layer.rho.value) == layer.get_config()["rho"] == 0.25
        assert layer.omega == layer.get_config()["omega"] == 30.0
    rho, omega = hp.space
    assert (rho.name, rho.min_value, rho.max_value) == ("rho", 0.125, 8.0)
    assert (rho.sampling, rho.default) == ("log", 1.0)
    assert (omega.name, omega.min_value, omega.max_value) == ("omega", 0.0, 100.0)
    assert (omega.sampling, omega.default) == ("linear", 10.0)


def test_a_rho_for_each_layer_or_group():
    hp = hyperparameters(rho_inner=0.5, rho_fused=2.0, rho_outer=4.0)
    layers = layers_of(spaces.cbn(hp, network(), per="layer"))
    found = {name: float(layer.rho.value) for name, layer in layers.items()}
    assert found == {"inner": 0.5, "fused": 2.0, "outer": 4.0}

    hp = hyperparameters(rho_in=0.5, rho_out=2.0)
    model = spaces.cbn(
        hp, network(), per=lambda layer: "out" if layer.name == "outer" else "in"
    )
    found = {name: layer.initial_rho for name, layer in layers_of(model).items()}
    assert found == {"inner": 0.5, "fused": 0.5, "outer": 2.0}


def test_what_is_not_tuned_stays():
    hp = hyperparameters()
    model = spaces.cbn(hp, network(), rho=(2.0, 4.0), omega=None)
    for layer in layers_of(model).values():
        assert layer.initial_rho == 2.0 and layer.omega == 10.0
    assert [each.name for each in hp.space] == ["rho"]
    hp = hyperparameters(rho=3.0)
    spaces.cbn(hp, network(), rho=None, omega=(20.0, 30.0))
    assert [(each.name, each.default) for each in hp.space] == [("omega", 20.0)]


def test_before_the_layers_are_built():
    model = keras.Sequential([keras.layers.Dense(3), CBN()])
    spaces.cbn(hyperparameters(rho=0.5), model)
    model.build((None, 2))
    assert float(model.layers[1].rho.value) == 0.5


def test_omega_of_a_model_that_has_trained():
    def moving_mean(omega, first_omega):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.layers.Input((4,)), CBN(rho=2.0), keras.layers.Dense(3)]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
        x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
        start = model.get_weights()
        for value in (first_omega, omega):
            spaces.cbn(hyperparameters(omega=value), model, rho=None)
            model.set_weights(start)
            model.fit(
                x, x[:, :3], batch_size=4, epochs=1, shuffle=False, callbacks=[AMAT()]
            )
        return keras.ops.convert_to_numpy(model.layers[0].moving_mean)

    np.testing.assert_allclose(moving_mean(50.0, 2.0), moving_mean(50.0, 50.0))
    assert np.abs(moving_mean(50.0, 2.0) - moving_mean(2.0, 50.0)).max() > 1e-3


def test_keras_tuner_searches_with_it(tmp_path):
    def build(hp):
        model = keras.Sequential(
            [keras.layers.Input((4,)), CBN(), keras.layers.Dense(3)]
        )
        spaces.cbn(hp, model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    tuner = keras_tuner.RandomSearch(
        build, "val_loss", max_trials=2, directory=tmp_path, seed=1
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 4)), rng.normal(size=(32, 3))
    tuner.search(x, y, validation_data=(x, y), callbacks=[AMAT()], verbose=0)
    best = tuner.get_best_hyperparameters()[0].values
    layer = tuner.get_best_models()[0].layers[0]
    assert float(layer.rho.value) == pytest.approx(best["rho"], rel=1e-6)
    assert layer.omega == best["omega"]
    rhos = [t.hyperparameters.values["rho"] for t in tuner.oracle.trials.values()]
    assert len(set(rhos)) == 2


def test_bad_arguments_of_cbn():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="`model` must have CBN layers"):
        spaces.cbn(hyperparameters(), model)
    for rho in ((0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, float("inf"))):
        with pytest.raises(ValueError, match="Bounds of `rho` must be positive"):
            spaces.cbn(hyperparameters(), network(), rho=rho)
    with pytest.raises(ValueError, match="Bounds of `omega` must be >= 0"):
        spaces.cbn(hyperparameters(), network(), omega=(-1.0, 5.0))
    with pytest.raises(ValueError, match="`per` must be.*per='stage'"):
        spaces.cbn(hyperparameters(), network(), per="stage")


def test_parse():
    rho, rate = spaces.parse("rho, learning_rate=0.01..0.5")
    assert rho == spaces.RANGES["rho"]
    assert (rate.low, rate.high, rate.default) == (0.01, 0.5, 0.1)
    assert rate.grid == (0.01, 0.03, 0.1, 0.3, 0.5)
    (omega,) = spaces.parse("omega=40..50")
    assert omega.grid == (40.0, 50.0) and omega.default == 40.0


@pytest.mark.parametrize(
    "tune, message",
    [
        ("", "the space is empty. Known: rho, omega"),
        (" , ", "the space is empty"),
        ("rho,depth", "where depth is unknown"),
        ("rho,rho", "each hyperparameter once"),
        ("rho=1", "bounds like rho=0.5..2. Received: tune with 'rho=1'"),
        ("rho=1..x", "bounds like"),
        ("rho=0..2", "`rho` must be positive"),
        ("omega=5..5", "first one less than the second"),
        ("momentum=0..1", "`momentum` must be less than 1"),
    ],
)
def test_bad_spaces(tune, message):
    with pytest.raises(ValueError, match=message):
        spaces.parse(tune)


def test_changes_of_the_settings():
    values = {"omega": 3.0, "tuner/epochs": 5, "learning_rate": 0.2, "rho": 0.5}
    expected = {"omega": 3.0, "learning_rate": 0.2, "rho": 0.5}
    assert trials.changes(values) == expected
    values = {"rho_stage1": 0.5, "rho_logits": 2.0, "omega": 3.0}
    expected = {"omega": 3.0, "stage_rho": "stage1=0.5,logits=2"}
    assert trials.changes(values) == expected
