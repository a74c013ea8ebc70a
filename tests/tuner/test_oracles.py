import collections

import keras_tuner
import pytest

from tests.support import synthetic_search as synthetic
from tests.support.backend import later, once, thorough_on
from tuner import oracles, trials

pytestmark = thorough_on("jax")


def run(directory, algorithm, count=8, **more):
    tuner = synthetic.Tuner(synthetic.oracle(algorithm, count), directory, **more)
    tuner.search()
    return tuner


def values(oracle):
    return [oracle.trials[key].hyperparameters.values for key in oracle.start_order]


# Of the writes, of which there are more. A Gaussian process takes long.
EVERY = {name: range(1, 36) for name in oracles.ALGORITHMS} | {"bayesian": (20, 26, 29)}
FEW = {"random": (4, 7, 20, 29), "grid": (20,), "hyperband": (21,), "bayesian": (26,)}


@pytest.mark.parametrize("moments", [FEW, *later(EVERY, marks=[once])], ids=["", "all"])
@pytest.mark.parametrize("algorithm", sorted(oracles.ALGORITHMS))
def test_a_search_that_ended_at_a_write_goes_on(algorithm, moments, tmp_path):
    """Killed, or as the disk was full: no trial is lost, none runs twice."""
    whole = run(tmp_path / "whole", algorithm).oracle
    assert len(whole.end_order) == 8
    for fatal in moments[algorithm]:
        error = KeyboardInterrupt() if fatal % 2 else OSError(28, "No space left")
        directory = tmp_path / str(fatal)
        with synthetic.ends_at_write(fatal, error):
            run(directory, algorithm)
        before = synthetic.oracle(algorithm, directory=directory)
        if (directory / "oracle.json").exists():
            before.reload()
        after = run(directory, algorithm)
        counts = collections.Counter([*before.end_order, *after.ran])
        assert counts == dict.fromkeys(whole.end_order, 1)
        assert sorted(after.oracle.end_order) == sorted(whole.end_order)
        # Interrupted or not, the search is the same.
        assert values(after.oracle) == values(whole)
        for key in whole.end_order:
            assert after.oracle.trials[key].score == whole.trials[key].score


@pytest.mark.parametrize("algorithm", ["bayesian", "random", "grid"])
def test_a_complete_search_goes_on_with_more_trials(algorithm, tmp_path):
    first = run(tmp_path / "a", algorithm, count=3)
    more = run(tmp_path / "a", algorithm, count=6)
    assert len(first.ran) == len(more.ran) == 3
    assert values(more.oracle)[:3] == values(first.oracle)


def test_a_grid_has_every_combination_once(tmp_path):
    found = values(run(tmp_path / "a", "grid", count=None).oracle)
    assert len(found) == len({tuple(v.values()) for v in found}) == 7 * 6
    assert found[0] == {"rho": 1.0, "omega": 10.0}


def test_a_grid_keeps_bounds_of_many_digits(tmp_path):
    oracle = synthetic.oracle("grid", None, "rho=1.41421..2")
    tuner = synthetic.Tuner(oracle, tmp_path)
    tuner.search()
    assert values(tuner.oracle)[0]["rho"] == 1.41421


def test_bayesian_learns_from_failed_trials(tmp_path):
    """Where trials diverge, fewer are tried than KerasTuner's own oracle would."""

    def fails(values):
        return values["rho"] < 0.7  # where the maximum is

    found = run(tmp_path / "a", "bayesian", count=12, fails=fails).oracle
    failed = [t for t in found.trials.values() if t.status == "FAILED"]
    assert len({t.hyperparameters.values["rho"] for t in failed}) == len(failed) > 0
    x, y = found._vectorize_trials()
    assert len(x) == len(y) == 12
    # Scores are minimised here: a failed trial is the worst one.
    worst = max(-t.score for t in found.trials.values() if t.score is not None)
    assert sorted(y)[-len(failed) :] == [worst] * len(failed)
    last = [found.trials[key].status for key in found.start_order[-5:]]
    assert last.count("FAILED") < 5
    for value in (v for each in values(found) for v in each.values()):
        assert value == float(f"{value:.4g}")


def test_a_search_goes_on_though_trials_fail(tmp_path):
    """Hyperband with the best ones; and random search even if all fail."""

    def fails(values):
        return values["omega"] > 50

    found = run(tmp_path / "a", "hyperband", count=None, fails=fails).oracle
    whole = run(tmp_path / "b", "hyperband", count=None).oracle
    assert len(found.end_order) == len(whole.end_order)
    ended = [t for t in found.trials.values() if t.status == "COMPLETED"]
    assert 9 in [t.hyperparameters.values["tuner/epochs"] for t in ended]
    given = {key: t.hyperparameters.values for key, t in found.trials.items()}
    went_on = {v["tuner/trial_id"] for v in given.values() if "tuner/trial_id" in v}
    first = [k for k in went_on if given[k]["tuner/round"] == 0 and k in found.trials]
    of_largest = [k for k in first if given[k]["tuner/bracket"] == 2]
    assert [found.trials[k].status for k in of_largest] == ["COMPLETED"] * 3
    lost = run(tmp_path / "c", "random", fails=lambda values: True).oracle
    assert [t.status for t in lost.trials.values()] == ["FAILED"] * 8


def test_a_tuner_without_a_trial_waits_before_it_asks_again(tmp_path, monkeypatch):
    tuner = synthetic.Tuner(synthetic.oracle("random", 2), tmp_path / "a")
    create, waited, idle = tuner.oracle.create_trial, [], iter([1, 0, 1, 1, 0, 0])

    def sometimes(tuner_id):
        if next(idle):
            hyperparameters = tuner.oracle.get_space()
            return keras_tuner.engine.trial.Trial(hyperparameters, status="IDLE")
        return create(tuner_id)

    monkeypatch.setattr(tuner.oracle, "create_trial", sometimes)
    monkeypatch.setattr(trials.time, "sleep", waited.append)
    tuner.search()
    assert len(tuner.ran) == 2 and waited == [trials.IDLE_SECONDS] * 3


def resumed(tmp_path, *tuner_ids, count):
    """A chief that started again, and the trials that its workers had."""
    before, after = (
        synthetic.oracle("random", count, directory=tmp_path / "a") for _ in range(2)
    )
    started = [before.create_trial(tuner_id) for tuner_id in tuner_ids]
    after.reload()
    return after, started


def end(oracle, trial):
    oracle.update_trial(trial.trial_id, {"accuracy": 0.5})
    trial.status = "COMPLETED"
    oracle.end_trial(trial)


def end_all(oracle, tuner_id):
    order = []
    while (trial := oracle.create_trial(tuner_id)).status == "RUNNING":
        order.append(trial.trial_id)
        end(oracle, trial)
    return order


def test_after_a_restart_of_the_chief_trials_stay_with_their_workers(tmp_path):
    chief, (first, second) = resumed(tmp_path, "worker0", "worker1", count=4)
    # worker0 is still training, and tells the new chief when it is done.
    again = chief.create_trial("worker1")
    assert again.trial_id == second.trial_id
    end(chief, first)
    assert chief.end_order == [first.trial_id]
    end(chief, again)
    assert len(end_all(chief, "worker0")) == 2 and len(set(chief.end_order)) == 4
    assert chief.tuner_ids == {"worker1"}


def test_a_trial_whose_worker_is_gone_is_taken_over_at_the_end(tmp_path):
    chief, (lost, mine) = resumed(tmp_path, "gone", "worker0", count=3)
    order = end_all(chief, "worker0")
    assert order[0] == mine.trial_id and order[-1] == lost.trial_id
    end(chief, lost)  # from the worker that was thought to be gone
    assert chief.end_order == order and len(set(order)) == 3
