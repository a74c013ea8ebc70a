import json

import keras
import numpy as np
import pytest

from recipes.engine import classifier, files, together
from tests.support import small
from tuner import population
from tuner.search import Settings, search

IS_JAX = keras.backend.backend() == "jax"
needs_jax = pytest.mark.skipif(not IS_JAX, reason="populations train on JAX")

TINY = {"model": "resnet8", "train_size": 60, "batch_size": 16, "epochs": 4}


@pytest.fixture(scope="module", autouse=True)
def small_networks():
    with pytest.MonkeyPatch.context() as patch:
        small.use(patch)
        yield


# Where training does not enlarge what rounding changes.
CALM = ("rho=1..4", "omega=0..30", "learning_rate=0.01..0.1")


def run(runs_dir, **arguments):
    usual = TINY | {"tune": CALM, "algorithm": "random", "trials": 5}
    usual |= {"population": 3, "halving": 1, "name": "a"}
    return search(Settings(**usual | arguments, runs_dir=str(runs_dir)))


def alone_again(found, row, directory):
    """The results of a trial's run, trained by `together`."""
    settings = classifier.Saved(
        **found["settings"] | row["values"],
        runs_dir=str(directory),
        saved_models_dir=None,
    )
    (outcome,) = together.train([settings])
    return outcome.results


def outcome(runs_dir):
    return json.loads((runs_dir / "a" / "tuner_results.json").read_text())


def curves(runs_dir):
    """The epochs of each run, by its name."""
    paths = (runs_dir / "a" / "runs").glob("*/metrics.jsonl")
    return {
        path.parent.name: [
            {k: v for k, v in json.loads(line).items() if k[:7] != "seconds"}
            for line in path.read_text().splitlines()
        ]
        for path in paths
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, lines in expected.items():
        assert len(found[name]) == len(lines)
        for a, b in zip(found[name], lines, strict=True):
            for key in b:
                # 4 epochs of 3 steps, that round sums of up to 64 terms otherwise.
                np.testing.assert_allclose(a[key], b[key], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A search whose trials train one after the other."""
    tmp_path = tmp_path_factory.mktemp("alone")
    run(tmp_path, population=1)
    return outcome(tmp_path), curves(tmp_path)


@needs_jax
def test_trials_together_have_the_scores_of_trials_alone(alone, tmp_path):
    run(tmp_path)
    expected, lines = alone
    found = outcome(tmp_path)
    assert found["finished"] == expected["finished"] == 5
    assert_same(curves(tmp_path), lines)
    for a, b in zip(found["trials"], expected["trials"], strict=True):
        assert a["values"] == b["values"] and a["epochs"] == 4
        np.testing.assert_allclose(a["accuracies"], b["accuracies"], atol=1e-6)


@needs_jax
def test_a_trial_is_a_run_of_recipes_together(alone, tmp_path):
    expected, lines = alone
    row = expected["trials"][1]
    result = alone_again(expected, row, tmp_path)
    (name,) = [name for name in lines if f"omega{row['values']['omega']}-" in name]
    assert result["name"] == name
    assert result["test_accuracy"] == pytest.approx(row["accuracies"][0], abs=1e-6)
    assert result["train_loss"] == pytest.approx(lines[name][-1]["train_loss"], 1e-4)


@needs_jax
def test_halving_ends_the_worse_ones_and_their_places_are_filled(alone, tmp_path):
    expected, lines = alone
    run(tmp_path, halving=2, population=4)
    found = outcome(tmp_path)
    assert found["finished"] == 5
    epochs = [row["epochs"] for row in found["trials"]]
    assert set(epochs) <= {1, 2, 4} and epochs.count(4) >= 1
    assert epochs[:4].count(1) == 2  # of the first four, at the first rung
    whole = {name: scores for name, scores in curves(tmp_path).items()}
    assert_same(whole, {name: lines[name][: len(whole[name])] for name in lines})
    # The best of the first four after an epoch are those that went on.
    first = [
        next(v for k, v in whole.items() if f"omega{row['values']['omega']}-" in k)[0]
        for row in found["trials"][:4]
    ]
    ended = [i for i in range(4) if epochs[i] == 1]
    stayed = [i for i in range(4) if epochs[i] > 1]
    worst = min(first[i]["test_accuracy"] for i in stayed)
    assert all(first[i]["test_accuracy"] <= worst for i in ended)
    assert found["best"]["epochs"] == 4


class Killed(BaseException):
    pass


@needs_jax
@pytest.mark.parametrize(
    "kills, arguments",
    [((8,), {"seeds": 2, "population": 4}), ((21, 34), {"halving": 2})],
)
def test_killed_and_again(kills, arguments, tmp_path, monkeypatch):
    arguments = {"algorithm": "bayesian", "trials": 4} | arguments
    run(tmp_path / "whole", **arguments)
    expected = outcome(tmp_path / "whole")
    monkeypatch.setattr(together, "CHECKPOINT_SECONDS", 0)
    write = files.write
    for fatal in kills:
        written = []

        def count_down(path, save, fatal=fatal, written=written):
            written.append(path)
            if len(written) == fatal:
                raise Killed
            write(path, save)

        directory = tmp_path / str(fatal)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(files, "write", count_down)
            run(directory, **arguments)
        finished = {
            path: path.stat().st_mtime_ns
            for path in directory.glob("a/runs/*/results.json")
        }
        run(directory, **arguments)
        assert {path: path.stat().st_mtime_ns for path in finished} == finished
        found = outcome(directory)
        assert found["finished"] == 4
        for a, b in zip(found["trials"], expected["trials"], strict=True):
            assert a["values"] == b["values"] and a["epochs"] == b["epochs"]
            np.testing.assert_allclose(a["accuracies"], b["accuracies"], atol=1e-6)
        assert not list(directory.glob("a/runs/*/checkpoint.npz"))


@needs_jax
def test_a_diverged_trial_has_failed_and_does_not_touch_the_others(tmp_path):
    run(tmp_path, tune=("learning_rate=0.01..1e30",), trials=5)
    found = outcome(tmp_path)
    assert found["failed"] >= 1 and found["failed"] + found["finished"] == 5


@needs_jax
def test_hyperband_goes_on_with_the_weights_of_a_trial(tmp_path):
    run(tmp_path, epochs=3, algorithm="hyperband", trials=None, population=4)
    found = outcome(tmp_path)
    assert {row["epochs"] for row in found["trials"]} == {1, 3}
    lines = curves(tmp_path)
    assert {len(scores) for scores in lines.values()} == {1, 3}
    assert [line["epoch"] for line in max(lines.values(), key=len)] == [1, 2, 3]
    # A run that was stopped and went on is that of an uninterrupted training.
    best = found["best"]
    result = alone_again(found, best, tmp_path / "again")
    assert result["test_accuracy"] == pytest.approx(best["accuracies"][0], abs=1e-6)


@needs_jax
def test_rho_per_stage(tmp_path):
    run(tmp_path, rho_per="stage", tune=("rho",), trials=2)
    found = outcome(tmp_path)
    assert found["hyperparameters"] == ["rho_logits"]
    values = [row["values"]["rho_logits"] for row in found["trials"]]
    losses = [lines[-1]["train_loss"] for lines in curves(tmp_path).values()]
    assert len(set(values)) == len(set(losses)) == 2
    assert (
        f"--stage_rho=logits={found['best']['values']['rho_logits']:g}"
        in found["command"]
    )


def test_rungs():
    assert population.rung_epochs(15, 2, 16) == [2, 4, 8]
    assert population.rung_epochs(120, 2, 16) == [8, 15, 30, 60]
    assert population.rung_epochs(120, 4, 16) == [8, 30]
    assert population.rung_epochs(120, 2, 3) == [60]
    assert population.rung_epochs(1, 2, 16) == []
    assert population.rung_epochs(15, 1, 16) == []


def test_who_stays():
    scores = [0.1, 0.5, 0.5, 0.3, 0.5]
    kept = [place for place in range(5) if population.stays(place, scores, 2)]
    assert kept == [1, 2, 4]
    kept = [place for place in range(5) if population.stays(place, scores, 3)]
    assert kept == [1, 2]
    assert population.stays(0, [0.0], 2)


@needs_jax
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tune": ("rho", "momentum")}, "rho, omega and learning_rate.*with momentum"),
        ({"population": 1, "seeds": 2}, "room for the 2 seeds"),
        ({"halving": 0}, "`halving` must be at least 1"),
        ({"strategy": "data_parallel"}, "give no `strategy`"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **arguments)


@pytest.mark.skipif(IS_JAX, reason="of the other backends")
def test_other_backends_are_refused(tmp_path):
    with pytest.raises(ValueError, match="KERAS_BACKEND=jax.*Received: backend"):
        run(tmp_path)
    assert not list(tmp_path.iterdir())
