"""What only CBN has: the hint about its learning rate, batches of one, the ratio."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms import AMAT, CBN
from keras_norms.layers import cbn, learning_rate
from tests.support.any_layer import assert_step, case, reference_of
from tests.support.backend import later, numpy
from tests.support.device_cases import cbn as cbn_with_rate
from tests.support.wrapped import assert_close

RNG = np.random.default_rng(0)
X = RNG.normal(1, 2, (6, 3)).astype("float32")


# Without AMAT


def times_said(text, run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return sum(text in str(w.message) for w in caught)


def hints(run):
    learning_rate._warn_once.cache_clear()
    return times_said("keras_norms.AMAT()", run)


def test_the_hint_about_amat_comes_once_where_it_is_due():
    norms = CBN(), CBN()
    model = keras.Sequential([keras.Input((3,)), *norms, keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def none_is_due():
        norms[0](X, training=False)
        norms[0](keras.Input((3,)), training=True)
        CBN(trainable=False)(X, training=True)
        cbn_with_rate()(X, training=True)

    def fit(**options):
        model.fit(X, X[:, :1], 3, verbose=0, **options)

    assert not hints(none_is_due)
    assert hints(lambda: fit(epochs=2)) == 1
    assert not hints(lambda: fit(callbacks=[AMAT()]))


def test_a_loaded_model_has_the_rate_that_was_saved_and_says_so(tmp_path):
    def made():
        return keras.Sequential([keras.Input((3,)), CBN()])

    def hints_of(model):
        return hints(lambda: model.layers[0](X, training=True))

    model = made()
    model.save(tmp_path / "untold.keras")
    # The counter that a schedule adds is no part of a file.
    model.layers[0].follow(keras.optimizers.schedules.CosineDecay(0.1, 9))
    model.layers[0].set_learning_rate(0.0)  # as many schedules end
    model.save(tmp_path / "told.keras")
    model.save_weights(tmp_path / "told.weights.h5")
    model = made()
    model.load_weights(tmp_path / "told.weights.h5")
    assert float(numpy(model.layers[0].learning_rate)) == 0
    assert hints_of(model) == 1
    model.layers[0].set_learning_rate(0.2)
    model.load_weights(tmp_path / "told.weights.h5")  # as a backup, after AMAT
    assert not hints_of(model)
    told, untold = (
        keras.models.load_model(tmp_path / f"{name}.keras")
        for name in ("told", "untold")
    )
    assert hints_of(told) == hints_of(untold) == 1
    rates = [float(numpy(each.layers[0].learning_rate)) for each in (told, untold)]
    assert rates == [0, -1]


# Batches of one


@pytest.mark.parametrize(
    ("shape", "axis", "training", "warned"),
    [
        ((1, 3), -1, True, True),
        ((1, 3, 1), 1, True, True),
        ((1, 3), -1, False, False),
        ((2, 3), -1, True, False),
    ],
)
def test_batches_of_one_are_warned_of_once(shape, axis, training, warned):
    cbn._explain_batches_of_one_once.cache_clear()
    layer = cbn_with_rate(axis=axis)
    layer.build(shape)

    def twice():
        for _ in range(2):
            layer(np.ones(shape, "float32"), training=training)

    assert times_said("one element for each channel", twice) == warned


@pytest.mark.parametrize("name", ["CBN(ratio)", *later("CBN(coupled, ratio)")])
def test_the_ratio_where_a_mean_is_0_and_where_it_is_not(name):
    each = case(name, (16, 6), axis=-1)
    start = {"moving_mean": np.zeros(6), "moving_square": np.ones(6)}
    each.assign(start | {"average_weight": 0, "learning_rate": 0.03})
    reference = reference_of(each)
    for means in ([0, 1, -2, 0.5, 2, 2], [0, 0, 1, -1, 1e-3, -0.5]):
        half = RNG.integers(-8, 9, (8, 6)) / 4  # whose sums are exact
        x = (np.concatenate([half, -half]) + means).astype("float32")
        assert_step(each, reference, x)
    # Bounded where the mean is next to 0, and 1 where it is 0.
    assert_close(reference.groups[0].mean_weight[[0, 1, 4]], [1, 1, 10])


def test_zero_learning_rate_averages_all_batches():
    layer = cbn_with_rate(0.0)
    batches = [X, 2 * X + 1, X**2]
    for x in batches:
        layer(x, training=True)
    assert_close(layer.moving_mean, np.mean(batches, (0, 1)))


def test_scale_and_shift_are_what_a_call_does():
    called, asked = (CBN(dtype="mixed_bfloat16") for _ in range(2))
    asked.build(X.shape)
    y = ops.cast(called(X, training=True), "float32")
    scale, shift = map(numpy, asked.scale_and_shift(X, training=True))
    assert_close(scale * X + shift, y, rtol=0.02, atol=0.02)
    for found, expected in zip(asked.weights, called.weights, strict=True):
        assert_close(found, expected)


def test_rho_can_be_assigned(tmp_path):
    layer = CBN(rho=1)
    layer.rho = 4
    model = keras.Sequential([keras.Input((3,)), layer])
    quarter = numpy(model(X))
    layer.rho = 2.0
    assert layer.get_config()["rho"] == 2
    np.testing.assert_allclose(numpy(model(X)), 2 * quarter, rtol=1e-6)
    model.save(tmp_path / "rho.keras")
    loaded = keras.models.load_model(tmp_path / "rho.keras")
    assert float(numpy(loaded.layers[0].rho)) == 2
    with pytest.raises(ValueError, match="Argument `rho` must be .* Received: rho=-1"):
        layer.rho = -1


@pytest.mark.parametrize("missing", [{"center": False}, {"scale": False}])
def test_weights_of_more_or_fewer_parts_do_not_load(missing, tmp_path):
    """They are refused before any is assigned, and not dropped."""
    whole, part = (
        keras.Sequential([keras.Input((3,)), CBN(**each)]) for each in ({}, missing)
    )
    for model, other in (whole, part), (part, whole):
        other.layers[0].moving_mean.assign([7.0] * 3)
        model.save_weights(tmp_path / "of.weights.h5")
        with pytest.raises(ValueError, match="expected the weights .* Received: "):
            other.load_weights(tmp_path / "of.weights.h5")
        assert np.all(numpy(other.layers[0].moving_mean) == 7)
