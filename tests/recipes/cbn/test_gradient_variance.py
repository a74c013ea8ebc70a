import json

import keras
import numpy as np
import pytest

from recipes.cbn import gradient_variance
from recipes.engine import data
from recipes.engine.training import Outcome
from tests.support import tiny
from tests.support.backend import thorough_on

pytestmark = thorough_on("jax")


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
    with pytest.raises(ValueError, match="`batches` must be at least 2.*batches=1"):
        gradient_variance.Settings(batches=1)


def test_run(tmp_path, monkeypatch):
    def trained(settings):
        values = {"gradient_variance": 4.0, "gradient_squared_norm": 1.0}
        line = {"epoch": 1, "train_loss": 1.0} | values
        results = {"name": settings.label(), "diverged": False}
        return Outcome(settings, results, [line])

    monkeypatch.setattr(gradient_variance, "train", trained)
    own = {"activations": ("relu",), "norms": ("cbn_batch", "cbn"), "batches": 3}
    own |= {"epochs": 2, "runs_dir": str(tmp_path), "workers": 1}
    directory = gradient_variance.run(gradient_variance.Settings(**own))
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["gradient_variance.png", "results.json", "table.md"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["norm"] for row in rows] == ["cbn_batch", "cbn"]
    assert all(row["gradient_variance"]["first rate"] == 4 for row in rows)
    assert all("batches3" in row["runs"][0]["name"] for row in rows)
    table = (directory / "table.md").read_text()
    assert table.count("| CBN without AMAT |") == 2 and "(1.00)" in table


@pytest.mark.thorough
def test_a_training_is_measured(tmp_path, tiny_network):
    own = {"activation": "relu", "batches": 3, "runs_dir": str(tmp_path)}
    settings = gradient_variance.Measured(**tiny.SETTINGS, **own)
    lines = gradient_variance.train(settings).metrics
    assert len(lines) == 2 and all(line["gradient_variance"] > 0 for line in lines)


def test_by_phase():
    values = [1.0, 4.0, 9.0, 100.0, None, 5.0]
    curve = [{"epoch": i, "v": value} for i, value in enumerate(values, start=1)]
    # Of six epochs the rate falls after the third and after the fifth.
    means = gradient_variance.by_phase([curve], "v", 6)
    assert list(means.values()) == pytest.approx([36 ** (1 / 3), 100, 5])
    empty = gradient_variance.by_phase([curve], "w", 6)
    assert set(empty.values()) == {None}
    # A run that diverged ends early.
    means = gradient_variance.by_phase([curve[:2]], "v", 6)
    assert list(means.values()) == [pytest.approx(2), None, None]


def test_ratios_are_to_cbn_without_amat():
    values = dict.fromkeys(gradient_variance.PHASES, 4.0) | {"a tenth": None}
    rows = [
        {"activation": "relu", "norm": norm}
        | {key: values for key in gradient_variance.VALUES}
        for norm in ("cbn", "cbn_batch")
    ]
    rows[1]["gradient_variance"] = dict.fromkeys(values, 2.0)
    cells = [cell.strip() for cell in gradient_variance.table(rows).split("|")]
    start = cells.index("CBN")
    assert cells[start + 1 : start + 4] == ["4.00e+00 (2.00)", "–", "4.00e+00 (2.00)"]
    assert "(" not in gradient_variance.table(rows[:1]).split("Geometric")[0]
