import json

import pytest

from recipes.cbn import rho
from recipes.engine import classifier
from recipes.engine.training import Outcome
from tests.support.backend import thorough_on

pytestmark = thorough_on("jax")


def test_run(tmp_path, monkeypatch):
    def trained(settings):
        accuracy = 0.5 + settings.seed / 10
        line = {"epoch": 1, "test_accuracy": accuracy, "train_loss": settings.rho}
        found = {"name": "x", "diverged": False, "seconds_per_step": None}
        return Outcome(settings, found | line, [line])

    monkeypatch.setattr(classifier, "train", trained)
    own = {"activations": ("relu",), "seeds": 2, "rhos": (1.0, 8.0), "workers": 1}
    directory = rho.run(
        rho.Settings(**own, target_accuracy=0.6, runs_dir=str(tmp_path))
    )
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["accuracy.png", "curves.png", "results.json", "table.md"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["rho"] for row in rows] == [1.0, 8.0]
    assert [row["train_loss"]["mean"] for row in rows] == [1.0, 8.0]
    assert [row["epochs_to_target"] for row in rows] == [[None, 1]] * 2
    accuracy = {"mean": 0.55, "std": 0.1 / 2**0.5}
    assert rows[1]["test_accuracy"] == pytest.approx(accuracy)
    table = (directory / "table.md").read_text()
    assert table.count("| rho ") == 3 and table.count("| 8 ") == 3
    assert table.count("55.00 ± 7.07") == 2


def test_best_rhos():
    def row(activation, value, accuracy, loss):
        accuracy = accuracy and {"mean": accuracy, "std": 0.0}
        of = {"test_accuracy": accuracy, "train_loss": {"mean": loss, "std": 0.0}}
        return {"activation": activation, "rho": value} | of

    rows = [
        row("tanh", 0.25, None, 1.0),
        row("tanh", 1.0, 0.9, 1.0),
        row("tanh", 2.0, 0.95, 0.2),
        row("tanh", 4.0, 0.95, 0.1),
        row("relu", 0.25, 0.5, 1.0),
        row("selu", 0.25, None, 1.0),
    ]
    assert rho.best_rhos(rows) == {"tanh": 4.0, "relu": 0.25}
