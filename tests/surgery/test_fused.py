"""convert(..., fused=True): the same network with FusedCBN layers, and back."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import AMAT, CBN, FusedCBN
from keras_norms.surgery import convert, fold, recalibrate

IMAGES = np.random.default_rng(0).normal(1, 2, (16, 8, 8, 3)).astype("float32")
LABELS = np.arange(16) % 4


def network():
    """A residual network with a projected shortcut, padding, and a head."""

    def conv(x, filters, size, stride=1, name=None):
        x = layers.Conv2D(filters, size, stride, padding="same", name=name)(x)
        return layers.BatchNormalization()(x)

    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = layers.ReLU()(conv(inputs, 4, 3, name="stem"))
    branch = layers.ReLU()(conv(x, 6, 3, 2, name="first"))
    branch = conv(branch, 6, 3, name="second")
    x = layers.ReLU()(layers.Add()([branch, conv(x, 6, 1, 2, name="shortcut")]))
    x = layers.ZeroPadding2D()(x)
    x = layers.Conv2D(5, 3, activation="relu", name="padded")(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(4, name="logits")(x))
    rng = np.random.default_rng(1)
    for weight in model.weights:
        if weight.name in ("gamma", "moving_variance"):
            weight.assign(rng.uniform(0.5, 1.5, weight.shape))
        elif weight.name in ("beta", "moving_mean"):
            weight.assign(rng.normal(size=weight.shape))
    return model


def of(model, cls):
    return [layer for layer in model._flatten_layers() if isinstance(layer, cls)]


def outputs(model):
    return model.predict(IMAGES, verbose=0)


@pytest.fixture(scope="module")
def pair():
    """The network with CBN, unfused and fused, from the same data."""
    model = network()
    return [convert(model, CBN(rho=2), data=IMAGES, fused=f) for f in (False, True)]


def test_the_function_is_kept(pair):
    plain, fused = pair
    assert len(of(fused, FusedCBN)) == 3  # all but the one before the padding
    assert len(of(fused, CBN)) == len(of(plain, CBN)) == 4
    assert [len(layer.layers) for layer in of(fused, FusedCBN)] == [2, 1, 1]
    assert fused.count_params() == plain.count_params()
    np.testing.assert_allclose(outputs(fused), outputs(network()), rtol=1e-4, atol=1e-5)


def test_training_is_the_same(pair):
    trained = []
    for source in pair:
        model = keras.models.clone_model(source)
        model.set_weights(source.get_weights())
        model.compile(
            keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(True)
        )
        options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(IMAGES, LABELS, callbacks=[AMAT()], **options)
        trained.append(outputs(model))
    np.testing.assert_allclose(trained[1], trained[0], rtol=1e-3, atol=1e-4)


def test_saves_and_loads(pair, tmp_path):
    pair[1].save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(outputs(loaded), outputs(pair[1]))


@pytest.mark.filterwarnings("ignore:fold")
def test_folds_like_the_unfused(pair):
    folded = fold(pair[1])
    assert not of(folded, (CBN, FusedCBN))
    assert [layer.name for layer in folded.layers] == [
        layer.name for layer in fold(pair[0]).layers
    ]
    np.testing.assert_allclose(outputs(folded), outputs(pair[1]), rtol=1e-4, atol=1e-5)


def test_recalibrates_like_the_unfused():
    found = []
    for fused in (False, True):
        model = convert(network(), "cbn", data=IMAGES, fused=fused)
        recalibrate(model, 2 * IMAGES, verbose=0)
        norms = sorted(of(model, CBN), key=lambda layer: layer.name)
        found.append([norm.get_weights() for norm in norms])
    for plain, other in zip(*found):
        for a, b in zip(plain, other):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


def test_only_cbn_can_be_fused():
    with pytest.raises(ValueError, match="`fused`.*Received: fused=True"):
        convert(network(), "wn", fused=True)
    with pytest.raises(ValueError, match="`fused`.*Received: fused=1"):
        convert(network(), "cbn", fused=1)
