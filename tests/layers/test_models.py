"""Every layer in models: training, saving, copying, mixed precision, any size."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import AMAT, CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from tests.support.any_layer import QUIET
from tests.support.backend import later, later_on_jax, numpy, precision

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(1, 2, (8, 6, 6, 2)).astype("float32")
LABELS = np.arange(8) % 2


def network(rate=0.1, size=6, **compile_arguments):
    """Each layer where every weight of it matters."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((size, size, 2)),
            WS(layers.Conv2D(3, 3, use_bias=False)),
            NoisyBN(momentum=0.9, **QUIET),
            layers.Activation("tanh"),
            FusedCBN(layers.Conv2D(4, 2, activation="tanh"), CBN(rho=2.0)),
            CBN(rho=0.5),
            WN(layers.SeparableConv2D(4, 2, activation="tanh")),
            LpNorm(3, norm_of="centered", momentum=0.9),
            CWN(layers.DepthwiseConv2D(2), scale=2.0, gain=True),
            layers.GlobalAveragePooling2D(),
            WN(layers.Dense(2)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, **compile_arguments)
    return model


def fit(model):
    model.fit(IMAGES, LABELS, 4, shuffle=False, verbose=0, callbacks=[AMAT()], epochs=1)
    return weights(model)


def weights(model):
    """By path in the model, but for the counters that a schedule adds."""
    return {f"{i}/{v.name}": numpy(v) for i, v in enumerate(kept_weights(model))}


def kept_weights(model):
    return [v for v in model.weights if v.name != "step"]


def assert_same(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name], value, rtol=tolerance, atol=tolerance, err_msg=name
        )


def assert_trained(before, after):
    for name, value in after.items():
        assert value.dtype == "float32" and np.all(np.isfinite(value)), name
        assert np.any(value != before[name]) or name.endswith("/rho"), name


def test_training_saving_and_copying(tmp_path):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    model = network(schedule)
    before = weights(model)
    trained = fit(model)
    assert_trained(before, trained)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    fresh = network()
    fresh.load_weights(tmp_path / "model.weights.h5")
    clone = keras.models.clone_model(model)
    for variable, value in zip(kept_weights(clone), trained.values(), strict=True):
        variable.assign(value)
    y = numpy(model(IMAGES))
    for other in (loaded, fresh, clone):
        assert_same(weights(other), trained, tolerance=0)
        np.testing.assert_allclose(numpy(other(IMAGES)), y, rtol=1e-5, atol=1e-6)
    assert_same(fit(loaded), fit(model))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", *later("mixed_float16")])
def test_mixed_precision(policy):
    with precision(policy):
        model = network()
        before = weights(model)
        assert_trained(before, fit(model))


@later_on_jax
def test_images_of_any_size():
    model, eager = network(size=None), network(run_eagerly=True)
    for samples, *size in [(2, 6, 7), (1, 8, 6)]:
        x = RNG.normal(1, 2, (samples, *size, 2)).astype("float32")
        for each in (model, eager):
            each.train_on_batch(x, LABELS[:samples])
        assert_same(weights(model), weights(eager))
