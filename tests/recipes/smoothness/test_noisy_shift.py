import functools
import json

import keras
import numpy as np
import pytest

from keras_norms import recalibrate
from recipes import models
from recipes.engine import training
from recipes.models import norms
from recipes.smoothness import noisy_shift
from tests.support import smoothness_reference as reference
from tests.support import tiny
from tests.support.smoothness_reference import RATE


def test_changes():
    rng = np.random.default_rng(0)
    before, after = rng.normal(1, 2, (200, 3)), rng.normal(2, 3, (200, 3))
    before[:, 2] = 4.0
    found = noisy_shift.changes(before, after)
    change = [abs(after[:, j].mean() - before[:, j].mean()) for j in range(3)]
    deviation = [before[:, j].std() for j in range(3)]
    assert found["mean_change"] == pytest.approx(sum(change) / 3)
    assert found["mean"] == pytest.approx(before.mean())
    relative = (change[0] / deviation[0] + change[1] / deviation[1]) / 2
    assert found["relative_mean_change"] == pytest.approx(relative)
    variances = [
        abs(after[:, j].var() - before[:, j].var()) / before[:, j].var() for j in (0, 1)
    ]
    assert found["relative_variance_change"] == pytest.approx(sum(variances) / 2)
    assert sum(found["histogram"]) == 200
    np.testing.assert_allclose(found["edges"], [before[:, 0].min(), before[:, 0].max()])


def test_activations_that_are_not_finite():
    found = noisy_shift.changes(np.full((4, 1), np.inf), np.ones((4, 1)))
    assert found["histogram"] is None and np.isnan(found["relative_mean_change"])


def test_activations_are_those_of_training():
    keras.utils.set_random_seed(0)
    model = tiny.build(None, (6, 6, 1), 3, norms.get("noisy_bn"), "relu")
    x = np.random.default_rng(1).normal(size=(16, 6, 6, 1)).astype("float32")
    values = [training.numpy_copy(v) for v in model.variables]
    layers = ["stem", "conv"]
    (found, _), moved = noisy_shift.activations(model, layers, values, x)
    assert found.shape == (16 * 3 * 3, 4)
    for variable, value in zip(model.variables, values, strict=True):
        np.testing.assert_array_equal(training.numpy_copy(variable), value)
    # A call in training mode moves the state to the same place.
    model(x, training=True)
    for variable, value in zip(model.variables, moved, strict=True):
        np.testing.assert_allclose(training.numpy_copy(variable), value, rtol=1e-5)
    # The noise of the next call is another one.
    (again, _), _ = noisy_shift.activations(model, layers, moved, x)
    assert np.abs(again.mean(0) - found.mean(0)).max() > 0.05


def test_deep_linear_network(tmp_path):
    settings = noisy_shift.Settings(
        **reference.SETTINGS, layers=["layer3"], runs_dir=str(tmp_path), workers=1
    )
    directory = noisy_shift.run(settings)
    noisy = settings.one(norm="noisy_bn", seed=0)
    reference.check_not_disturbed(noisy, noisy_shift.train(noisy).metrics)
    files = sorted(path.name for path in directory.iterdir())
    assert files == [
        "histograms.png",
        "moments.png",
        "results.json",
        "table.md",
        "training.png",
    ]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    change = {
        row["norm"]: row["layers"]["layer3"]["mean_change"]["mean"] for row in rows
    }
    # BN's mean is beta, which moves slowly; noise of +-0.5 is drawn at each step.
    assert change["bn"] < 0.02 < 0.1 < change["noisy_bn"]

    lines = noisy_shift.train(settings.one(norm="none", seed=0)).metrics
    kernels, x, y = reference.start()
    for line in lines:
        now = reference.descend(kernels, x, y, RATE, line["step"])
        then = reference.descend(now, x, y, RATE)
        before, after = (x @ np.linalg.multi_dot(w[:3]) for w in (now, then))
        variance = before.var(0)
        expected = np.abs(after.var(0) - variance).mean()
        assert line["layer3_variance"] == pytest.approx(variance.mean(), rel=1e-3)
        assert line["layer3_variance_change"] == pytest.approx(expected, rel=2e-2)


def test_classifier(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "build", tiny.build)
    directory = noisy_shift.run(
        noisy_shift.Settings(
            train_size=96,
            batch_size=32,
            width=1,
            steps=4,
            every=2,
            layers=["conv"],
            norms=["none", "noisy_bn"],
            runs_dir=str(tmp_path),
            workers=1,
        )
    )
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["norm"] for row in rows] == ["none", "noisy_bn"]
    assert all(0 <= row["test_accuracy"]["mean"] <= 1 for row in rows)
    recalibrated = ["recalibrated_test_accuracy" in row for row in rows]
    assert recalibrated == [False, True]
    assert (directory / "table.md").read_text().count("\n| conv ") == 2


def test_recalibrated_is_inference_with_statistics_without_noise():
    keras.utils.set_random_seed(0)
    build = functools.partial(tiny.build, None, (6, 6, 1), 3, activation="relu")
    noisy, plain = build(norm=norms.get("noisy_bn")), build(norm=norms.get("bn"))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(noisy_shift.RECALIBRATION_STEPS, 32, 6, 6, 1)) + 1
    x = x.astype("float32")
    for bare, full in zip(plain.trainable_weights, noisy.trainable_weights):
        value = rng.normal(1, 0.5, full.shape)
        full.assign(value)
        bare.assign(value)
    recalibrate(plain, x.reshape(-1, 6, 6, 1), verbose=0)
    y = plain.predict(x[0], verbose=0).argmax(-1)
    assert len(set(y)) > 1

    before = noisy.get_weights()
    batches = [(batch, None) for batch in x]
    problem = training.Problem(
        lambda: build(norm=norms.get("noisy_bn")),
        lambda epoch: batches,
        1,
        1,
        (x[0], y),
    )
    settings = noisy_shift.Run(norm="noisy_bn")
    found = noisy_shift.recalibrated(noisy, problem, settings, None)
    assert found == {"recalibrated_test_accuracy": 1.0}
    for old, new in zip(before, noisy.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert noisy_shift.recalibrated(noisy, problem, noisy_shift.Run(), None) == {}


def test_step_of_target():
    lines = [{"step": 0, "train_accuracy": None}, {"step": 5, "train_accuracy": 0.95}]
    assert noisy_shift.first_step(lines) == 5
    assert noisy_shift.first_step(lines[:1]) is None
