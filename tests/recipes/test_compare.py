import json
import re

import keras
import pytest

from recipes import compare
from recipes.engine import figures, results, training
from tests.support import small

SETTINGS = {"train_size": 64, "batch_size": 32, "epochs": 2, "models": ("resnet8",)}


def settings(tmp_path, **changes):
    return compare.Settings(
        **SETTINGS | changes,
        runs_dir=str(tmp_path / "runs"),
        saved_models_dir=str(tmp_path / "models"),
    )


def test_compare(tmp_path):
    asked = settings(tmp_path, activations=("relu",), seeds=1, target_accuracy=0.0)
    directory = compare.run(asked)
    assert directory.parent == tmp_path / "runs"
    assert directory.name.startswith("compare-digits-activationsrelu-")
    assert "train_size64" in directory.name
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["curves.png", "details.md", "results.json", "table.md"]
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")

    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["norm"] for row in rows] == ["bn", "cbn"]
    for row in rows:
        assert row["seeds"] == 1 and row["diverged"] == 0
        assert row["epochs_to_target"] == [1]
        (run,) = row["runs"]
        assert row["test_accuracy"] == {"mean": run["test_accuracy"], "std": None}
        keras.models.load_model(run["saved_model"])
    table = (directory / "table.md").read_text()
    assert table.count("| BN ") == table.count("| CBN ") == 2
    assert "One run each." in table and "±" not in table
    details = (directory / "details.md").read_text()
    assert len(re.findall(r"\| resnet8 +\| +relu \|", details)) == 2

    # Nothing is trained again, with any number of workers.
    files = tmp_path.glob("runs/digits*/[!.]*")
    written = {path: path.stat().st_mtime_ns for path in files}
    assert len(written) == 2 * 3
    asked = settings(
        tmp_path, activations=("relu",), seeds=1, target_accuracy=0.0, workers=1
    )
    assert compare.run(asked) == directory
    assert written == {path: path.stat().st_mtime_ns for path in written}
    assert (directory / "table.md").read_text() == table


def outcome(*accuracies, diverged=False):
    metrics = [
        {"epoch": i, "test_accuracy": accuracy, "train_loss": 1.0}
        for i, accuracy in enumerate(accuracies, start=1)
    ]
    found = {
        "diverged": diverged,
        "test_accuracy": accuracies[-1],
        "train_loss": None if diverged else 1 - accuracies[-1],
        "seconds_per_step": 0.01,
    }
    return training.Outcome(None, found, metrics)


def test_numbers_over_seeds():
    good = results.summarise([outcome(0.8, 0.9), outcome(0.7)], 0.9)
    assert good["test_accuracy"]["mean"] == pytest.approx(0.8)
    assert good["test_accuracy"]["std"] == pytest.approx(0.02**0.5)  # n - 1
    assert good["epochs_to_target"] == [2, None] and good["diverged"] == 0
    some = results.summarise([outcome(0.5), outcome(0.1, diverged=True)], 0.9)
    assert some["test_accuracy"] == {"mean": 0.5, "std": None}
    assert some["diverged"] == 1
    none = results.summarise([outcome(0.1, diverged=True)], 0.9)
    assert none["test_accuracy"] is None
    assert results.spread(good["test_accuracy"], 2, 100) == "80.00 ± 14.14"
    assert results.spread(some["test_accuracy"], 2, 100) == "50.00"
    assert results.spread(None, 2) == "–"
    assert results.epochs([2, None]) == "2.0 (1 of 2 runs)"
    assert results.epochs([1, 2]) == "1.5" and results.epochs([None]) == "never"
    assert results.percent([outcome(0.5), outcome(0.1, diverged=True)]) == (
        "50.00 (1 of 2 diverged)"
    )


def test_a_run_that_diverges_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    small.use(monkeypatch)
    asked = settings(
        tmp_path,
        norms=("none",),
        # The first grows beyond all numbers at such a rate, the second is bounded.
        activations=("linear", "tanh"),
        seeds=1,
        epochs=6,
        learning_rate=1e6,
        weight_decay=0.0,
        workers=1,
    )
    directory = compare.run(asked)
    lost, good = json.loads((directory / "results.json").read_text())["rows"]
    assert (lost["diverged"], good["diverged"]) == (1, 0)
    assert lost["test_accuracy"] is None and good["test_accuracy"]["mean"] > 0
    assert lost["runs"][0]["epochs"] < 6 and good["runs"][0]["epochs"] == 6
    assert "– (1 of 1 diverged)" in (directory / "table.md").read_text()
    assert (directory / "curves.png").exists()


def test_curves_of_diverged_runs(tmp_path):
    lost = [{"epoch": 1, "test_accuracy": 0.1, "train_loss": None}]
    curve = outcome(0.1, 0.2).metrics
    panels = {"a": {"x": [lost], "y": [curve, lost]}, "b": {"y": [outcome(1).metrics]}}
    figures.training_curves(tmp_path / "curves.png", panels, "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("changed", ["models", "norms", "activations"])
def test_a_bad_name_is_refused_before_anything_is_trained(tmp_path, changed):
    names = {"models": ("resnet8",), "norms": ("bn",), "activations": ("relu",)}
    names[changed] = (*names[changed], "unknown")
    with pytest.raises(ValueError, match="unknown"):
        compare.run(settings(tmp_path, **names, seeds=1, workers=1))
    assert not list(tmp_path.iterdir())
