import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from recipes import train
from recipes.engine import classifier, data, optimizers, recorder, run
from tests.support import small

ROOT = pathlib.Path(__file__).parents[2]
# Six epochs, three of them at the first learning rate, two at the next.
TINY = {"model": "resnet8", "train_size": 96, "batch_size": 32, "epochs": 6}


def run_tiny(tmp_path, **changes):
    settings = train.Settings(
        **TINY | changes,
        runs_dir=str(tmp_path / "runs"),
        saved_models_dir=str(tmp_path / "models"),
    )
    return train.train(settings).results


def metrics(tmp_path, name):
    text = (tmp_path / "runs" / name / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k[:7] != "seconds"} for line in lines]


def command(tmp_path, *more):
    flags = [f"--{key}={value}" for key, value in TINY.items()]
    flags += [f"--runs_dir={tmp_path}/runs", f"--saved_models_dir={tmp_path}/models"]
    return [sys.executable, "-m", "recipes.train", *flags, *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("finished")
    return tmp_path, run_tiny(tmp_path)


def test_run_and_its_files(finished):
    tmp_path, results = finished
    name = "digits-resnet8-cbn-sigmoid-seed0-batch_size32-epochs6-train_size96"
    if keras.backend.backend() != "tensorflow":
        name = name.replace("-batch", f"-backend{keras.backend.backend()}-batch")
    assert results["name"] == name
    lines = metrics(tmp_path, name)
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    best = max(lines, key=lambda line: line["test_accuracy"])
    assert results["best_epoch"] == best["epoch"]
    assert results["best_test_accuracy"] == best["test_accuracy"]
    for key in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
        assert results[key] == lines[-1][key]
    assert results["epochs"] == 6 and not results["diverged"]
    assert 0 < results["seconds_per_step"] < 10
    files = {path.name for path in (tmp_path / "runs" / name).glob("[!.]*")}
    assert files == {"config.json", "metrics.jsonl", "results.json"}
    config = json.loads((tmp_path / "runs" / name / "config.json").read_text())
    settings = train.Settings(**TINY).config()
    assert config == {"format": run.FORMAT, **settings}


def test_a_complete_run_is_not_run_again(finished):
    tmp_path, results = finished
    path = tmp_path / "runs" / results["name"] / "metrics.jsonl"
    before = path.stat().st_mtime_ns
    assert run_tiny(tmp_path) == results
    assert path.stat().st_mtime_ns == before


def test_a_name_belongs_to_one_config(finished):
    tmp_path, results = finished
    other = TINY | {"epochs": 7, "runs_dir": str(tmp_path / "runs")}
    with pytest.raises(ValueError, match="epochs: 6 there, 7 here"):
        train.train(train.Settings(**other), name=results["name"])


def test_killed_and_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch):
    expected, results = finished
    directory = tmp_path / "runs" / results["name"]
    code = (
        "from recipes import train; from recipes.engine import command, recorder; "
        "recorder.CHECKPOINT_SECONDS = 0; command.run(train.run, train.Settings)"
    )
    flags = command(tmp_path)[3:]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *flags], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    checkpoint = directory / "checkpoint.npz"
    path = directory / "metrics.jsonl"
    while not (checkpoint.exists() and len(path.read_text().splitlines()) >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (directory / "results.json").exists()
    with np.load(checkpoint) as file:
        done = int(file["epoch"])
    assert 1 <= done < 6
    with open(path, "a") as file:  # an epoch that the checkpoint does not have
        file.write('{"epoch": 99, "test_accuracy": 2.0}\n')

    resumed = run_tiny(tmp_path)
    assert metrics(tmp_path, results["name"]) == metrics(expected, results["name"])
    saved = [keras.models.load_model(r["saved_model"]) for r in (results, resumed)]
    for a, b in zip(*(model.get_weights() for model in saved), strict=True):
        np.testing.assert_array_equal(a, b)


class Killed(BaseException):
    pass


def outcome(tmp_path, results):
    model = keras.models.load_model(results["saved_model"])
    return (
        [array.tobytes() for array in model.get_weights()],
        metrics(tmp_path, results["name"]),
        {k: v for k, v in results.items() if k[:5] not in ("secon", "saved")},
    )


def test_a_training_that_ends_at_a_write_goes_on_as_if_it_had_not(
    tmp_path, monkeypatch
):
    """Weights, metrics and results are the same to the last bit."""
    small.use(monkeypatch)
    monkeypatch.setattr(recorder, "CHECKPOINT_SECONDS", 0)
    expected = outcome(tmp_path, run_tiny(tmp_path, epochs=3))
    replace = os.replace
    # Settings, a checkpoint for each epoch, the model, the results.
    for fatal, before in ((3, False), (5, True), (6, True)):
        place = tmp_path / f"{fatal}{before}"
        count = []

        def die(source, target, fatal=fatal, before=before, count=count):
            count.append(target)
            if len(count) == fatal and before:
                raise Killed
            replace(source, target)
            if len(count) == fatal:
                raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, "replace", die)
            run_tiny(place, epochs=3)
        assert outcome(place, run_tiny(place, epochs=3)) == expected


def test_until_and_on(tmp_path, monkeypatch):
    small.use(monkeypatch)
    expected = outcome(tmp_path, run_tiny(tmp_path))
    settings = train.Settings(
        **TINY,
        runs_dir=str(tmp_path / "b" / "runs"),
        saved_models_dir=str(tmp_path / "b" / "models"),
    )
    part = train.train(settings, until=2)
    assert part.results["epochs"] == 2 and len(part.metrics) == 2
    assert outcome(tmp_path / "b", train.train(settings).results) == expected


def test_stopped_before_the_results_were_written(tmp_path, monkeypatch):
    """All epochs are behind, and only the outcome is missing."""

    def die(*_, **__):
        raise KeyboardInterrupt

    small.use(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            run_tiny(tmp_path, epochs=1)
    monkeypatch.setattr(keras.Model, "fit", die)
    resumed = run_tiny(tmp_path, epochs=1)
    assert resumed["epochs"] == 1
    assert pathlib.Path(resumed["saved_model"]).exists()


def test_a_diverged_run_is_an_outcome(tmp_path):
    results = run_tiny(tmp_path, norm="none", learning_rate=1e20, epochs=4)
    assert results["diverged"] and results["train_loss"] is None
    assert results["epochs"] < 4
    assert run_tiny(tmp_path, norm="none", learning_rate=1e20, epochs=4) == results


def test_saved_model_needs_keras_norms_only(finished, tmp_path):
    _, results = finished
    images = data.load("digits", train_size=TINY["train_size"])
    np.savez(tmp_path / "test.npz", x=images.x_test, y=images.y_test)
    code = (
        "import sys, keras, keras_norms, numpy as np\n"
        f"model = keras.models.load_model({results['saved_model']!r})\n"
        f"test = np.load({str(tmp_path / 'test.npz')!r})\n"
        "assert getattr(model, 'optimizer', None) is None\n"
        "assert not [name for name in sys.modules if name.startswith('recipes')]\n"
        "print(np.mean(model.predict(test['x'], verbose=0).argmax(-1) == test['y']))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    np.testing.assert_allclose(float(printed), results["best_test_accuracy"], atol=1e-6)


def test_a_saved_model_has_its_own_rho_omega_and_rate(tmp_path, monkeypatch):
    """Also where it is the second of two that are compiled once."""
    small.use(monkeypatch)
    for rho, omega in ((1.0, 10.0), (2.0, 3.0)):
        results = run_tiny(tmp_path, epochs=1, rho=rho, omega=omega, learning_rate=0.2)
        model = keras.models.load_model(results["saved_model"])
        (layer,) = optimizers.followers(model)
        assert layer.omega == omega
        np.testing.assert_allclose(keras.ops.convert_to_numpy(layer.rho), rho)
        rate = float(keras.ops.convert_to_numpy(layer.learning_rate))
        np.testing.assert_allclose(rate, 0.002, rtol=1e-6)  # of the last steps


def test_defaults_are_those_of_the_data_set():
    assert classifier.Training().epochs == 15
    assert classifier.Training(dataset="some/where/mnist.npz").epochs == 10
    settings = classifier.Training(dataset="cifar10")
    assert (settings.epochs, settings.batch_size, settings.augment) == (120, 128, True)
    assert (settings.learning_rate, settings.momentum) == (0.1, 0.9)
    assert settings.weight_decay == 5e-4


@pytest.mark.parametrize(
    "flag,expected",
    [
        ("--norm=xn", "|cbn|"),
        ("--epochs=0", "Argument `epochs` must be at least 1. Received: epochs=0"),
        ("--model=resnet9", "model='resnet9'"),
        ("--optimiser=sgd", "optimiser"),
    ],
)
def test_bad_flags(tmp_path, flag, expected):
    process = subprocess.run(
        command(tmp_path, flag), cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode != 0 and "Traceback" not in process.stderr
    assert expected in process.stderr
