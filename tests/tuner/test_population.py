import json

import numpy as np
import pytest

from recipes.engine import classifier, joint_training
from tests.support import small
from tests.support import synthetic_search as synthetic
from tests.support.backend import BACKEND, jax_only, later
from tests.support.small import dense_networks as dense_networks
from tuner import population
from tuner.search import Settings, search

TINY = {"model": "resnet8", "train_size": 60, "batch_size": 16, "epochs": 4}
# Where training does not enlarge what rounding changes.
CALM = ("rho=1..4", "omega=0..30", "learning_rate=0.01..0.1")
HALVED = {"halving": 2, "population": 4}
USUAL = TINY | {"tune": CALM, "algorithm": "random", "trials": 5, "name": "a"}


def run(runs_dir, **arguments):
    """Searches; returns tuner_results.json, and the epochs of each run by its name."""
    usual = USUAL | {"population": 3, "halving": 1}
    search(Settings(**usual | arguments, runs_dir=str(runs_dir)))
    lines = {}
    for path in runs_dir.glob("a/runs/*/metrics.jsonl"):
        found = [json.loads(line) for line in path.read_text().splitlines()]
        lines[path.parent.name] = small.without_times(found)
    return json.loads((runs_dir / "a" / "tuner_results.json").read_text()), lines


def of(lines, row):
    """The epochs of a trial."""
    (name,) = [name for name in lines if f"omega{row['values']['omega']}-" in name]
    return lines[name]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A search whose trials train one after the other."""
    return run(tmp_path_factory.mktemp("alone"), population=1)


@jax_only
def test_halving_ends_the_worse_ones_and_their_places_are_filled(alone, tmp_path):
    expected, whole = alone
    found, lines = run(tmp_path, **HALVED)
    assert found["finished"] == expected["finished"] == 5
    epochs = [row["epochs"] for row in found["trials"]]
    assert set(epochs) <= {1, 2, 4} and epochs.count(4) >= 1
    assert epochs[:4].count(1) == 2  # of the first four, at the first rung
    # Trials together have the scores of trials alone.
    assert lines.keys() == whole.keys()
    for name, scores in lines.items():
        for a, b in zip(scores, whole[name]):
            # 4 epochs of 3 steps, that round sums of up to 64 terms otherwise.
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    for a, b in zip(found["trials"], expected["trials"], strict=True):
        assert a["values"] == b["values"] and b["epochs"] == 4
        scores = of(lines, a)
        assert len(scores) == a["epochs"]
        assert a["accuracies"] == [scores[-1]["test_accuracy"]]
    # The best of the first four after an epoch are those that went on.
    first = [of(lines, row)[0]["test_accuracy"] for row in found["trials"][:4]]
    worst = min(first[i] for i in range(4) if epochs[i] > 1)
    assert all(first[i] <= worst for i in range(4) if epochs[i] == 1)
    assert found["best"]["epochs"] == 4


@jax_only
@pytest.mark.parametrize(
    "fatal, arguments",
    [
        (8, {"population": 1, "trials": 2}),
        *later(
            (34, HALVED),
            (21, HALVED | {"algorithm": "bayesian"}),
            (8, {"seeds": 2, "population": 4}),
        ),
    ],
)
def test_killed_and_again(fatal, arguments, alone, tmp_path, monkeypatch):
    expected = alone[0]["trials"][:2]
    if arguments.get("population") != 1:
        expected = run(tmp_path / "whole", **arguments)[0]["trials"]
    monkeypatch.setattr(joint_training, "CHECKPOINT_SECONDS", 0)
    with synthetic.ends_at_write(fatal, KeyboardInterrupt()):
        run(tmp_path, **arguments)
    paths = list(tmp_path.glob("a/runs/*/results.json"))
    finished = {path: path.stat().st_mtime_ns for path in paths}
    found, _ = run(tmp_path, **arguments)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert found["finished"] == len(expected)
    for a, b in zip(found["trials"], expected, strict=True):
        assert a["values"] == b["values"] and a["epochs"] == b["epochs"]
        np.testing.assert_allclose(a["accuracies"], b["accuracies"], atol=1e-6)
    assert not list(tmp_path.glob("a/runs/*/checkpoint.npz"))


@jax_only
@pytest.mark.thorough
def test_hyperband_goes_on_with_the_weights_of_a_trial(tmp_path):
    more = {"algorithm": "hyperband", "trials": None}
    found, lines = run(tmp_path, epochs=3, population=4, **more)
    assert {row["epochs"] for row in found["trials"]} == {1, 3}
    assert {len(scores) for scores in lines.values()} == {1, 3}
    assert [line["epoch"] for line in max(lines.values(), key=len)] == [1, 2, 3]
    # A run that was stopped and went on is that of an uninterrupted training.
    best = found["best"]
    values = found["settings"] | best["values"] | {"runs_dir": str(tmp_path / "again")}
    (again,) = joint_training.train([classifier.Saved(**values, saved_models_dir=None)])
    accuracy = again.results["test_accuracy"]
    assert accuracy == pytest.approx(best["accuracies"][0], abs=1e-6)


@jax_only
@pytest.mark.thorough
def test_rho_per_stage_and_a_diverged_trial(tmp_path):
    """The others go on."""
    tune = "rho", "learning_rate=0.01..1e30"
    found, lines = run(tmp_path, rho_per="stage", tune=tune)
    assert found["failed"] >= 1 and found["failed"] + found["finished"] == 5
    assert found["hyperparameters"] == ["rho_logits", "learning_rate"]
    assert len({row["values"]["rho_logits"] for row in found["trials"]}) == 5
    if found["best"]:
        best = found["best"]["values"]["rho_logits"]
        assert f"--stage_rho=logits={best:g}" in found["command"]


def test_rungs_and_who_stays():
    assert population.rung_epochs(15, 2, 16) == [2, 4, 8]
    assert population.rung_epochs(120, 2, 3) == [60]
    assert population.rung_epochs(15, 1, 16) == []
    scores = [0.1, 0.5, 0.5, 0.3, 0.5]
    assert [i for i in range(5) if population.stays(i, scores, 3)] == [1, 2]


BAD = [
    ({"tune": ("rho", "momentum")}, "rho, omega and learning_rate.*with momentum"),
    ({"population": 1, "seeds": 2}, "room for the 2 seeds"),
    ({"strategy": "data_parallel"}, "give no `strategy`"),
]
if BACKEND != "jax":
    BAD = [({}, "KERAS_BACKEND=jax.*Received: backend")]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_arguments(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **arguments)
    assert not list(tmp_path.glob("a/runs/*"))
