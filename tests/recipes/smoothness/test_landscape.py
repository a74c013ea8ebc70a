import json

import keras
import numpy as np
import pytest

from recipes import models
from recipes.engine import command
from recipes.smoothness import _training, landscape
from tests.support import smoothness_reference as reference
from tests.support import tiny
from tests.support.smoothness_reference import RATE, SETTINGS

IMAGES = {"train_size": 96, "batch_size": 32, "width": 1, "steps": 4, "every": 2}


def test_deep_linear_network(tmp_path):
    settings = landscape.Settings(
        **SETTINGS, norms=["none", "bn"], seeds=2, runs_dir=str(tmp_path), workers=1
    )
    directory = landscape.run(settings)
    files = sorted(path.name for path in directory.iterdir())
    assert files == [
        "landscape.png",
        "predictiveness.png",
        "results.json",
        "table.md",
        "training.png",
    ]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["norm"] for row in rows] == ["none", "bn"]
    table = (directory / "table.md").read_text()
    assert "\n| bn " in table and " ± " in table and "2 seeds (n - 1)" in table

    # Without a norm, everything can be computed by hand.
    lines = landscape.train(settings.one(norm="none", seed=0)).metrics
    others = landscape.train(settings.one(norm="none", seed=1)).metrics
    losses = [max(line["loss_max"] for line in run) for run in (lines, others)]
    found = rows[0]["largest_loss_max"]
    assert found["mean"] == pytest.approx(sum(losses) / 2)
    assert found["std"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    kernels, x, y = reference.start()
    for line, steps in zip(lines, (0, 2), strict=True):
        weights = reference.descend(kernels, x, y, RATE, steps)
        loss, gradient = reference.loss_and_gradients(weights, x, y)
        assert line["step"] == steps
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        losses, distances, betas = [], [], []
        for s in RATE * np.linspace(0.01, 30, 8):
            there = [w - s * g for w, g in zip(weights, gradient)]
            loss, others = reference.loss_and_gradients(there, x, y)
            distance = reference.length(
                [a - b for a, b in zip(others, gradient, strict=True)]
            )
            losses.append(loss)
            distances.append(distance)
            betas.append(distance / (s * reference.length(gradient)))
        assert line["loss_min"] == pytest.approx(min(losses), rel=1e-3)
        assert line["loss_max"] == pytest.approx(max(losses), rel=1e-3)
        # The step of a hundredth is rounded to few bits in float32.
        np.testing.assert_allclose(
            line["gradient_distances"][1:], distances[1:], rtol=1e-2
        )
        assert line["gradient_distance_max"] == pytest.approx(max(distances), rel=1e-2)
        assert line["effective_beta"] == pytest.approx(max(betas), rel=5e-2)


def test_goes_on_where_it_was(tmp_path):
    config = {**SETTINGS, "depth": 2, "norm": "bn", "steps": 6}

    def measure(model, batches, settings):
        weight = float(keras.ops.sum(model.trainable_variables[0]))
        if len(seen) == interrupted:
            raise KeyboardInterrupt
        seen.append(weight)
        return {"weight": weight}

    def train(runs_dir):
        settings = _training.Descent(**config, runs_dir=str(tmp_path / runs_dir))
        return _training.train(settings, "k", measure)

    interrupted, seen = None, []
    whole = train("whole")
    interrupted, seen = 2, []
    with pytest.raises(KeyboardInterrupt):
        train("parts")
    interrupted = None
    parts = train("parts")
    assert [line["step"] for line in parts.metrics] == [0, 2, 4]
    for line, other in zip(whole.metrics, parts.metrics, strict=True):
        for key in ("step", "train_loss", "weight"):
            assert line[key] == pytest.approx(other[key], rel=1e-5)


@pytest.fixture
def small_network(monkeypatch):
    monkeypatch.setattr(models, "build", tiny.build)


def test_classifier(tmp_path, small_network):
    settings = landscape.Settings(
        **IMAGES, norms=["none", "lp1"], runs_dir=str(tmp_path), workers=1
    )
    directory = landscape.run(settings)
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["norm"] for row in rows] == ["none", "lp1"]
    for row in rows:
        assert row["diverged"] == row["not_finite"]["mean"] == 0
        assert 0 <= row["test_accuracy"]["mean"] <= 1
        assert row["effective_beta"]["mean"] > 0
    one = settings.one(norm="lp1", seed=0)
    lines = landscape.train(one).metrics
    lengths = [0.1 * s for s in np.linspace(0.5, 4, 8)]
    np.testing.assert_allclose(lines[1]["step_lengths"], lengths)
    reference.check_not_disturbed(one, lines)


def test_divergence_ends_a_run(tmp_path, small_network):
    config = IMAGES | {"steps": 8, "every": 4, "learning_rate": 1e20}
    settings = landscape.Settings(
        **config, norms=["none", "bn"], runs_dir=str(tmp_path), workers=1
    )
    directory = landscape.run(settings)
    found = landscape.train(settings.one(norm="none", seed=0))
    assert found.results["diverged"] and len(found.metrics) == 1
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [(row["diverged"], row["train_loss"]) for row in rows] == 2 * [(1, None)]


def test_width(small_network):
    problem = _training.problem(_training.Descent(width=0.5))
    model = problem.network()
    assert [model.get_layer(name).filters for name in ("stem", "conv")] == [2, 2]
    # Digits of 8x8 are enlarged.
    assert model.input_shape == (None, 32, 32, 1)
    # Batches go on where the steps are.
    for x, y in zip(problem.batches(1)[1], problem.batches(0)[21], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--network=dln", "--dataset=digits"], "`dataset` must be None with network="),
        (["--depth=3"], "Argument `depth` must be None with network='vgg'"),
        (["--steps=10", "--every=3"], "`steps` must be a multiple of `every`"),
        (["--learning_rate=-1"], "Argument `learning_rate` must be positive"),
        (["--norms=batch"], "Argument `norms` must be of"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        command.parse(landscape.Settings, arguments)


def test_names():
    def name(arguments):
        label = command.parse(landscape.Settings, arguments).one(seed=1).label()
        return label.replace(f"-backend{keras.backend.backend()}", "")

    assert name(["--network=dln", "--every=50"]) == "dln-bn-seed1-every50"
    assert name(["--width=1"]) == "vgg-digits-bn-seed1-width1"
