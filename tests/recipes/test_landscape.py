import json

import keras
import numpy as np
import pytest

from recipes import landscape, models, probed, problems
from recipes.models import norms
from tests.recipes import dln_reference, tiny

SETTINGS = dln_reference.SETTINGS
RATE = probed.DLN["learning_rate"]


def test_deep_linear_network(tmp_path):
    places = dict(norm_names=["none", "bn"], runs_dir=tmp_path)
    directory = landscape.landscape(SETTINGS, **places)
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
    assert (directory / "table.md").read_text().count("\n| bn |") == 1

    # Without a norm, everything can be computed by hand.
    _, lines = probed.train(
        "landscape", {**SETTINGS, "norm": "none"}, None, runs_dir=tmp_path
    )
    kernels, x, y = dln_reference.start()
    for line, steps in zip(lines, (0, 2), strict=True):
        weights = dln_reference.descend(kernels, x, y, RATE, steps)
        loss, gradient = dln_reference.loss_and_gradients(weights, x, y)
        assert line["step"] == steps
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        losses, distances, betas = [], [], []
        for s in RATE * np.linspace(0.01, 30, 8):
            there = [w - s * g for w, g in zip(weights, gradient)]
            loss, others = dln_reference.loss_and_gradients(there, x, y)
            distance = dln_reference.length(
                [a - b for a, b in zip(others, gradient, strict=True)]
            )
            losses.append(loss)
            distances.append(distance)
            betas.append(distance / (s * dln_reference.length(gradient)))
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

    def measure(model, batch, step, config):
        if step == interrupted:
            raise KeyboardInterrupt
        return {"weight": float(keras.ops.sum(model.trainable_variables[0]))}

    interrupted = None
    whole, lines = probed.train("k", config, measure, runs_dir=tmp_path / "whole")
    interrupted = 4
    with pytest.raises(KeyboardInterrupt):
        probed.train("k", config, measure, runs_dir=tmp_path / "parts")
    interrupted = 0
    parts, again = probed.train("k", config, measure, runs_dir=tmp_path / "parts")
    for line, other in zip(lines, again, strict=True):
        for key in ("step", "train_loss", "weight"):
            assert line[key] == pytest.approx(other[key], rel=1e-5)
    assert parts["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)


@pytest.fixture
def small_network(monkeypatch):
    def build(model, input_shape, num_classes, norm, activation):
        return tiny.build(model, input_shape, num_classes, norms.get(norm), activation)

    monkeypatch.setattr(models, "build", build)


def test_classifier(tmp_path, small_network):
    settings = {"train_size": 96, "batch_size": 32, "width": 1, "steps": 4, "every": 2}
    norm_names = ["none", "lp1"]
    directory = landscape.landscape(settings, norm_names, tmp_path)
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["norm"] for row in rows] == norm_names
    for row in rows:
        assert not row["diverged"] and row["not_finite"] == 0
        assert 0 <= row["test_accuracy"] <= 1 and row["effective_beta"] > 0
    _, lines = probed.train(
        "landscape", {**settings, "norm": "lp1"}, None, runs_dir=tmp_path
    )
    lengths = [0.1 * s for s in np.linspace(0.5, 4, 8)]
    np.testing.assert_allclose(lines[1]["step_lengths"], lengths)


def test_divergence_ends_a_run(tmp_path, small_network):
    config = {"train_size": 64, "batch_size": 32, "width": 1, "norm": "none"}
    config |= {"steps": 8, "every": 4, "learning_rate": 1e20}
    results, lines = probed.train("k", config, landscape.measure, runs_dir=tmp_path)
    assert results["diverged"] and len(lines) == 1
    table = landscape.table(landscape.summary({"none": results}, {"none": lines}))
    assert "| none | – |" in table


def test_width(small_network):
    config = probed.complete({"width": 0.5, "norm": "bn"})
    model = problems.problem(config).model
    assert [model.get_layer(name).filters for name in ("stem", "conv")] == [2, 2]
    # Digits of 8x8 are enlarged.
    assert model.input_shape == (None, 32, 32, 1)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"network": "lenet"}, "Argument `network` must be one of"),
        ({"network": "dln", "dataset": "digits"}, "'dln' has the settings"),
        ({"steps": 10, "every": 3}, "`steps` must be a multiple of `every`"),
        ({"learning_rate": -1.0}, "Argument `learning_rate` must be positive"),
        ({"norm": "batch"}, "Argument `norm` must be one of"),
    ],
)
def test_bad_settings(config, message):
    with pytest.raises(ValueError, match=message):
        probed.complete(config)
