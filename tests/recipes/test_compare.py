import json
import pathlib

import keras
import pytest

from recipes import compare
from recipes.engine import results
from tests.support import small


def test_compare(tmp_path, monkeypatch):
    small.use(monkeypatch, small.dense)
    own = {"models": ("resnet8",), "activations": ("relu",), "norms": ("cbn",)}
    own |= {"train_size": 64, "batch_size": 32, "epochs": 2, "target_accuracy": 0.0}
    own |= {"seeds": 1, **small.places(tmp_path)}
    directory = compare.run(compare.Settings(**own, workers=1))
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["curves.png", "details.md", "results.json", "table.md"]
    (row,) = json.loads((directory / "results.json").read_text())["rows"]
    assert (row["norm"], row["epochs_to_target"]) == ("cbn", [1])
    (run,) = row["runs"]
    assert row["test_accuracy"] == {"mean": run["test_accuracy"], "std": None}
    assert pathlib.Path(run["saved_model"]).exists()
    table = (directory / "table.md").read_text()
    assert table.count("| CBN ") == 2 and "One run each." in table and "±" not in table

    # Nothing is trained again, whatever the number of workers.
    monkeypatch.setattr(keras.Model, "fit", None)
    assert compare.run(compare.Settings(**own)) == directory
    assert (directory / "table.md").read_text() == table


def outcome(*accuracies, **more):
    lines = [
        {"epoch": i, "test_accuracy": accuracy, "train_loss": 1.0}
        for i, accuracy in enumerate(accuracies, start=1)
    ]
    return small.outcome(None, *lines, **lines[-1] | more)


def test_numbers_over_seeds():
    good = results.summarise([outcome(0.8, 0.9), outcome(0.7)], 0.9)
    assert good["test_accuracy"] == pytest.approx({"mean": 0.8, "std": 0.02**0.5})
    assert good["epochs_to_target"] == [2, None] and good["diverged"] == 0
    few, most = ({"trials_at_once": n, "images_per_second": 2.0 * n} for n in (1, 3))
    found = results.summarise([outcome(0.5, **few), outcome(0.5, **most)], 0.9)
    assert most.items() <= found.items()
    some = results.summarise([outcome(0.5), outcome(0.1, diverged=True)], 0.9)
    assert some["test_accuracy"] == {"mean": 0.5, "std": None}
    assert results.spread(good["test_accuracy"], 2, 100) == "80.00 ± 14.14"
    assert results.epochs([2, None]) == "2.0 (1 of 2 runs)"
    assert results.epochs([1, 2]) == "1.5" and results.epochs([None]) == "never"
