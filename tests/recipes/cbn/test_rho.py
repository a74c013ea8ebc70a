import json

import numpy as np
import pytest

from recipes.cbn import rho
from tests.support import tiny
from tests.support.backend import thorough_on

pytestmark = thorough_on("jax")


def test_run(tmp_path, tiny_network):
    own = {"activations": ("relu",), "seeds": 2, "rhos": (1.0, 8.0), "workers": 1}
    own |= {"target_accuracy": 0.0, "runs_dir": str(tmp_path)}
    directory = rho.run(rho.Settings(**tiny.SETTINGS, **own))
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["accuracy.png", "curves.png", "results.json", "table.md"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["rho"] for row in rows] == [1.0, 8.0]
    assert [row["epochs_to_target"] for row in rows] == [[1, 1]] * 2
    paths = sorted(tmp_path.glob("*-relu-seed?-*-rho8-*/results.json"))
    found = [json.loads(path.read_text())["test_accuracy"] for path in paths]
    accuracy = {"mean": np.mean(found), "std": np.std(found, ddof=1)}
    assert rows[1]["test_accuracy"] == pytest.approx(accuracy)
    assert rows[0]["train_loss"]["mean"] != rows[1]["train_loss"]["mean"]
    table = (directory / "table.md").read_text()
    assert table.count("| rho ") == 3 and table.count("| 8 ") == 3


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
