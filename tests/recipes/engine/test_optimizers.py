import keras
import numpy as np
import pytest

from keras_norms import AMAT, CBN
from recipes.engine import imagenet, optimizers


def test_schedules():
    for make, total, expected in (
        (optimizers.piecewise_schedule, 7, np.repeat([0.1, 0.01, 0.001], [3, 2, 2])),
        (optimizers.piecewise_schedule, 24, np.repeat([0.1, 0.01, 0.001], [12, 8, 4])),
        (imagenet.schedule, 24, np.repeat([0.1, 0.01, 0.001, 0.0001], 6)),
    ):
        schedule = make(0.1, total)
        rates = [float(schedule(step)) for step in range(total)]
        np.testing.assert_allclose(rates, expected, rtol=1e-6)


def fit(rate, callbacks, accumulated):
    """A network after five epochs of two steps each."""
    keras.utils.set_random_seed(0)
    x, y = np.random.default_rng(0).normal(size=(2, 8, 3)).astype("float32")
    norm, last = CBN(omega=5.0, name="norm"), keras.layers.Dense(3, name="last")
    model = keras.Sequential([keras.layers.Input((3,)), norm, last], name="net")
    more = {"gradient_accumulation_steps": accumulated}
    model.compile(optimizers.SGD(rate, 0.9, 0.01, **more), "mse")
    callbacks = callbacks(model)
    # The second call goes on where it was, by the optimizer's count of steps.
    for epochs in (3, 2):
        model.fit(x, y, 4, epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model


@pytest.mark.parametrize("accumulated", [None, 2])
def test_rates_that_are_set_equal_those_of_a_schedule_and_amat(accumulated):
    schedule = optimizers.piecewise_schedule(0.1, 10)
    rates = []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    def told(model):
        return [optimizers.Rate(schedule, optimizers.give_omegas(model)), Seen()]

    expected = fit(schedule, lambda model: [AMAT()], accumulated)
    found = fit(0.7, told, accumulated)
    np.testing.assert_allclose(rates, [float(schedule(i)) for i in range(10)])
    (layer,) = optimizers.followers(found)
    rate = 5.0 * 0.001 / (accumulated or 1)
    assert layer.omega == 1 and layer.learning_rate.numpy() == pytest.approx(rate)
    values = {v.path: v.numpy() for v in found.variables}
    others = {v.path: v.numpy() for v in expected.variables}
    for key in values.keys() - {"net/norm/learning_rate"}:
        np.testing.assert_allclose(values[key], others[key], rtol=1e-4, atol=1e-6)
