"""freeze and unfreeze: stored statistics while the rest trains, in saved files too."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_norms
from keras_norms import (
    CBN,
    FusedCBN,
    LpNorm,
    NoisyBN,
    convert,
    freeze,
    prune,
    unfreeze,
)
from keras_norms.layers.frozen import FROZEN
from tests.support import surgery_models as m
from tests.support.backend import later, later_on_jax, numpy

STATISTICS = "moving_mean", "moving_variance", "moving_square", "moving_norm"


def network():
    """Every norm, in other layers and models too."""
    inner = m.model_of((6, 3), m.apply(LpNorm, p=1), m.dense(3))
    fused = FusedCBN(layers.Dense(3), CBN(name="inside"))
    distributed = m.apply(layers.TimeDistributed, layers.BatchNormalization())
    norms = m.bn, m.apply(CBN, rho=2.0), m.dense(3), m.apply(NoisyBN), inner
    return m.model_of((6, 3), *norms, fused, distributed, m.dense(2))


def weights(model, names):
    return [numpy(v) for v in model.weights if v.name in names]


def moved(model, names, **options):
    """Trains; returns which weights of these names changed."""
    before = weights(model, names)
    x = m.images(12, 6, 3)
    model.fit(x, np.zeros((12, 6, 2)), batch_size=4, verbose=0, **options)
    return [not np.array_equal(a, b) for a, b in zip(before, weights(model, names))]


@later_on_jax
def test_statistics_stay_and_the_rest_trains_through_files(tmp_path):
    model = network()
    model.compile("sgd", "mse")
    assert all(moved(model, STATISTICS))
    # The step that is compiled has training calls in it.
    assert freeze(model) is freeze(model) is model
    x = m.batch_for(model)
    np.testing.assert_array_equal(
        numpy(model(x, training=True)), numpy(model(x, training=False))
    )
    before = weights(model, STATISTICS)
    assert len(before) == 12
    assert all(moved(model, ("gamma", "beta", "kernel")))
    model.save(tmp_path / "frozen.keras")
    model = keras.saving.load_model(tmp_path / "frozen.keras")
    assert all(moved(model, ("gamma", "beta", "kernel")))
    assert all(map(np.array_equal, before, weights(model, STATISTICS)))
    m.quiet(unfreeze, model)
    assert all(moved(model, STATISTICS))
    assert "Frozen" not in str(keras.saving.serialize_keras_object(model))


def test_gamma_and_beta_fixed_too():
    model = m.model_of((6, 3), m.bn, m.dense(2))
    freeze(model, affine=True).compile("sgd", "mse")
    assert not any(moved(model, (*STATISTICS, "gamma", "beta")))
    model.trainable = False
    model.trainable = True
    model.compile("sgd", "mse")
    assert not any(moved(model, STATISTICS)) and all(moved(model, ("gamma", "beta")))


def test_in_a_callback():
    model, seen = m.model_of((6, 3), m.bn, m.dense(2)), []

    def begin(epoch, logs):
        seen.append(weights(model, STATISTICS))
        (freeze, unfreeze)[epoch % 2](model)

    model.compile("sgd", "mse")
    callback = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
    moved(model, STATISTICS, epochs=3, callbacks=[callback])
    seen = [np.concatenate(each) for each in (*seen, weights(model, STATISTICS))]
    stays = [np.array_equal(*pair) for pair in zip(seen, seen[1:])]
    assert stays == [True, False, True]


def test_surgery_knows_them():
    model = m.model_of((4,), m.dense(5), m.bn, m.relu, m.dense(2), m.bn)
    x = m.batch_for(model, 16)
    gamma = m.of_class(freeze(model), layers.BatchNormalization)[0].gamma
    gamma.assign(numpy(gamma) * [0, 1, 1, 1, 1])
    assert not m.norms_in(m.check_fold(model))
    smaller = prune(model, x).model
    before = weights(smaller, STATISTICS)
    assert before[0].size < 5
    smaller(x, training=True)
    assert all(map(np.array_equal, before, weights(smaller, STATISTICS)))
    with pytest.raises(ValueError, match="not frozen"):
        keras_norms.recalibrate(model, x, verbose=0)


@later_on_jax
@pytest.mark.parametrize(
    "norm", ["cbn", *later("noisy_bn", "group_norm", "none", lambda _: LpNorm())]
)
def test_what_convert_puts_in_the_place_of_layers_that_do_not_train(norm):
    names = [f"{kind}{i}" for i in (1, 2) for kind in ("dense", "bn")]
    cls = layers.BatchNormalization
    model = m.model_of(
        *((4,), m.dense(6, name="dense1"), m.apply(cls, name="bn1"), m.relu),
        *(m.dense(6, name="dense2"), m.apply(cls, name="bn2")),
        *(m.apply(layers.Activation, "tanh", name="base"), m.dense(2, name="head")),
    )
    for name in names:
        model.get_layer(name).trainable = False
    new = m.quiet(convert, model, norm)
    base = keras.Model(new.input, new.get_layer("base").output)
    assert not base.trainable_weights
    assert new.get_layer("head").trainable
    if norm == "cbn":
        assert new.get_layer("head_cbn").trainable  # It normalises for what trains.
        model.get_layer("bn1").trainable = True
        new = m.quiet(convert, model, norm)
        # It does what trained before, or there were nothing left to train.
        assert new.get_layer("dense2_cbn").trainable


@later_on_jax
def test_what_convert_puts_in_the_place_of_frozen_norms():
    x, groups = m.images(9, 4), m.apply(layers.GroupNormalization, 2, name="groups")
    model = freeze(m.model_of((4,), m.dense(4), m.bn, m.relu, groups, m.dense(2)))
    new = m.quiet(convert, model, NoisyBN)
    before = weights(new, STATISTICS)
    new(x, training=True)
    assert all(map(np.array_equal, before, weights(new, STATISTICS)))
    assert len(new.trainable_weights) == len(model.trainable_weights)
    model.get_layer("groups").trainable = False
    new = convert(model, "batch_norm", data=x)
    norm = new.get_layer("groups")
    seen = keras.Model(new.input, norm.input)(x, training=False)
    np.testing.assert_allclose(numpy(norm.moving_mean), numpy(seen).mean(0), rtol=1e-5)
    assert not norm.trainable_weights


def test_a_derived_class_is_fixed_as_keras_fixes_it():
    Own = type("Own", (layers.BatchNormalization,), {})
    model = m.model_of((4,), m.dense(3), m.apply(Own, name="own"))
    with pytest.warns(UserWarning, match=r"\['own'\].*derived"):
        freeze(model)
    assert not model.get_layer("own").trainable
    m.quiet(freeze, unfreeze(model), affine=True)


@pytest.mark.parametrize("cls", FROZEN.values())
def test_a_frozen_class_derives_from_layers_alone(cls):
    # With another base, Python refuses the change of the class under Flax NNX.
    own = [each for each in cls.__mro__ if each.__module__.startswith("keras_norms")]
    assert all(issubclass(each, layers.Layer) for each in own)
