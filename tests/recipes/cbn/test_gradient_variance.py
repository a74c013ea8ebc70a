import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes.cbn import gradient_variance
from recipes.engine import data
from tests.support import small


def test_measure_of_a_linear_model(monkeypatch):
    """Against the covariance of the gradients of the same batches, in NumPy."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(40, n)).astype("float32") for n in (3, 2))
    images = data.ImageData(x, y, None, None, None)
    dense = keras.layers.Dense(2, use_bias=False)
    model = keras.Sequential([keras.layers.Input((3,)), dense])
    model.compile("sgd", "mse")
    settings = gradient_variance.Measured(batch_size=8, seed=3, batches=6)
    monkeypatch.setattr(data, "images", lambda settings: images)
    values = gradient_variance.measure(model, None, settings)

    w = model.get_weights()[0].astype("float64")
    batches = list(data.other_batches(settings, 6))
    gradients = [(x.T @ (x @ w - y) * 2 / y.size).ravel() for x, y in batches]
    assert len({x.tobytes() for x, _ in batches}) == 6
    variance = np.trace(np.cov(np.transpose(gradients)))
    square = np.square(np.mean(gradients, 0)).sum() - variance / 6
    assert values["gradient_variance"] == pytest.approx(variance, rel=1e-4)
    assert values["gradient_squared_norm"] == pytest.approx(square, rel=1e-4)
    assert values["gradient_squared_bias"] == 0


def test_bias_of_old_statistics():
    """CBN on a scalar that has moved: against derivatives by hand, rho = 2."""
    rng = np.random.default_rng(0)
    norm = CBN(rho=2.0, center=False, scale=False, epsilon=1e-12)
    dense = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.layers.Input((1,)), norm, dense])
    model.compile("sgd", lambda y, found: found)
    dense.kernel.assign([[1.0]])
    norm.set_learning_rate(0.1 * 0.25)  # eta = 0.75
    for name, value in (("moving_mean", [3.0]), ("moving_square", [4.0])):
        getattr(norm, name).assign(value)
    norm.average_weight.assign(1.0)
    batches = rng.normal(1, 2, (3, 8, 1)).astype("float32")
    batches = [(x, np.zeros_like(x)) for x in batches]
    differences = []
    for x, _ in batches:
        # dL/dw = mean(y): 0 with the mean of the batch.
        mean = 0.75 * 3 + 0.25 * x.mean()
        square = 0.75 * 4 + 0.25 * np.mean((x - mean) ** 2)
        differences.append((x.mean() - mean) / 2 / np.sqrt(square))
    pairs = sum(differences) ** 2 - np.square(differences).sum()
    found = gradient_variance.squared_bias(model, batches)
    assert found == pytest.approx(pairs / 6, rel=1e-4)


def test_run(tmp_path, small_network):
    own = {"activations": ("relu",), "norms": ("bn",), "batches": 3, "workers": 1}
    own |= small.SETTINGS | {"seeds": 1}
    found, table = small.run(gradient_variance, tmp_path, "gradient_variance", **own)
    (row,) = found["rows"]
    assert row["norm"] == "bn" and "batches3" in row["runs"][0]["name"]
    assert row["gradient_variance"]["first rate"] > 0
    assert row["test_accuracy"] in table.partition("Test accuracy")[2]


def test_by_phase():
    values = [1.0, 4.0, 9.0, 100.0, None, 5.0]
    curve = [{"epoch": i, "v": value} for i, value in enumerate(values, start=1)]
    # Of six epochs the rate falls after the third and after the fifth; a run that
    # diverged ends early.
    for curves, key, expected in (
        ([curve], "v", [36 ** (1 / 3), 100, 5]),
        ([curve], "w", [None] * 3),
        ([curve[:2]], "v", [2, None, None]),
    ):
        means = gradient_variance.by_phase(curves, key, 6)
        assert list(means.values()) == [v and pytest.approx(v) for v in expected]
