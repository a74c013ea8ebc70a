import dataclasses
import json
import multiprocessing
import os
import socket
import threading
import types

import keras_tuner
import pytest

from recipes.engine.errors import UserError
from tests.support import small
from tests.support import synthetic_search as synthetic
from tests.support.backend import once, thorough_on
from tests.support.processes import free_port
from tuner import cluster, search

pytestmark = thorough_on("jax")
search_here = search.search


def search_small(settings):
    """What a worker calls, which imports this module."""
    with pytest.MonkeyPatch.context() as patch:
        small.use(patch, small.dense)
        return search_here(settings)


def test_a_worker_has_the_trials_and_scores_of_a_search_alone(tmp_path, monkeypatch):
    alone = synthetic.Tuner(synthetic.oracle("random", 4), tmp_path / "alone")
    alone.search()
    chief = synthetic.oracle("random", 4, directory=tmp_path / "a")
    place = cluster.LOOPBACK, str(free_port())
    thread = threading.Thread(target=cluster.serve, args=(chief, *place), daemon=True)
    thread.start()
    for name, value in zip(cluster.VARIABLES, ("worker0", *place), strict=True):
        monkeypatch.setenv(name, value)
    synthetic.Tuner(synthetic.oracle("random", 4), tmp_path / "a").search()
    thread.join(60)
    assert not thread.is_alive()
    assert chief.end_order == alone.oracle.end_order and not chief.ongoing_trials
    for key, trial in alone.oracle.trials.items():
        found = chief.trials[key]
        assert found.hyperparameters.values == trial.hyperparameters.values
        assert found.score == pytest.approx(trial.score, 1e-6)


def test_a_worker_with_other_flags_than_the_chief(tmp_path, monkeypatch):
    chief = search.Settings(dataset="digits", epochs=4, runs_dir=str(tmp_path))
    oracle = synthetic.oracle("random", 4, directory=tmp_path / "a")
    cluster.tell(oracle, chief.same_everywhere())
    place = cluster.LOOPBACK, str(free_port())
    args = oracle, *place
    thread = threading.Thread(target=cluster.serve, args=args, daemon=True)
    thread.start()
    for name, value in zip(cluster.VARIABLES, ("worker0", *place), strict=True):
        monkeypatch.setenv(name, value)
    worker = dataclasses.replace(chief, epochs=1, seeds=2)
    differ = "epochs: 4 there, 1 here; seeds: 1 there, 2 here"
    with pytest.raises(UserError, match=differ):
        search.search(worker)
    assert not oracle.trials
    tuner = synthetic.Tuner(synthetic.oracle("random", 4), tmp_path / "a")
    elsewhere = dataclasses.replace(chief, runs_dir="elsewhere", workers=2)
    cluster.check(tuner.oracle, elsewhere.same_everywhere())
    tuner.search()  # after which the chief ends
    thread.join(60)
    assert not thread.is_alive()


def test_two_chiefs_do_not_share_a_port():
    with socket.socket() as taken:
        # As gRPC does by default.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind((cluster.LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{port}"):
            cluster.serve(None, cluster.LOOPBACK, port, watch=pytest.fail)


@once
@pytest.mark.thorough
def test_a_chief_and_two_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setattr(search, "search", search_small)
    values = {"model": "resnet8", "train_size": 60, "batch_size": 16, "epochs": 1}
    values |= {"algorithm": "random", "trials": 3, "workers": 2}
    search_small(search.Settings(**values, name="a", runs_dir=str(tmp_path)))
    found = json.loads((tmp_path / "a" / "tuner_results.json").read_text())
    assert found["finished"] == 3
    assert len(list(tmp_path.glob("a/runs/*/results.json"))) == 3


@once
@pytest.mark.thorough
def test_workers_that_die_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "RESTARTS", 0)
    oracle = synthetic.oracle("random", 1, directory=tmp_path / "a")
    with pytest.raises(RuntimeError, match="Workers failed 1 times"):
        cluster.run(oracle, 1, os._exit, 3)


def broken():
    raise keras_tuner.errors.FatalRuntimeError("no space left")


@once
@pytest.mark.thorough
def test_an_error_of_a_trial_ends_the_search_of_many_workers(tmp_path):
    oracle = synthetic.oracle("random", 1, directory=tmp_path / "a")
    with pytest.raises(RuntimeError, match="ended with an error.*same command"):
        cluster.run(oracle, 1, broken)


def test_each_worker_gets_a_gpu(monkeypatch):
    seen = []

    class Process:
        exitcode = None
        join = terminate = lambda self, *_: None

        def __init__(self, **_):
            pass

        def start(self):
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])

    context = types.SimpleNamespace(Process=Process)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(cluster, "serve", lambda oracle, address, port, watch: watch())
    cluster.run(None, 3, print)
    assert seen == ["3", "5", "3"]


def test_a_cluster_needs_all_of_its_variables(monkeypatch):
    assert cluster.role() is None
    monkeypatch.setenv("KERASTUNER_ORACLE_IP", "127.0.0.1")
    with pytest.raises(ValueError, match="Missing: KERASTUNER_TUNER_ID, KERAS.*_PORT"):
        search_here(search.Settings())


@pytest.mark.filterwarnings("error")
def test_others_who_can_reach_the_chief_are_warned_of():
    with pytest.warns(UserWarning, match="without authentication"):
        cluster.warn_unless_loopback("0.0.0.0")
    for address in ("127.0.0.1", "localhost"):
        cluster.warn_unless_loopback(address)
