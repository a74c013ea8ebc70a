"""A search whose files are damaged, or that two processes want."""

import json
import shutil

import pytest

from recipes import experiment, files
from tests.recipes import damaged
from tests.recipes.damaged import search_state as found
from tests.recipes.test_files import holder  # noqa: F401, a fixture
from tests.tuner import synthetic
from tuner import oracles, search, trials


@pytest.fixture
def searched(tmp_path):
    damaged.search(tmp_path / "a")
    return tmp_path / "a"


@pytest.mark.parametrize("name", damaged.SEARCH)
def test_a_damaged_file_is_an_error_or_without_effect(name, searched):
    path = searched / name
    step = 1 + path.stat().st_size // 60
    counted = damaged.count(path, lambda: found(searched), step, bits=[0])
    assert not counted["wrong"]
    assert counted["errors"] > 0.7 * counted.total()  # white space has no effect


def test_a_trial_that_is_gone_or_another_is_an_error(searched):
    path = searched / "trial_1" / "trial.json"
    shutil.copy(searched / "trial_2" / "trial.json", path)
    with pytest.raises(ValueError, match=r"trial_1/trial.json is damaged.*of trial 2"):
        found(searched)
    shutil.rmtree(path.parent)
    with pytest.raises(ValueError, match=r"oracle.json is.*no trial_1/trial.json"):
        found(searched)


@pytest.mark.parametrize("name", ["oracle.json", "trial_1/trial.json"])
def test_a_file_of_another_search_or_version_is_an_error(name, searched):
    other = searched.parent / "b"
    oracle = synthetic.oracle("random", 4, tune="rho,learning_rate")
    oracle._set_project_dir(str(other.parent), other.name)
    for i in range(2):
        oracle.create_trial(f"worker{i}")
    shutil.copy(other / name, searched / name)
    with pytest.raises(ValueError, match="hyperparameters.*learning_rate.*rho"):
        found(searched)
    value = experiment.read_json(other / name)
    del value["hyperparameters"]
    experiment.write_json(searched / name, value, seal={})
    with pytest.raises(ValueError, match=f"{name} is damaged.*lacks hyperparameters"):
        found(searched)


def test_what_earlier_versions_wrote_is_read(searched):
    expected = found(searched)
    for path in (searched / "oracle.json", *searched.glob("trial_*/trial.json")):
        value = json.loads(path.read_text())
        assert value.pop("seal")
        path.write_text(json.dumps(value))
    assert found(searched) == expected


def test_one_search_in_a_directory(holder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(files, "PATIENCE", 0)
    settings, arguments = {"dataset": "digits"}, {"trials": 1, "name": "run"}

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(oracles, "make", stop)
        search.search(settings, runs_dir=tmp_path / "other", **arguments)
    shutil.copy(tmp_path / "other" / "run" / "config.json", tmp_path / "run")
    for workers in (None, 2):
        with pytest.raises(files.InUse, match=f"run is in use by process {holder.pid}"):
            search.search(settings, workers=workers, runs_dir=tmp_path, **arguments)


def test_a_worker_waits_for_a_run_that_another_one_trains(tmp_path, monkeypatch):
    answers = [files.InUse, files.InUse, {"test_accuracy": 0.5, "epochs": 9}]

    def train(*_, **__):
        answer = answers.pop(0)
        if answer is files.InUse:
            raise answer
        return answer | {"diverged": False}

    monkeypatch.setattr(trials.train, "train", train)
    monkeypatch.setattr(trials, "IN_USE_SECONDS", 0)
    oracle = synthetic.oracle("random", 1)
    tuner = trials.Tuner(oracle, tmp_path / "a", synthetic.SETTINGS, seeds=1)
    tuner.search()
    assert [trial.score for trial in oracle.trials.values()] == [0.5]


def test_a_failed_write_ends_a_search_which_goes_on(tmp_path, monkeypatch):
    """Whichever file it is, no trial is lost or runs twice."""
    whole = synthetic.Tuner(synthetic.oracle("random", 4), tmp_path / "whole")
    whole.search()
    replace = oracles.experiment.os.replace
    for failing in range(0, 14, 3):
        count = []

        def fail(source, target, failing=failing, count=count):
            count.append(target)
            if len(count) > failing:
                raise OSError(28, "No space left on device")
            replace(source, target)

        directory = tmp_path / str(failing)
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "replace", fail)
            with pytest.raises(OSError, match=r"json cannot be written: No space"):
                synthetic.Tuner(synthetic.oracle("random", 4), directory).search()
        again = synthetic.Tuner(synthetic.oracle("random", 4), directory)
        again.search()
        for a, b in zip(*(t.oracle.start_order for t in (whole, again)), strict=True):
            assert whole.oracle.trials[a].score == again.oracle.trials[b].score
        assert len(set(again.ran)) == len(again.ran)
