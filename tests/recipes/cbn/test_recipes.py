"""What the recipes of CBN measure, and how they choose.

Their tables are those of docs/results, which `tests/test_numbers.py` makes anew.
"""

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes import models
from recipes.cbn import assumptions, gradient_variance, max_lr, rho
from recipes.engine import data, training
from recipes.models import norms
from tests.support import small
from tests.support.backend import numpy


def test_gradient_norm_and_steps_of_a_linear_model():
    """Against NumPy: the squared norm is summed, and the steps are those of SGD."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(12, n)).astype("float32") for n in (3, 2))
    dense = keras.layers.Dense(2, use_bias=False)
    model = keras.Sequential([keras.layers.Input((3,)), dense])
    w = model.get_weights()[0].astype("float64")
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


def test_assumptions():
    """On the first CBN, whose inputs no other CBN touches."""
    norm = norms.get("cbn", rho=2.0)
    model = models.build("resnet8_0.25", (8, 8, 1), 10, norm, "tanh")
    settings = assumptions.Settings(model="resnet8_0.25", batch_size=32).one(seed=3)
    rng = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, CBN):
            layer.set_learning_rate(0.03)  # eta = 0.7
            layer.average_weight.assign(1.0)
            for variable in (layer.moving_mean, layer.beta, layer.gamma):
                variable.assign(rng.normal(size=variable.shape))
    before = [np.array(v) for v in model.get_weights()]
    values = assumptions.measure(model, None, settings)
    assert all(map(np.array_equal, before, model.get_weights()))
    assert [len(values[f"eta stage {i}"]) for i in (1, 2, 3)] == [4, 4, 8]
    layer = model.get_layer("stage1_block0_conv1_norm")
    ((batch, _),) = data.other_batches(settings, 1)
    x = numpy(keras.Model(model.inputs, layer.input)([batch]))
    gamma, beta, moving = map(numpy, (layer.gamma, layer.beta, layer.moving_mean))
    mean = x.mean((0, 1, 2))
    sigma = np.sqrt(np.square(x - mean + beta).mean((0, 1, 2)))
    eta = (mean - beta) / (0.7 * moving + 0.3 * mean)
    np.testing.assert_allclose(values["eta stage 1"], eta, rtol=1e-3)
    np.testing.assert_allclose(values["tau stage 1"], gamma / (2 * sigma), rtol=1e-3)


def test_shares_of_pooled_values():
    values = [[0.5, 2.5, np.nan, -1.0], [1.0, 1.5, 2.0, 0.0]]
    expected = {"first": 0.25, "last": 0.5, "all": 3 / 8, "not_finite": 1 / 8}
    assert assumptions.shares(values, (0, 2)) == expected
    curves = [[{"a": [1.0, None]}, {"a": [2.0]}], [{"a": [3.0]}], [{}]]
    first, second = assumptions.pooled(curves, "a")
    np.testing.assert_array_equal(first, [1, np.nan, 3])
    assert second == pytest.approx([2.0])


def test_runs(tmp_path, monkeypatch):
    own = small.SETTINGS | {"activations": ("relu",), "seeds": 1, "workers": 1}
    quarter = own | {"model": "resnet8_0.25"}  # it needs the layers of a real network
    found, _ = small.run(assumptions, tmp_path, "eta", "tau", **quarter)
    assert all(0 <= row["first"] <= 1 for row in found["rows"])
    small.use(monkeypatch)
    more = own | {"norms": ("bn",), "batches": 3}
    found, _ = small.run(gradient_variance, tmp_path, "gradient_variance", **more)
    assert found["rows"][0]["gradient_variance"]["first rate"] > 0
    more = own | {"norms": ("none",), "learning_rates": (0.1, 1e30)}
    found, _ = small.run(max_lr, tmp_path, "accuracy", "gradient_norm", **more)
    assert found["rows"][1]["runs"][0]["diverged"] and not found["rows"][1]["trains"]


def test_best_rhos():
    cells = {("tanh", 0.25): (None, 1.0), ("selu", 0.25): (None, 1.0)}
    cells |= {("tanh", 2.0): (0.95, 0.2), ("tanh", 4.0): (0.95, 0.1)}
    cells |= {("relu", 0.25): (0.5, 1.0), ("relu", 1.0): (0.4, 0.1)}
    rows = [
        {"activation": activation, "rho": value, "train_loss": {"mean": loss}}
        | {"test_accuracy": accuracy and {"mean": accuracy}}
        for (activation, value), (accuracy, loss) in cells.items()
    ]
    assert rho.best_rhos(rows) == {"tanh": 4.0, "relu": 0.25}
