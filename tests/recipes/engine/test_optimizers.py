import keras
import numpy as np
import pytest

from keras_norms import AMAT, CBN
from recipes.engine import optimizers


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_coupled_weight_decay(momentum):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 2))
    bias = rng.normal(size=2)
    variables = [keras.Variable(w.astype("float32")), keras.Variable(bias)]
    optimizer = optimizers.SGD(0.1, momentum, weight_decay=0.05)
    expected, velocity = [w, bias], [0.0, 0.0]
    for _ in range(5):
        gradients = [rng.normal(size=(3, 2)), rng.normal(size=2)]
        optimizer.apply(
            [keras.ops.convert_to_tensor(g.astype("float32")) for g in gradients],
            variables,
        )
        for i, gradient in enumerate(gradients):
            decayed = gradient + 0.05 * expected[i]
            velocity[i] = momentum * velocity[i] - 0.1 * decayed
            expected[i] = expected[i] + velocity[i]
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(variable), value, rtol=1e-5, atol=1e-6
        )


def test_config():
    optimizer = optimizers.SGD(0.2, 0.8, 1e-3)
    copy = optimizers.SGD.from_config(optimizer.get_config())
    assert copy.get_config() == optimizer.get_config()
    assert copy.weight_decay is None  # which would be decoupled
    copy.build([keras.Variable(np.zeros(2))])
    numbers = [copy.learning_rate, copy.momentum, copy.coupled_weight_decay]
    assert [float(v.numpy()) for v in numbers] == pytest.approx([0.2, 0.8, 1e-3])


def test_reported_loss_is_free_of_the_penalty():
    x = np.ones((4, 3), "float32")
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizers.SGD(0.0, 0.9, weight_decay=100.0), "mse")
    history = model.fit(x, np.ones((4, 2)), verbose=0).history
    error = keras.ops.convert_to_numpy(model(x)) - 1
    np.testing.assert_allclose(history["loss"], [np.mean(error**2)], rtol=1e-5)


@pytest.mark.parametrize("total", [120, 1000, 7])
def test_schedule(total):
    schedule = optimizers.piecewise_schedule(0.1, total)
    rates = [float(schedule(step)) for step in range(total)]
    half, late = total // 2, total * 5 // 6
    expected = [0.1] * half + [0.01] * (late - half) + [0.001] * (total - late)
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def fit(rate, callbacks):
    """A network after five epochs of two steps each."""
    keras.utils.set_random_seed(0)
    x, y = np.random.default_rng(0).normal(size=(2, 8, 3)).astype("float32")
    layers = [keras.layers.Dense(4, name="a"), CBN(omega=5.0, name="norm")]
    layers += [keras.layers.Dense(3, name="b")]
    model = keras.Sequential([keras.layers.Input((3,)), *layers], name="net")
    model.compile(optimizers.SGD(rate, 0.9, 0.01), "mse")
    callbacks = callbacks(model)
    model.fit(x, y, 4, 3, shuffle=False, verbose=0, callbacks=callbacks)
    # It goes on where it was, by the optimizer's count of steps.
    model.fit(x, y, 4, 2, shuffle=False, verbose=0, callbacks=callbacks)
    return model


def test_rates_that_are_set_equal_those_of_a_schedule_and_amat():
    schedule = optimizers.piecewise_schedule(0.1, 10)
    rates = []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    def told(model):
        omegas = optimizers.give_omegas(model)
        assert list(omegas.values()) == [5.0]
        return [optimizers.Rate(schedule, omegas), Seen()]

    expected = fit(schedule, lambda model: [AMAT()])
    found = fit(0.7, told)
    np.testing.assert_allclose(rates, [float(schedule(i)) for i in range(10)])
    (layer,) = optimizers.followers(found)
    assert layer.omega == 1.0
    assert float(layer.learning_rate.numpy()) == pytest.approx(5.0 * 0.001)
    values = {v.path: v.numpy() for v in found.variables}
    others = {v.path: v.numpy() for v in expected.variables}
    for key in values.keys() - {"net/norm/learning_rate"}:
        np.testing.assert_allclose(values[key], others[key], rtol=1e-4, atol=1e-6)


def test_one_compiled_step_has_another_momentum_and_decay():
    x = np.ones((4, 3), "float32")
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizers.SGD(0.5, 0.0, 0.0), "mse")
    y = model.predict(x, verbose=0)  # the gradient is 0
    model.fit(x, y, verbose=0)
    before = model.get_weights()[0]
    model.optimizer.coupled_weight_decay.assign(0.1)
    model.fit(x, y, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], before * 0.95, rtol=1e-5)
