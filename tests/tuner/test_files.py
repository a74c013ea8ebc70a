"""A search whose files are damaged, or that two processes want."""

import shutil
from unittest import mock

import pytest

from recipes.engine import files, run
from recipes.engine.training import Outcome
from tests.programs import damaged
from tests.programs.damaged import search_state as found
from tests.support import synthetic_search as synthetic
from tests.support.backend import later, once, thorough_on
from tuner import search, trials

pytestmark = thorough_on("jax")


@pytest.fixture
def searched(tmp_path):
    damaged.search(tmp_path / "a")
    return tmp_path / "a"


@pytest.mark.parametrize("count", [12, *later(120, marks=[once])])
@pytest.mark.parametrize("name", damaged.SEARCH)
def test_a_damaged_file_is_an_error_or_another_text(name, count, searched):
    path = searched / name
    step = 1 + path.stat().st_size // count
    counted = damaged.count(path, lambda: found(searched), step, bits=[0])
    assert not counted["wrong"]
    assert counted["errors"] > 0.5 * counted.total()  # every cut is one


def test_a_trial_that_is_gone_or_another_is_an_error(searched):
    path = searched / "trial_1" / "trial.json"
    shutil.copy(searched / "trial_2" / "trial.json", path)
    with pytest.raises(ValueError, match=r"trial_1/trial.json is damaged.*of trial 2"):
        found(searched)
    shutil.rmtree(path.parent)
    with pytest.raises(ValueError, match=r"oracle.json is.*no trial_1/trial.json"):
        found(searched)


@pytest.mark.parametrize("name", ["oracle.json", "trial_0/trial.json"])
def test_a_file_of_another_search_or_version_is_an_error(name, searched):
    other = searched.parent / "b"
    oracle = synthetic.oracle("random", 4, "rho,learning_rate", directory=other)
    oracle.create_trial("worker0")
    shutil.copy(other / name, searched / name)
    with pytest.raises(ValueError, match="hyperparameters.*learning_rate.*rho"):
        found(searched)
    value = files.read_json(other / name)
    del value["hyperparameters"]
    files.write_json(searched / name, value)
    with pytest.raises(ValueError, match=f"{name} is damaged.*lacks hyperparameters"):
        found(searched)


def test_one_search_in_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PATIENCE", 0)
    for workers in (1, 2):
        settings = search.Settings(runs_dir=str(tmp_path), workers=workers)
        with (
            run.Run(settings.directory(), settings.config()),
            pytest.raises(run.InUse, match="is in use by another process"),
        ):
            search.search(settings)


def test_a_worker_waits_for_a_run_that_another_one_trains(tmp_path, monkeypatch):
    results = {"test_accuracy": 0.5, "epochs": 9, "diverged": False}
    answers = [run.InUse, run.InUse, Outcome(None, results, [])]
    monkeypatch.setattr(trials.train, "train", mock.Mock(side_effect=answers))
    monkeypatch.setattr(trials, "IN_USE_SECONDS", 0)
    oracle = synthetic.oracle("random", 1)
    trials.Tuner(oracle, tmp_path / "a", synthetic.SETTINGS, seeds=1).search()
    assert [trial.score for trial in oracle.trials.values()] == [0.5]
