import json
import pathlib

import keras

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


def test_numbers_over_seeds():
    """Those of the tables are made again by `tests/test_numbers.py`."""
    few, most = ({"trials_at_once": n, "images_per_second": 2.0 * n} for n in (1, 3))
    usual = {"test_accuracy": 0.5, "train_loss": 1.0}
    good = [small.outcome(**usual, **more) for more in (few, most)]
    lost = small.outcome(**usual | {"test_accuracy": 0.1, "diverged": True})
    found = results.summarise([*good, lost], 0.9)
    assert most.items() <= found.items() and found["diverged"] == 1
    assert found["test_accuracy"] == {"mean": 0.5, "std": 0}
    assert results.summarise([*good[:1], lost], 0.9)["test_accuracy"]["std"] is None
