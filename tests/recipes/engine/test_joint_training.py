import keras
import numpy as np
import pytest

from recipes import train
from recipes.engine import classifier, data, joint_training, population
from tests.support import small
from tests.support.backend import jax_only
from tests.support.small import dense_networks as dense_networks

pytestmark = jax_only

TINY = {"model": "resnet8", "activation": "tanh", "epochs": 2}
TINY |= {"train_size": 48, "batch_size": 16}


def one(tmp_path, **more):
    return classifier.Saved(**TINY | small.places(tmp_path) | more)


def several(tmp_path):
    """Three runs, of which one diverges."""
    changes = {"seed": 0}, {"seed": 1}, {"learning_rate": 1e30}
    return [one(tmp_path, **change) for change in changes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return joint_training.train(several(tmp_path_factory.mktemp("finished")))


def test_runs_are_recorded_as_those_of_train(finished, tmp_path):
    outcomes = finished
    alone, first = train.train(one(tmp_path)), outcomes[0]
    added = {"trials_at_once", "images_per_second"}
    assert first.results.keys() ^ alone.results.keys() == added
    name = alone.results["name"].replace("-seed0-", "-seed0-populationTrue-")
    assert first.results["name"] == name and first.results["trials_at_once"] == 3
    for a, b in zip(first.metrics, alone.metrics, strict=True):
        assert a.keys() == b.keys()
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


def test_interrupted_and_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch):
    """With a checkpoint, and one of the runs complete."""
    monkeypatch.setattr(joint_training, "CHECKPOINT_SECONDS", 0)
    finish, done = joint_training.finish, []

    def die(*arguments, **more):
        if done:
            raise RuntimeError
        done.append(finish(*arguments, **more))

    asked = several(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(joint_training, "finish", die)
        joint_training.train(asked)
    # All epochs were behind.
    monkeypatch.setattr(population.Population, "train", None)
    found = joint_training.train(asked)
    for outcome, reference in zip(found, finished, strict=True):
        lines = (small.without_times(each.metrics) for each in (outcome, reference))
        assert next(lines) == next(lines)
    assert not list(tmp_path.glob("*/*/checkpoint.npz"))
    assert joint_training.train(asked) == found


def test_runs_must_be_those_of_one_network(tmp_path):
    with pytest.raises(ValueError, match="differ in seed, rho.*that differ in norm"):
        joint_training.train([one(tmp_path), one(tmp_path, norm="bn")])
    streamed = one(tmp_path, dataset="imagenet2012", train_size=None)
    with pytest.raises(ValueError, match="imagenet2012.*cannot be arrays"):
        joint_training.train([streamed])
