import json

import keras
import numpy as np
import pytest

from recipes import compare, data, models, population, together
from recipes.train import train
from tests.recipes import small

IS_JAX = keras.backend.backend() == "jax"
needs_jax = pytest.mark.skipif(not IS_JAX, reason="populations train on JAX")

TINY = {"model": "resnet8", "train_size": 48, "batch_size": 16, "epochs": 2}
PLACES = {"norm": "cbn", "activation": "tanh"}


@pytest.fixture(scope="module", autouse=True)
def small_networks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "build", small.build)
        yield


def configs(*seeds, **more):
    return [TINY | PLACES | {"seed": seed} | more for seed in seeds]


def places(tmp_path):
    return {"runs_dir": tmp_path / "runs", "saved_models_dir": tmp_path / "models"}


def metrics(tmp_path, result):
    path = tmp_path / "runs" / result["name"] / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def scores(lines):
    return [[v for k, v in line.items() if k[:7] != "seconds"] for line in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("finished")
    # One of them diverges.
    lost = configs(0, learning_rate=1e30)
    return tmp_path, together.train(configs(0, 1) + lost, **places(tmp_path))


@needs_jax
def test_runs_are_recorded_as_those_of_train(finished, tmp_path):
    directory, results = finished
    one = train(configs(0)[0], verbose=0, **places(tmp_path))
    assert results[0].keys() - one.keys() == {"trials_at_once", "images_per_second"}
    assert not one.keys() - results[0].keys()
    assert results[0]["name"] == one["name"].replace(
        "-train_size", "-populationTrue-train_size"
    )
    lines = metrics(directory, results[0])
    assert [line.keys() for line in lines] == [
        line.keys() for line in metrics(tmp_path, one)
    ]
    files = [
        {path.name for path in (root / "runs" / name).iterdir()}
        for root, name in ((directory, results[0]["name"]), (tmp_path, one["name"]))
    ]
    assert files[0] == files[1] == {"config.json", "metrics.jsonl", "results.json"}
    assert results[0]["trials_at_once"] == 3 and results[0]["images_per_second"] > 0
    assert lines[-1]["test_accuracy"] == results[0]["test_accuracy"]
    images = data.load("digits", train_size=48)
    for result in results[:2]:
        model = keras.models.load_model(result["saved_model"])
        hits = model.predict(images.x_test, verbose=0).argmax(-1) == images.y_test
        np.testing.assert_allclose(hits.mean(), result["best_test_accuracy"], atol=1e-6)


@needs_jax
def test_a_diverged_run_ends_and_the_others_go_on(finished):
    directory, results = finished
    assert [result["diverged"] for result in results] == [False, False, True]
    assert [result["epochs"] for result in results] == [2, 2, 1]
    assert results[2]["train_loss"] is None and results[2]["saved_model"] is None
    assert metrics(directory, results[2])[0]["train_loss"] is None


@needs_jax
def test_interrupted_and_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch):
    """With a checkpoint, and one of the runs complete."""
    expected, uninterrupted = finished
    monkeypatch.setattr(together, "CHECKPOINT_SECONDS", 0)
    finish, done = together.finish, []

    def die(run, *arguments, **more):
        if done:
            raise RuntimeError
        done.append(finish(run, *arguments, **more))

    asked = configs(0, 1) + configs(0, learning_rate=1e30)
    with monkeypatch.context() as patch:
        patch.setattr(together, "finish", die)
        with pytest.raises(RuntimeError):
            together.train(asked, **places(tmp_path))
    trained = []
    train_epoch = population.Population.train
    monkeypatch.setattr(
        population.Population,
        "train",
        lambda self: trained.append(self.epoch) or train_epoch(self),
    )
    results = together.train(asked, **places(tmp_path))
    assert trained == []  # all epochs were behind
    for result, reference in zip(results, uninterrupted, strict=True):
        assert scores(metrics(tmp_path, result)) == scores(metrics(expected, reference))
    assert not list(tmp_path.glob("runs/*/checkpoint.npz"))
    assert together.train(asked, **places(tmp_path)) == results


@needs_jax
def test_compare_in_chunks(tmp_path):
    directory = compare.compare(
        models=["resnet8"],
        norms=["cbn"],
        activations=["tanh"],
        seeds=2,
        config=TINY | {"epochs": 1},
        population=1,
        **places(tmp_path),
    )
    assert "populationTrue" in directory.name
    (row,) = json.loads((directory / "results.json").read_text())["rows"]
    assert row["seeds"] == 2 and row["trials_at_once"] == 1
    table = (directory / "table.md").read_text()
    assert "- resnet8, tanh, cbn: 1 trials at once, " in table
    assert "images per second" in table


@needs_jax
def test_configs_must_be_those_of_one_network(tmp_path):
    with pytest.raises(ValueError, match="differ in seed, rho.*that differ in norm"):
        together.train(configs(0) + configs(0, norm="bn"), **places(tmp_path))
    with pytest.raises(ValueError, match="imagenet2012.*cannot be arrays"):
        together.train(configs(0, dataset="imagenet2012", train_size=None))


@pytest.mark.skipif(IS_JAX, reason="of the other backends")
def test_other_backends_are_refused(tmp_path):
    with pytest.raises(ValueError, match="KERAS_BACKEND=jax.*Received: backend"):
        together.train(configs(0), **places(tmp_path))
    assert not list(tmp_path.iterdir())
