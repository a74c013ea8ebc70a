import re

import numpy as np
import pytest

from recipes.engine import training
from recipes.engine.classifier import Training
from recipes.spheres import weight_growth
from recipes.spheres.weight_growth import Settings
from tests.support import small
from tests.support.backend import numpy


def test_weight_growth(tmp_path, monkeypatch, small_network):
    kernels, rates = [], []
    statistics = weight_growth.statistics

    def measure(model, problem, settings):
        kernel = numpy(model.get_layer("conv").kernel).astype("float64")
        kernels.append(np.linalg.norm(kernel))
        rates.append(float(numpy(model.optimizer.learning_rate)))
        return statistics(model, problem, settings)

    monkeypatch.setattr(weight_growth, "statistics", measure)
    monkeypatch.setattr(weight_growth, "OTHERS", ("conv", "conv_norm"))
    own = {"norms": ("bn",), "weight_decays": (0, 0.05), "workers": 1}
    own |= small.SETTINGS
    pictures = "growth", "mean", "variance"
    results, text = small.run(weight_growth, tmp_path, *pictures, **own)
    plain, decayed = results["rows"]
    assert (plain["weight_decay"], decayed["weight_decay"]) == (0, 0.05)
    # Lemma 3, on every convolution; the epsilon of BN is what is left.
    assert plain["lowest"] > 0.99 and plain["highest"] < 1.01
    assert plain["end"]["mean"] > plain["start"]["mean"]
    assert decayed["end"]["mean"] < decayed["start"]["mean"]
    assert f" {plain['lowest']:.4f} to {plain['highest']:.4f} |" in text
    distances = results["distances"]
    assert [row["decay"] for row in distances] == ["no decay", "decay 0.05"] * 2

    # The lines of the first training, whose two epochs `measure` saw first.
    asked = Settings(**own, runs_dir=str(tmp_path)).runs()[0]
    curve = weight_growth.train(asked).metrics
    norms = [line["conv norm"] for line in curve]
    growth = [line["conv growth"] for line in curve]
    np.testing.assert_allclose(norms, kernels[:2])
    np.testing.assert_allclose(rates, 0.1)  # throughout
    squares = np.square(norms)
    np.testing.assert_allclose(np.diff(squares), growth[1:], rtol=1e-4)
    start = np.sqrt(squares[0] - growth[0])
    assert plain["start"]["mean"] == pytest.approx(start)
    found = weight_growth.drawn(curve, "conv", 0.0)
    last, lemma = (found[label][-1] for label in ("no decay", "Lemma 3"))
    assert lemma["norm"] == pytest.approx(norms[-1], rel=1e-5)
    assert last["gain"] == pytest.approx(norms[-1] - start, rel=1e-5)
    assert last["gain"] == pytest.approx(lemma["gain"], rel=1e-2)
    ((label, lines),) = weight_growth.drawn(curve, "conv", 0.1).items()
    assert label == "decay 0.1" and "gain" not in lines[-1]
    for line in curve:
        assert len(line["variance_distance"]) == len(line["mean_distance"]) == 4


def test_what_diverged():
    metrics = [{"test_accuracy": 0.1, "variance_distance": [None]}]
    diverged = training.Outcome(Training(), {"diverged": True}, metrics)
    row = {"norm": "bn", "weight_decay": 0.0}
    row |= weight_growth.summary([diverged], "conv")
    results = {"layer": "conv", "rows": [row], "distances": []}
    (line,) = re.findall(r"\| (BN.*?) \|\n", weight_growth.table(results, 1))
    expected = ["BN", "0", "– (1 diverged)", *["–"] * 4]
    assert [cell.strip() for cell in line.split("|")] == expected
    drawn = weight_growth.drawn(metrics, "conv", 0)
    assert drawn == {"no decay": [], "Lemma 3": []}
    assert weight_growth.pooled([metrics], "variance_distance") == []
