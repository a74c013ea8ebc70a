import numpy as np
import pytest

from recipes import models
from recipes.smoothness import landscape
from tests.support import smoothness_reference as reference
from tests.support import tiny
from tests.support.backend import thorough_on
from tests.support.smoothness_reference import IMAGES, RATE

pytestmark = thorough_on("jax")
PICTURES = ["landscape.png", "predictiveness.png", "training.png"]


def test_deep_linear_network(tmp_path):
    settings, directory, (row,) = reference.run(
        landscape, tmp_path, norms=["none"], seeds=2
    )
    assert sorted(path.name for path in directory.glob("*.png")) == PICTURES
    table = (directory / "table.md").read_text()
    assert "\n| none " in table and " ± " in table and "2 seeds (n - 1)" in table

    # Without a norm, everything can be computed by hand.
    lines, others = (
        landscape.train(settings.one(norm="none", seed=seed)).metrics for seed in (0, 1)
    )
    losses = [max(line["loss_max"] for line in run) for run in (lines, others)]
    expected = {"mean": np.mean(losses), "std": np.std(losses, ddof=1)}
    assert row["largest_loss_max"] == pytest.approx(expected)
    kernels, x, y = reference.start()
    for line, step in zip(lines, (0, 2), strict=True):
        weights = reference.descend(kernels, x, y, step)
        loss, gradient = reference.loss_and_gradients(weights, x, y)
        assert line["step"] == step
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        steps = RATE * np.linspace(0.01, 30, 8)
        points = [[w - s * g for w, g in zip(weights, gradient)] for s in steps]
        found = [reference.loss_and_gradients(point, x, y) for point in points]
        losses = [loss for loss, _ in found]
        distances = np.array([reference.distance(g, gradient) for _, g in found])
        betas = distances / (steps * reference.distance(gradient))
        assert line["loss_min"] == pytest.approx(min(losses), rel=1e-3)
        assert line["loss_max"] == pytest.approx(max(losses), rel=1e-3)
        # The step of a hundredth is rounded to few bits in float32.
        found = line["gradient_distances"][1:]
        np.testing.assert_allclose(found, distances[1:], rtol=1e-2)
        assert line["gradient_distance_max"] == pytest.approx(max(distances), rel=1e-2)
        assert line["effective_beta"] == pytest.approx(max(betas), rel=5e-2)


def test_classifier(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "build", tiny.build)
    norms = ["none", "lp1"]
    settings, _, rows = reference.run(landscape, tmp_path, IMAGES, norms=norms)
    assert [row["norm"] for row in rows] == norms
    for row in rows:
        assert row["diverged"] == row["not_finite"]["mean"] == 0
        assert 0 <= row["test_accuracy"]["mean"] <= 1
        assert row["effective_beta"]["mean"] > 0
    lines = landscape.train(settings.one(norm="lp1", seed=0)).metrics
    lengths = [0.1 * s for s in np.linspace(0.5, 4, 8)]
    np.testing.assert_allclose(lines[1]["step_lengths"], lengths)

    # A run that diverges ends, and has no scores.
    far = {"norms": ["lp1"], "learning_rate": 1e20, "steps": 6}
    settings, directory, rows = reference.run(landscape, tmp_path, IMAGES, **far)
    found = landscape.train(settings.one(norm="lp1", seed=0))
    assert found.results["diverged"] and len(found.metrics) < 3
    assert [(row["diverged"], row["train_loss"]) for row in rows] == [(1, None)]
    assert sorted(path.name for path in directory.glob("*.png")) == PICTURES
