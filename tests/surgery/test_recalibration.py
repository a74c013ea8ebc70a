"""Recalibrate: statistics that fit the weights, and training that does not see it."""

import copy

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import AMAT, CBN, Recalibrate, freeze
from tests.support.backend import later, later_on_jax, numpy


class Spy(keras.callbacks.Callback):
    """Checks what a validation, the end of an epoch and the next step find."""

    def __init__(self, x):
        super().__init__()
        self.x, self.trained, self.seen = x, None, []

    def check(self):
        dense, norm = self.model.layers[-2:]
        made = self.x @ numpy(dense.kernel).astype("float64")
        self.seen.append(made)
        np.testing.assert_allclose(numpy(norm.moving_mean), made.mean(0), atol=1e-4)
        np.testing.assert_allclose(numpy(norm.moving_variance), made.var(0), rtol=1e-3)

    def on_train_batch_begin(self, batch, logs=None):
        if self.trained is not None and batch == 0:
            moving = numpy(self.model.layers[-1].moving_mean)
            np.testing.assert_array_equal(moving, self.trained)

    def on_train_batch_end(self, batch, logs=None):
        self.trained = np.array(numpy(self.model.layers[-1].moving_mean))

    def on_test_batch_begin(self, batch, logs=None):
        self.check()

    def on_epoch_end(self, epoch, logs=None):
        self.check()


def batch(size=48):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 4)).astype("float32") + 1
    return x, np.stack([x[:, 0] * x[:, 1], x[:, 2]], -1)


def network(norm=layers.BatchNormalization, **kwargs):
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(2, use_bias=False), norm()]
    )
    model.compile(keras.optimizers.SGD(0.05, **kwargs), "mse")
    return model


@pytest.mark.parametrize("swap_on_epoch", [True, False])
def test_statistics_are_those_of_the_weights(swap_on_epoch, tmp_path):
    """Of a validation, whatever the order is; of two weights two measurements."""
    (x, y), model = batch(), network(use_ema=True, ema_momentum=0.9)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
    recalibrate, spy = Recalibrate(x, batch_size=16), Spy(x)
    both = [swap, recalibrate] if swap_on_epoch else [recalibrate, swap]
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    history = model.fit(
        *(x, y),
        batch_size=16,
        epochs=2,
        validation_data=(x, y),
        validation_batch_size=48,
        callbacks=[*both, spy, saved],
        verbose=0,
    ).history
    validated, ended, *_ = spy.seen
    assert swap_on_epoch == np.allclose(validated, ended, atol=1e-5)
    # The last is of the averaged weights, which `fit` leaves in the model.
    epochs = [0, 1] if swap_on_epoch else [0, 0, 1, 1, 1]
    assert recalibrate.history["epoch"] == epochs
    assert recalibrate.history["batches"] == [3] * len(epochs)
    seconds = recalibrate.history["seconds"]
    assert history["recalibration_seconds"][0] == sum(seconds[: len(epochs) // 2])
    spy.check()
    spy.set_model(keras.saving.load_model(tmp_path / "1.keras"))
    spy.check()
    np.testing.assert_allclose(spy.seen[-1], ended, atol=1e-5)


@later_on_jax
@pytest.mark.parametrize("averaged", [True, *later(False)])
def test_accuracy_with_and_without(averaged):
    """After few steps on inputs that are far from mean 0."""
    x, accuracy = 5 * batch(96)[0] + 200, {}
    y = (x[:, 0] > x[:, 1]).astype("float32")
    for callbacks in [], [Recalibrate((x, y), every=4)]:
        keras.utils.set_random_seed(0)
        norm, dense = layers.BatchNormalization(), layers.Dense(1, "sigmoid")
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8), norm, dense])
        optimizer = keras.optimizers.SGD(0.5, use_ema=averaged, ema_momentum=0.8)
        model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
        swap = [keras.callbacks.SwapEMAWeights()] if averaged else []
        model.fit(x, y, 16, epochs=5, callbacks=[*swap, *callbacks], verbose=0)
        accuracy[bool(callbacks)] = model.evaluate(x, y, verbose=0)[1]
    assert callbacks[0].history["epoch"] == [3, 4]
    assert accuracy[True] > 0.9 and accuracy[False] < 0.7


@pytest.mark.parametrize("norm", [layers.BatchNormalization, CBN])
def test_training_is_the_same_without_it(norm):
    """With CBN it depends on the averages."""
    (x, y), weights = batch(), []
    for callbacks in [], [Recalibrate(x)]:
        keras.utils.set_random_seed(0)
        model = network(norm)
        callbacks += [AMAT()] if norm is CBN else []
        model.fit(x, y, 16, epochs=2, callbacks=callbacks, shuffle=False, verbose=0)
        weights.append(numpy(model.layers[0].kernel))
    np.testing.assert_array_equal(*weights)


def test_when_training_begins():
    (x, y), model = batch(), network()
    other = copy.deepcopy(Recalibrate(x[:, :3], steps=2))
    with pytest.raises(ValueError, match="`data` must have the shape"):
        model.fit(x, y, callbacks=[other], verbose=0)
    # Outside of training nothing is measured.
    alone = Recalibrate(x)
    model.evaluate(x, y, callbacks=[alone], verbose=0)
    assert alone.history == {}
    with pytest.raises(ValueError, match="not frozen"):
        freeze(model).fit(x, y, callbacks=[alone], verbose=0)
