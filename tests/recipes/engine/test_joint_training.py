import json

import keras
import numpy as np
import pytest

from recipes import compare, train
from recipes.engine import classifier, data, joint_training, population
from tests.support import small
from tests.support.backend import jax_only
from tests.support.small import dense_networks as dense_networks

pytestmark = jax_only

TINY = {"model": "resnet8", "train_size": 48, "batch_size": 16, "epochs": 2}


def places(tmp_path):
    runs, models = str(tmp_path / "runs"), str(tmp_path / "models")
    return {"runs_dir": runs, "saved_models_dir": models}


def one(tmp_path, seed=0, **more):
    values = {"norm": "cbn", "activation": "tanh", **TINY, **places(tmp_path)}
    return classifier.Saved(**values | {"seed": seed} | more)


def several(tmp_path):
    """Three runs, of which one diverges."""
    lost = one(tmp_path, learning_rate=1e30)
    return [one(tmp_path, 0), one(tmp_path, 1), lost]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("finished")
    return tmp_path, joint_training.train(several(tmp_path))


def test_runs_are_recorded_as_those_of_train(finished, tmp_path):
    directory, outcomes = finished
    alone = train.train(one(tmp_path))
    first = outcomes[0]
    added = {"trials_at_once", "images_per_second"}
    assert first.results.keys() - alone.results.keys() == added
    assert not alone.results.keys() - first.results.keys()
    name = alone.results["name"].replace("-seed0-", "-seed0-populationTrue-")
    assert first.results["name"] == name
    for a, b in zip(first.metrics, alone.metrics, strict=True):
        assert a.keys() == b.keys()
    assert first.results["trials_at_once"] == 3
    assert first.metrics[-1]["test_accuracy"] == first.results["test_accuracy"]
    images = data.load("digits", train_size=48)
    for result in (outcome.results for outcome in outcomes[:2]):
        model = keras.models.load_model(result["saved_model"])
        logits = keras.ops.convert_to_numpy(model(images.x_test))
        hits = logits.argmax(-1) == images.y_test
        np.testing.assert_allclose(hits.mean(), result["best_test_accuracy"], atol=1e-6)
    # One diverged, and the others went on.
    results = [outcome.results for outcome in outcomes]
    assert [result["diverged"] for result in results] == [False, False, True]
    assert [result["epochs"] for result in results] == [2, 2, 1]
    assert results[2]["train_loss"] is None and results[2]["saved_model"] is None
    assert outcomes[2].metrics[0]["train_loss"] is None


def test_interrupted_and_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch):
    """With a checkpoint, and one of the runs complete."""

    def scores(outcome):
        return small.without_times(outcome.metrics)

    monkeypatch.setattr(joint_training, "CHECKPOINT_SECONDS", 0)
    finish, done = joint_training.finish, []

    def die(*arguments, **more):
        if done:
            raise RuntimeError
        done.append(finish(*arguments, **more))

    asked = several(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(joint_training, "finish", die)
        with pytest.raises(RuntimeError):
            joint_training.train(asked)
    # All epochs were behind.
    monkeypatch.setattr(population.Population, "train", None)
    found = joint_training.train(asked)
    for outcome, reference in zip(found, finished[1], strict=True):
        assert scores(outcome) == scores(reference)
    assert not list(tmp_path.glob("runs/*/checkpoint.npz"))
    assert joint_training.train(asked) == found


@pytest.mark.thorough
def test_compare_in_chunks(tmp_path):
    sweep = {"models": ("resnet8",), "norms": ("cbn",), "activations": ("tanh",)}
    sweep |= {"seeds": 2, "population": 1, "epochs": 1}
    directory = compare.run(compare.Settings(**TINY | sweep | places(tmp_path)))
    (row,) = json.loads((directory / "results.json").read_text())["rows"]
    assert row["seeds"] == 2 and row["trials_at_once"] == 1


def test_runs_must_be_those_of_one_network(tmp_path):
    with pytest.raises(ValueError, match="differ in seed, rho.*that differ in norm"):
        joint_training.train([one(tmp_path), one(tmp_path, norm="bn")])
    streamed = one(tmp_path, dataset="imagenet2012", train_size=None)
    with pytest.raises(ValueError, match="imagenet2012.*cannot be arrays"):
        joint_training.train([streamed])
