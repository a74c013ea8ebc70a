import json

import numpy as np
import pytest

from recipes.cbn import rho
from tests.support import tiny


def test_rho(tmp_path, tiny_network):
    settings = rho.Settings(
        **tiny.SETTINGS,
        activations=("relu",),
        seeds=2,
        rhos=(1.0, 8.0),
        target_accuracy=0.0,
        runs_dir=str(tmp_path),
        workers=1,
    )
    directory = rho.run(settings)
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["accuracy.png", "curves.png", "results.json", "table.md"]
    results = json.loads((directory / "results.json").read_text())
    assert [row["rho"] for row in results["rows"]] == [1.0, 8.0]
    for row in results["rows"]:
        runs = [
            json.loads(path.read_text())
            for path in tmp_path.glob("*-relu-seed?-*/results.json")
            if ("-rho8-" in path.parent.name) == (row["rho"] == 8)
        ]
        accuracies = [run["test_accuracy"] for run in runs]
        assert row["test_accuracy"]["mean"] == pytest.approx(np.mean(accuracies))
        assert row["test_accuracy"]["std"] == pytest.approx(np.std(accuracies, ddof=1))
        assert row["epochs_to_target"] == [1, 1]
    losses = [row["train_loss"]["mean"] for row in results["rows"]]
    assert losses[0] != losses[1]
    table = (directory / "table.md").read_text()
    assert table.count("| rho ") == 3 and table.count("| 8 ") == 3

    before = (directory / "table.md").read_text()
    assert rho.run(settings) == directory  # nothing is trained again
    assert (directory / "table.md").read_text() == before


def row(activation, value, accuracy, loss=1.0):
    score = None if accuracy is None else {"mean": accuracy, "std": 0.0}
    loss = {"mean": loss, "std": 0.0}
    return dict(activation=activation, rho=value, test_accuracy=score, train_loss=loss)


def test_best_rhos():
    rows = [
        row("tanh", 0.25, None),
        row("tanh", 1.0, 0.9),
        row("tanh", 2.0, 0.95, loss=0.2),
        row("tanh", 4.0, 0.95, loss=0.1),
        row("relu", 0.25, 0.5),
        row("selu", 0.25, None),
    ]
    assert rho.best_rhos(rows) == {"tanh": 4.0, "relu": 0.25}
