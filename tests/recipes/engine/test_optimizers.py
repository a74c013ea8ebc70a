import keras
import numpy as np
import pytest

from recipes import optimizers


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
    assert copy.coupled_weight_decay == 1e-3
    assert copy.weight_decay is None


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
