import json

import keras
import numpy as np
import pytest

from recipes.cbn import max_lr
from recipes.engine import classifier, training
from tests.support import tiny


def test_gradient_norm_and_steps_of_a_linear_model():
    """Against NumPy: the squared norm is summed, and the steps are those of SGD."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(12, n)).astype("float32") for n in (3, 2))
    w = rng.normal(size=(3, 2)).astype("float32")
    model = keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.Dense(2, None, False)]
    )
    model.layers[0].set_weights([w])
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


def test_measuring_changes_no_training(tmp_path, tiny_network):
    settings = classifier.Training(
        **tiny.SETTINGS,
        activation="relu",
        norm="mean_removal",
        runs_dir=str(tmp_path),
    )
    curves = []
    for train in (classifier.train, max_lr.train):
        training._last.clear()
        metrics = train(settings).metrics
        curves.append([line["train_loss"] for line in metrics])
    np.testing.assert_allclose(*curves, rtol=1e-5)


def test_max_lr(tmp_path, tiny_network):
    settings = max_lr.Settings(
        **tiny.SETTINGS,
        activations=("relu",),
        norms=("none", "cbn"),
        learning_rates=(0.1, 1e30),
        runs_dir=str(tmp_path),
        workers=1,
    )
    directory = max_lr.run(settings)
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["accuracy.png", "gradient_norm.png", "results.json", "table.md"]
    results = json.loads((directory / "results.json").read_text())
    lost = next(row for row in results["rows"] if row["learning_rate"] == 1e30)
    assert lost["norm"] == "none" and not lost["trains"] and lost["runs"][0]["diverged"]
    table = (directory / "table.md").read_text()
    assert table.count("| relu ") == 2 and "diverged ✗" in table


def line(loss, accuracy):
    return {"train_loss": loss, "train_accuracy": accuracy, "guessing": 0.1}


@pytest.mark.parametrize(
    "last,expected",
    [(line(0.1, 0.9), True), (line(2.1, 0.2), True), (line(2.3, 0.1), False)],
)
def test_trains(last, expected):
    assert max_lr.trains([line(9.0, 0.1), last]) == expected
    assert not max_lr.trains([last, {"train_loss": None, "train_accuracy": 0.9}])


def test_largest():
    rows = [
        {"activation": "relu", "norm": norm, "learning_rate": rate, "trains": trains}
        for norm, rate, trains in [
            ("none", 0.1, False),
            ("none", 1.0, False),
            ("cbn", 0.01, True),
            ("cbn", 0.1, True),
            ("cbn", 1.0, False),
        ]
    ]
    assert max_lr.largest(rows) == {"relu": {"none": None, "cbn": 0.1}}
