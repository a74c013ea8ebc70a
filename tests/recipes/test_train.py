import json
import zipfile

import keras
import numpy as np
import pytest

from recipes import train
from recipes.engine import data, devices, optimizers, recorder, training
from recipes.engine.errors import UserError
from tests.support import small
from tests.support import synthetic_search as synthetic
from tests.support.backend import BACKEND, numpy, thorough_on
from tests.support.small import dense_networks as dense_networks

# Six epochs, three of them at the first learning rate, two at the next.
TINY = {"model": "resnet8", "train_size": 96, "batch_size": 32, "epochs": 6}


def run_tiny(tmp_path, **changes):
    return train.train(train.Settings(**TINY | small.places(tmp_path) | changes))


def contents(outcome):
    """All that must not depend on where a training was interrupted."""
    model = keras.models.load_model(outcome.results["saved_model"])
    return (
        [array.tobytes() for array in model.get_weights()],
        small.without_times(outcome.metrics),
        {k: v for k, v in outcome.results.items() if k[:5] not in ("secon", "saved")},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("finished")
    return tmp_path, run_tiny(tmp_path)


def test_run_and_its_files(finished):
    tmp_path, (_, results, lines) = finished
    backend = "" if BACKEND == "tensorflow" else f"-backend{BACKEND}"
    changed = f"{backend}-batch_size32-epochs6-train_size96"
    assert results["name"] == f"digits-resnet8-cbn-sigmoid-seed0{changed}"
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    best = max(lines, key=lambda line: line["test_accuracy"])
    assert results["best_epoch"] == best["epoch"]
    assert results["best_test_accuracy"] == best["test_accuracy"]
    for key in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
        assert results[key] == lines[-1][key]
    assert results["epochs"] == 6 and not results["diverged"]
    assert 0 < results["seconds_per_step"] < 10
    directory = tmp_path / "runs_dir" / results["name"]
    files = {path.name for path in directory.glob("[!.]*")}
    assert files == {"config.json", "metrics.jsonl", "results.json"}
    config = json.loads((directory / "config.json").read_text())
    assert (config["learning_rate"], config["momentum"]) == (0.1, 0.9)
    # The saved model is the best one, and loads without the recipes.
    with zipfile.ZipFile(results["saved_model"]) as file:
        assert b"recipes" not in file.read("config.json")
    images = data.load("digits", train_size=TINY["train_size"])
    model = keras.models.load_model(results["saved_model"])
    hits = model.predict(images.x_test, verbose=0).argmax(-1) == images.y_test
    np.testing.assert_allclose(hits.mean(), best["test_accuracy"], atol=1e-6)


# Settings, a checkpoint for each of six epochs, the model, the results. At the fourth,
# the metrics have an epoch that the checkpoint does not have.
@pytest.mark.parametrize("fatal", [pytest.param(4, marks=thorough_on("jax")), 9])
def test_a_training_that_ends_at_a_write_goes_on_as_if_it_had_not(
    finished, tmp_path, monkeypatch, fatal
):
    """Weights, metrics and results are the same to the last bit."""
    monkeypatch.setattr(recorder, "CHECKPOINT_SECONDS", 0)
    with synthetic.ends_at_write(fatal, KeyboardInterrupt()):
        run_tiny(tmp_path)
    if fatal == 9:  # all epochs are behind, and only the results are missing
        monkeypatch.setattr(keras.Model, "fit", None)
    assert contents(run_tiny(tmp_path)) == contents(finished[1])


def test_the_command_asks_a_strategy_for_the_places_of_its_run(tmp_path, monkeypatch):
    class Strategy(devices.Replicas):
        def __init__(self):
            pass

        def places(self, name, *directories):
            asked.append(name)
            return directories

    asked, ran = [], []
    monkeypatch.setattr(devices, "get", lambda *_: Strategy())

    def trained(*_, name, **more):
        ran.append(name)
        return small.outcome()

    monkeypatch.setattr(training, "train", trained)
    for name in (None, "mine"):
        train.run(train.Settings(**small.places(tmp_path), name=name))
    label = train.Settings().label()
    assert asked == ran == [label, "mine"]


def test_a_saved_model_has_its_own_rho_omega_and_rate(tmp_path):
    """Also where it is the second of two that are compiled once."""
    for rho, omega in ((1.0, 10.0), (2.0, 3.0)):
        own = {"rho": rho, "omega": omega, "learning_rate": 0.2, "epochs": 1}
        results = run_tiny(tmp_path, **own).results
        model = keras.models.load_model(results["saved_model"])
        (layer,) = optimizers.followers(model)
        assert layer.omega == omega
        found = [float(numpy(v)) for v in (layer.rho, layer.learning_rate)]
        np.testing.assert_allclose(found, [rho, 0.002], rtol=1e-6)  # of the last steps


def test_data_that_are_not_there_leave_no_run(tmp_path):
    missing = str(tmp_path / "missing.npz")
    with pytest.raises(UserError, match="missing.npz"):
        run_tiny(tmp_path, dataset=missing)
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize(
    "norm, given",
    [
        ("bn", {"rho": 2.0}),
        ("group", {"stage_rho": "stage1=2"}),
        ("bn", {"omega": 3.0}),
        ("cbn_batch", {"omega": 3.0}),
    ],
)
def test_a_setting_without_effect_is_an_error(norm, given):
    (name,) = given
    with pytest.raises(ValueError, match=f"`{name}` has no effect with norm='{norm}'"):
        train.Settings(norm=norm, **given)
    assert train.Settings(norm=norm).norm == norm
    assert getattr(train.Settings(norm="cbn", **given), name) == given[name]
