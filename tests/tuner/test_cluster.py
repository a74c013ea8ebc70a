import json
import os
import socket

import pytest

from tests.tuner import cluster_search
from tuner import cluster

ARGUMENTS = {
    "settings": {"model": "resnet8", "train_size": 60, "batch_size": 16, "epochs": 1},
    "tune": "rho,omega",
    "algorithm": "random",
    "trials": 3,
    "name": "a",
}


def test_a_chief_and_two_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    cluster.run(cluster_search.run, 2, **ARGUMENTS, runs_dir=tmp_path)
    found = json.loads((tmp_path / "a" / "tuner_results.json").read_text())
    assert found["finished"] == 3
    runs = list((tmp_path / "a" / "runs").glob("*/results.json"))
    assert len(runs) == 3
    oracle = json.loads((tmp_path / "a" / "oracle.json").read_text())
    assert sorted(oracle["end_order"]) == sorted(oracle["start_order"])
    assert oracle["ongoing_trials"] == {}
    # Numbers that came over the network are those of one process.
    monkeypatch.setattr(cluster_search.models, "build", cluster_search.small.build)
    cluster_search.run(**ARGUMENTS, runs_dir=tmp_path / "alone")
    path = tmp_path / "alone" / "a" / "tuner_results.json"
    alone = json.loads(path.read_text())
    for a, b in zip(found["trials"], alone["trials"], strict=True):
        assert a["values"] == b["values"]
        # Other threads round otherwise: one image more or less of 12.
        assert a["accuracies"][0] == pytest.approx(b["accuracies"][0], abs=0.1)


def dies(**arguments):
    if "worker" in os.environ["KERASTUNER_TUNER_ID"]:
        os._exit(3)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.accept()  # for ever


def test_workers_that_die_again_and_again(monkeypatch):
    monkeypatch.setattr(cluster, "RESTARTS", 0)
    with pytest.raises(RuntimeError, match="Workers failed 1 times"):
        cluster.run(dies, 1)


def fails(**arguments):
    os._exit(3)


def test_a_chief_that_fails():
    with pytest.raises(RuntimeError, match="The chief ended with exit code 3"):
        cluster.run(fails, 1)
