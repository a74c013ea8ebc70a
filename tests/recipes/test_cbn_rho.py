import json

import pytest

from recipes import cbn_rho, grid
from tests.recipes import tiny


def test_cbn_rho(tmp_path, monkeypatch):
    monkeypatch.setattr(grid.models, "build", tiny.build)
    grid._last.clear()
    arguments = dict(
        settings=tiny.SETTINGS,
        activations=["relu"],
        seeds=2,
        rhos=[1.0, 8.0],
        target_accuracy=0.0,
        runs_dir=tmp_path,
        workers=1,
    )
    directory = cbn_rho.cbn_rho(**arguments)
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["accuracy.png", "curves.png", "results.json", "table.md"]
    results = json.loads((directory / "results.json").read_text())
    assert [row["rho"] for row in results["rows"]] == [1.0, 8.0]
    for row in results["rows"]:
        runs = row["runs"]
        mean = sum(run["test_accuracy"] for run in runs) / 2
        assert row["test_accuracy"]["mean"] == pytest.approx(mean)
        assert row["epochs_to_target"] == [1, 1]
        assert ["rho8.0" in run["name"] for run in runs] == [row["rho"] == 8.0] * 2
    losses = [row["train_loss"]["mean"] for row in results["rows"]]
    assert losses[0] != losses[1]
    table = (directory / "table.md").read_text()
    assert table.count("| rho | relu |") == 3 and "| 8 | 1.0 |" in table

    before = (directory / "table.md").read_text()
    assert cbn_rho.cbn_rho(**arguments) == directory  # nothing is trained again
    assert (directory / "table.md").read_text() == before


def row(activation, rho, accuracy, loss=1.0):
    score = None if accuracy is None else {"mean": accuracy, "std": 0.0}
    loss = {"mean": loss, "std": 0.0}
    return dict(activation=activation, rho=rho, test_accuracy=score, train_loss=loss)


def test_best_rhos():
    rows = [
        row("tanh", 0.25, None),
        row("tanh", 1.0, 0.9),
        row("tanh", 2.0, 0.95, loss=0.2),
        row("tanh", 4.0, 0.95, loss=0.1),
        row("relu", 0.25, 0.5),
        row("selu", 0.25, None),
    ]
    assert cbn_rho.best_rhos(rows) == {"tanh": 4.0, "relu": 0.25}
