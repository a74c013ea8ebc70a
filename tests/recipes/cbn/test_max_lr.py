import keras
import numpy as np
import pytest

from recipes.cbn import max_lr
from recipes.engine import training
from tests.support import small


def test_gradient_norm_and_steps_of_a_linear_model():
    """Against NumPy: the squared norm is summed, and the steps are those of SGD."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(12, n)).astype("float32") for n in (3, 2))
    dense = keras.layers.Dense(2, use_bias=False)
    model = keras.Sequential([keras.layers.Input((3,)), dense])
    (w,) = model.get_weights()
    model.compile(max_lr.MeasuringSGD(0.1, 0.9, 0.01), "mse")
    model.fit(x, y, batch_size=6, shuffle=False, epochs=1, verbose=0)

    squares, velocity = [], 0.0
    for part in (slice(0, 6), slice(6, 12)):
        gradient = x[part].T @ (x[part] @ w - y[part]) * 2 / (6 * 2)
        squares.append(np.square(gradient).sum())
        velocity = 0.9 * velocity - 0.1 * (gradient + 0.01 * w)
        w = w + velocity
    np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-5)
    problem = training.Problem(None, None, steps=2, epochs=1)
    values = max_lr.measure(model, problem, None)
    assert values["guessing"] == 1 / 2
    assert values["gradient_norm"] == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-5)
    # The next epoch starts anew.
    assert max_lr.measure(model, problem, None)["gradient_norm"] == 0
    copy = max_lr.MeasuringSGD.from_config(model.optimizer.get_config())
    assert copy.get_config() == model.optimizer.get_config()
    assert copy.weight_decay is None  # which would be decoupled


def test_run(tmp_path, small_network):
    own = {"activations": ("relu",), "norms": ("none",), "workers": 1}
    own |= {"learning_rates": (0.1, 1e30)} | small.SETTINGS
    results, table = small.run(max_lr, tmp_path, "accuracy", "gradient_norm", **own)
    _, lost = results["rows"]
    assert lost["learning_rate"] == 1e30 and lost["runs"][0]["diverged"]
    assert not lost["trains"] and "diverged ✗" in table


def test_which_rate_is_the_largest_that_trains():
    curve = {"train_loss": 9.0, "train_accuracy": 0.1, "guessing": 0.1}
    good = curve | {"train_loss": 2.1, "train_accuracy": 0.2}
    assert max_lr.trains([curve, good]) and not max_lr.trains([good, curve])
    assert not max_lr.trains([good, good | {"train_loss": None}])

    trains = {("none", 0.1): False, ("cbn", 0.1): True, ("cbn", 1.0): False}
    rows = [
        {"activation": "relu", "norm": norm, "learning_rate": rate, "trains": found}
        for (norm, rate), found in trains.items()
    ]
    assert max_lr.largest(rows) == {"relu": {"none": None, "cbn": 0.1}}
