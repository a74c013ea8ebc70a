import json
import shlex

import keras
import numpy as np
import pytest

from recipes import train
from recipes.engine import classifier, command, data, figures, workers
from tests.support.backend import BACKEND, once, thorough_on
from tests.support.small import dense_networks as dense_networks
from tuner import report
from tuner.search import Settings, search

pytestmark = thorough_on("jax")

TINY = {"model": "resnet8", "train_size": 60, "batch_size": 16, "epochs": 2}
USUAL = TINY | {"tune": ("rho", "omega"), "algorithm": "random", "trials": 3}
USUAL |= {"name": "a", "workers": 1}
OTHER_STRATEGY = "tpu" if BACKEND == "jax" else "data_parallel"


def read(path):
    return json.loads(path.read_text())


def run(tmp_path, **arguments):
    """The text of a search, and its tuner_results.json."""
    text = search(Settings(**USUAL | arguments, runs_dir=str(tmp_path)))
    return text, read(tmp_path / "a" / "tuner_results.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("finished")
    return tmp_path, *run(tmp_path, seeds=2)


def test_what_is_written(finished):
    tmp_path, text, found = finished
    assert found["finished"] == 3 and found["failed"] == 0
    assert found["measured_on"] == "validation"
    assert found["settings"]["validation_size"] == 12
    assert found["hyperparameters"] == ["rho", "omega"]
    for row in found["trials"]:
        accuracies, values = row["accuracies"], row["values"]
        assert row["epochs"] == 2 and len(accuracies) == 2
        expected = {"mean": np.mean(accuracies), "std": np.std(accuracies, ddof=1)}
        assert row["accuracy"] == pytest.approx(expected)
        # They are those of the runs.
        for seed, accuracy in enumerate(accuracies):
            (path,) = tmp_path.glob(f"a/runs/*seed{seed}*omega{values['omega']}*")
            assert read(path / "results.json")["test_accuracy"] == accuracy
            assert read(path / "config.json")["rho"] == values["rho"]
    means = [row["accuracy"]["mean"] for row in found["trials"]]
    assert found["best"]["accuracy"]["mean"] == max(means)
    for name in ("accuracy.png", "parallel.png", "best_so_far.png"):
        assert (tmp_path / "a" / name).stat().st_size > 5000
    assert text == (tmp_path / "a" / "report.txt").read_text()
    assert found["command"] in text
    assert (tmp_path / "a" / "table.md").read_text() in text
    assert not list(tmp_path.rglob("*.keras"))


def test_the_best_setting_as_a_command(finished):
    found = finished[2]
    prefix, _, flags = found["command"].partition("python -m recipes.train ")
    assert prefix == ("" if BACKEND == "tensorflow" else f"KERAS_BACKEND={BACKEND} ")
    given = command.parse(train.Settings, flags.split())
    values = found["best"]["values"] | TINY
    assert {key: getattr(given, key) for key in values} == values
    assert given.validation_size is None  # all images train

    place = {"dataset": "cifar10", "data_dir": "/data", "validation_size": 5000}
    stages = {"rho_stage1": 0.5, "rho_stage2": 2.0}
    line = report.command(classifier.Saved(**place, omega=0.12345678), stages)
    assert "--stage_rho=stage1=0.5,stage2=2 --omega=0.12345678 --data_dir=" in line
    assert "--dataset=cifar10" in line and "validation" not in line
    line = report.command(classifier.Saved(dataset="my images/b.npz"), {})
    assert "--dataset=my images/b.npz" in shlex.split(line)


def test_the_same_again_trains_nothing_and_no_other_search(finished, monkeypatch):
    tmp_path, *expected = finished
    monkeypatch.setattr(keras.Model, "fit", None)
    assert [*run(tmp_path, seeds=2)] == expected
    with pytest.raises(ValueError, match="seeds: 2 there, 1 here"):
        run(tmp_path)


def test_the_best_and_its_pictures(monkeypatch):
    usual = {"status": "COMPLETED", "trial": "a"}
    scores = zip((1.0, 2.0, 4.0, 8.0), (0.5, 0.9, 0.7, 0.95), (8, 8, 8, 2), strict=True)
    rows = [
        usual
        | {"values": {"rho": rho}, "rho": rho, "epochs": epochs, "accuracies": [mean]}
        | {"accuracy": {"mean": mean, "std": None}}
        for rho, mean, epochs in scores
    ]
    # Of those that trained longest.
    assert max(rows, key=report._order)["rho"] == 2
    figures_drawn = []
    monkeypatch.setattr(
        figures, "save", lambda figure, path: figures_drawn.append(figure)
    )
    frame = report._frame({"trials": rows[:3]})
    report._best_so_far("a", frame, "accuracy", "title")
    report._parallel("b", frame, ["rho"], "accuracy", "title")
    (so_far,), (parallel,) = (figure.axes[:1] for figure in figures_drawn)
    np.testing.assert_allclose(so_far.lines[1].get_ydata(), [50, 90, 90])
    (thick,) = [line for line in parallel.lines if line.get_linewidth() > 2]
    assert thick.get_ydata()[-1] == 1


@once
@pytest.mark.thorough
def test_a_diverged_trial_has_failed_and_the_search_goes_on(tmp_path, capsys):
    text, found = run(tmp_path, tune=("learning_rate=0.01..1e30",), trials=4)
    assert found["failed"] >= 2 and found["finished"] + found["failed"] == 4
    assert text.count(" diverged |") == found["failed"]
    assert "trial 4/4: learning_rate=" in capsys.readouterr().out
    # Nothing but diverged trials.
    lost = {"tune": ("learning_rate=1e29..1e30",), "trials": 2, "epochs": 1}
    text, found = run(tmp_path / "lost", **lost)
    assert found["best"] is None and found["command"] is None
    assert "Best setting" not in text


@once
@pytest.mark.thorough
def test_another_error_ends_the_search_and_its_trial_is_not_lost(tmp_path, monkeypatch):
    fit, calls = keras.Model.fit, []

    def broken_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no space left")
        return fit(*args, **kwargs)

    monkeypatch.setattr(keras.Model, "fit", broken_once)
    with pytest.raises(RuntimeError, match="ended with an error: no space left"):
        run(tmp_path)
    _, found = run(tmp_path)
    assert [row["status"] for row in found["trials"]] == ["COMPLETED"] * 3


@once
@pytest.mark.thorough
def test_hyperband_goes_on_with_a_run(tmp_path):
    _, found = run(tmp_path, epochs=3, algorithm="hyperband", trials=None)
    assert {row["epochs"] for row in found["trials"]} == {1, 3}
    assert found["best"]["epochs"] == 3
    directories = list((tmp_path / "a" / "runs").iterdir())
    assert len(directories) < len(found["trials"])  # a promoted trial has its old one
    path = next(path for path in directories if (path / "results.json").exists())
    stored = read(path / "config.json")
    del stored["format"]
    places = {"runs_dir": str(tmp_path / "again"), "saved_models_dir": None}
    again = train.train(classifier.Saved(**stored, **places)).results
    assert read(path / "results.json")["test_accuracy"] == again["test_accuracy"]


def test_scored_by_test_images_if_asked(tmp_path):
    _, found = run(tmp_path, validation_size=0, trials=1, epochs=1)
    assert found["measured_on"] == "test"
    (accuracy,) = found["trials"][0]["accuracies"]
    hits = accuracy * len(data.load("digits").y_test)
    assert hits == pytest.approx(round(hits), abs=1e-3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"algorithm": "annealing"}, "`algorithm` must be of random, grid"),
        ({"tune": ("omega",), "rho_per": "stage"}, "'stage' if rho is tuned"),
        ({"rho": 3.0, "tune": ("rho",)}, "`rho` has no effect, because `tune` has"),
        ({"search_seed": 2**32 - 1}, "`search_seed` must be at most 4294967294"),
        ({"halving": 4}, "`halving` has no effect without `population`"),
        ({"norm": "bn"}, "not have rho, which the norm bn does not use"),
        ({"norm": "cbn_batch"}, "not have omega, which the norm cbn_batch does not"),
        ({"strategy": OTHER_STRATEGY}, "`strategy` must be one of"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **arguments)
    assert not list(tmp_path.glob("a/runs/*"))


@pytest.mark.parametrize(
    "count, given",
    [(288, {}), (12, {"train_size": 60}), (7, {"validation_size": 7})],
)
def test_how_many_images_are_held_out(count, given):
    assert Settings(**given).shared().validation_size == count


def test_how_many_train_at_the_same_time(monkeypatch):
    monkeypatch.setattr(workers, "default_count", lambda: 4)
    counts = {
        4: {"algorithm": "grid"},
        3: {"trials": 3},
        2: {"workers": 2},
        1: {"strategy": "mirrored"},
    }
    for count, given in counts.items():
        assert Settings(**given).processes() == count
