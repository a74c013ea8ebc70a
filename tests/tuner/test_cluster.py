import json
import os

import pytest

from tests.programs import cluster_search
from tests.support import small
from tests.support import synthetic_search as synthetic
from tuner import cluster, search


def settings(runs_dir, **more):
    return search.Settings(
        model="resnet8",
        train_size=60,
        batch_size=16,
        epochs=1,
        tune=("rho", "omega"),
        algorithm="random",
        trials=3,
        name="a",
        runs_dir=str(runs_dir),
        **more,
    )


def test_a_chief_and_two_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setattr(search, "search", cluster_search.run)
    cluster_search.search_here(settings(tmp_path, workers=2))
    found = json.loads((tmp_path / "a" / "tuner_results.json").read_text())
    assert found["finished"] == 3
    runs = list((tmp_path / "a" / "runs").glob("*/results.json"))
    assert len(runs) == 3
    oracle = json.loads((tmp_path / "a" / "oracle.json").read_text())
    assert sorted(oracle["end_order"]) == sorted(oracle["start_order"])
    assert oracle["ongoing_trials"] == {}
    # Numbers that came over the network are those of one process.
    small.use(monkeypatch)
    cluster_search.search_here(settings(tmp_path / "alone", workers=1))
    path = tmp_path / "alone" / "a" / "tuner_results.json"
    alone = json.loads(path.read_text())
    for a, b in zip(found["trials"], alone["trials"], strict=True):
        assert a["values"] == b["values"]
        # Other threads round otherwise: one image more or less of 12.
        assert a["accuracies"][0] == pytest.approx(b["accuracies"][0], abs=0.1)


def dies():
    os._exit(3)


def test_workers_that_die_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "RESTARTS", 0)
    oracle = synthetic.oracle("random", 1)
    oracle._set_project_dir(str(tmp_path), "a")
    with pytest.raises(RuntimeError, match="Workers failed 1 times"):
        cluster.run(oracle, 1, dies)
