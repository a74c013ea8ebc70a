import json
import pathlib

import keras
import pytest

from recipes import compare, figures, models
from tests.recipes import small

SETTINGS = {"train_size": 64, "batch_size": 32, "epochs": 2}


def test_compare(tmp_path):
    arguments = dict(
        models=["resnet8"],
        norms=["bn", "cbn"],
        activations=["relu"],
        seeds=1,
        config=SETTINGS,
        target_accuracy=0.0,
        runs_dir=tmp_path / "runs",
        saved_models_dir=tmp_path / "models",
    )
    directory = compare.compare(**arguments, workers=2)
    assert directory.parent == tmp_path / "runs"
    assert directory.name.startswith("compare-digits-resnet8-bn+cbn-relu-seeds1-")
    assert "train_size64" in directory.name
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["curves.png", "results.json", "table.md"]
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")

    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["norm"] for row in rows] == ["bn", "cbn"]
    for row in rows:
        assert row["seeds"] == 1 and row["diverged"] == 0
        assert row["epochs_to_target"] == [1]
        (run,) = row["runs"]
        assert row["test_accuracy"] == {"mean": run["test_accuracy"], "std": 0}
        keras.models.load_model(run["saved_model"])
    table = (directory / "table.md").read_text()
    assert table.count("| resnet8 | relu |") == 2 and "| 1.0 |" in table

    # Nothing is trained again, with any number of workers.
    files = tmp_path.glob("runs/digits*/*")
    written = {path: path.stat().st_mtime_ns for path in files}
    assert len(written) == 2 * 3
    compare.compare(**arguments, workers=1)
    assert written == {path: path.stat().st_mtime_ns for path in written}
    assert (directory / "table.md").read_text() == table


def run(diverged=False, accuracy=0.5, seconds=0.01):
    return {
        "diverged": diverged,
        "test_accuracy": accuracy,
        "train_loss": None if diverged else 1 - accuracy,
        "seconds_per_step": seconds,
    }


def curve(*accuracies):
    return [
        {"epoch": i, "test_accuracy": accuracy, "train_loss": 1.0}
        for i, accuracy in enumerate(accuracies, start=1)
    ]


def row(runs, curves):
    name = {"model": "m", "activation": "a", "norm": "n"}
    return name | compare.summarise(runs, curves, 0.9)


def test_table():
    good = row([run(accuracy=0.8), run(accuracy=0.9)], [curve(0.9), curve(0.1, 0.95)])
    some = row([run(), run(diverged=True)], [curve(0.1, 0.2), curve(0.92)])
    none = row([run(diverged=True)], [curve(0.1)])
    lines = compare.table([good, some, none], 0.9).splitlines()
    assert "epochs to 90%" in lines[0]
    assert lines[2] == (
        "| m | a | n | 85.00 ± 5.00 | 0.1500 ± 0.0500 | 1.5 | 10.0 ± 0.0 |  |"
    )
    assert lines[3] == (
        "| m | a | n | 50.00 ± 0.00 | 0.5000 ± 0.0000 | 1.0 (1 of 2 runs) | 10.0 ± 0.0 "
        "| 1 of 2 |"
    )
    assert lines[4] == "| m | a | n | – | – | never | – | 1 of 1 |"


def test_a_run_that_diverges_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "build", small.build)
    directory = compare.compare(
        models=["resnet8"],
        norms=["none"],
        # The first grows beyond all numbers at such a rate, the second is bounded.
        activations=["linear", "tanh"],
        seeds=1,
        config=SETTINGS | {"epochs": 6, "learning_rate": 1e6, "weight_decay": 0.0},
        runs_dir=tmp_path / "runs",
        saved_models_dir=tmp_path / "models",
        workers=1,
    )
    lost, good = json.loads((directory / "results.json").read_text())["rows"]
    assert (lost["diverged"], good["diverged"]) == (1, 0)
    assert lost["test_accuracy"] is None and good["test_accuracy"]["mean"] > 0
    assert lost["runs"][0]["epochs"] < 6 and good["runs"][0]["epochs"] == 6
    lines = (directory / "table.md").read_text().splitlines()
    assert lines[2].startswith("| resnet8 | linear | none | – | – | never")
    assert lines[2].endswith("| 1 of 1 |") and lines[3].endswith("|  |")
    assert (directory / "curves.png").exists()


def test_curves_of_diverged_runs(tmp_path):
    lost = [{"epoch": 1, "test_accuracy": 0.1, "train_loss": None}]
    panels = {"a": {"x": [lost], "y": [curve(0.1, 0.2), lost]}, "b": {"y": [curve(1)]}}
    path = pathlib.Path(tmp_path) / "curves.png"
    figures.training_curves(path, panels, "title")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("changed", ["models", "norms", "activations"])
def test_a_bad_name_is_refused_before_anything_is_trained(tmp_path, changed):
    names = {"models": ["resnet8"], "norms": ["bn"], "activations": ["relu"]}
    names[changed] = [*names[changed], "unknown"]
    with pytest.raises(ValueError, match=f"{changed[:-1]}='unknown'"):
        compare.compare(**names, seeds=1, config=SETTINGS, runs_dir=tmp_path, workers=1)
    assert not list(tmp_path.iterdir())
