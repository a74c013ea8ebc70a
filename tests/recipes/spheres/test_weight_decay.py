import types

import numpy as np
import pytest

from recipes.engine import data, training
from recipes.spheres import _growth_results, robustness, weight_growth
from tests.support import small
from tests.support.backend import numpy


def test_weight_growth(tmp_path, monkeypatch, small_network):
    kernels, rates, maps = [], [], []
    statistics = weight_growth.statistics

    def measure(model, problem, settings):
        kernel = numpy(model.get_layer("conv").kernel).astype("float64")
        kernels.append(np.linalg.norm(kernel))
        rates.append(float(numpy(model.optimizer.learning_rate)))
        maps.append(weight_growth.ellipsoid(model, problem, settings))
        maps[-1]["kernel"] = training.numpy_copy(model.get_layer("conv").kernel)
        return statistics(model, problem, settings)

    monkeypatch.setattr(weight_growth, "statistics", measure)
    monkeypatch.setattr(weight_growth, "OTHERS", ("conv", "conv_norm"))
    own = {"norms": ("bn",), "weight_decays": (0, 0.05), "workers": 1}
    own |= small.SETTINGS | {"sphere": True}
    pictures = "growth", "mean", "variance", "ellipsoid"
    results, _ = small.run(weight_growth, tmp_path, *pictures, **own)
    plain, decayed, projected = results["rows"]
    # Lemma 3, on every convolution; the epsilon of BN is what is left.
    assert plain["lowest"] > 0.99 and plain["highest"] < 1.01
    assert plain["end"]["mean"] > plain["start"]["mean"]
    assert decayed["end"]["mean"] < decayed["start"]["mean"]
    assert projected["end"]["mean"] == pytest.approx(projected["start"]["mean"])

    # The lines of the first training, whose two epochs `measure` saw first.
    asked = weight_growth.Settings(**own, runs_dir=str(tmp_path)).runs()[0]
    curve = weight_growth.train(asked).metrics
    norms = [line["conv norm"] for line in curve]
    growth = [line["conv growth"] for line in curve]
    np.testing.assert_allclose(norms, kernels[:2])
    np.testing.assert_allclose(rates, 0.1)  # throughout
    squares = np.square(norms)
    np.testing.assert_allclose(np.diff(squares), growth[1:], rtol=1e-4)
    start = np.sqrt(squares[0] - growth[0])
    assert plain["start"]["mean"] == pytest.approx(start)
    lemma = _growth_results.drawn(curve, "conv", 0.0)["Lemma 3"]
    assert lemma[-1]["norm"] == pytest.approx(norms[-1], rel=1e-5)
    # A unit lies on its ellipsoid, but for the epsilon of BN.
    sigma, gamma, *weights = maps[1].values()
    weights = [w.reshape(36, 4) for w in weights]  # W' and W
    square, variance = (np.diag(w.T @ sigma @ w) for w in weights)
    expected = gamma**2 * variance / (variance + 1e-5)
    np.testing.assert_allclose(square, expected, rtol=1e-4)
    for key in ("sigma", "gamma", "effective"):
        old, new = maps[0][key], maps[1][key]
        change = np.linalg.norm(new - old) / np.linalg.norm(old)
        assert curve[1][f"{key}_change"] == pytest.approx(change)


def test_robustness(tmp_path, small_network):
    own = {"norms": ("bn",), "weight_decays": (0, 0.05), "workers": 1}
    own |= {"steps": 2, "test_size": 40}
    found, _ = small.run(robustness, tmp_path, "epsilon", **own, **small.SETTINGS)
    rows = found["rows"]
    for row in rows:
        (found,) = row["runs"]
        assert [m["samples"] for m in found["inf"]] == [40] * 3
        assert len({m["clean"] for m in [*found["inf"], found["2"]]}) == 1
        assert row["inf"]["clean"] == {"mean": found["inf"][1]["clean"], "std": None}
    lost = {"norm": "none", "weight_decay": 0.0, "diverged": 2}
    lost |= robustness.summary([]) | {"lost": [[np.nan] * 2] * 2}
    table = robustness.table([lost], robustness.Settings())
    _, _, line, *_ = small.cells(table)
    assert line[0].endswith("(2 diverged)") and line[2:] == ["–"] * 10


def test_a_network_with_constant_outputs():
    model = small.convolutions("resnet8", (8, 8, 1), 10, "bn", "relu")
    kernel, _ = model.get_layer("logits").weights
    kernel.assign(np.zeros(kernel.shape))
    settings = robustness.Attacked(test_size=20)
    problem = types.SimpleNamespace(images=data.load("digits"))
    share = np.mean(problem.images.y_test[:20] == 0)  # argmax of equal logits
    found = robustness.measure(model, problem, settings, None)
    for row in (*found["inf"], found["2"]):
        assert row["clean"] == row["noise"] == row["attacked"] == pytest.approx(share)
        assert row["without_gradient"] == 1 and row["samples"] == 20


def test_what_decay_changes_is_known_of_norms_that_train_with_and_without():
    def row(norm, weight_decay, *lost):
        return {"norm": norm, "weight_decay": weight_decay, "lost": lost}

    diverged = np.nan, np.nan
    rows = [row("bn", 0.0, [0.3, 0.4]), row("bn", 0.1, [0.1, 0.5])]
    rows += [row("group", 0.0, [0.3, 0.4]), row("group", 0.1, diverged)]
    # Over the seeds of which both trained, each with itself.
    rows += [row("layer", 0.0, [0.1, 0.1], [0.5, 0.2], diverged)]
    rows += [row("layer", 0.1, [0.2, 0.3], [0.8, 0.0], [0.1, 0.1])]
    bn, layer = small.cells(robustness.changes(rows))[2:]
    assert bn[:3] == ["BN", "-20.0", "+10.0"]
    assert layer[:3] == ["LN", "+20.0 ± 14.1", "+0.0 ± 28.3"]
    assert not robustness.changes(rows[:1])


def test_network_of_pixels():
    images = data.load("digits")
    model = small.convolutions("resnet8", (8, 8, 1), 10, "bn", "relu")
    network, x, _ = robustness.pixels(model, images, 50)
    assert (x.min(), x.max()) == (0, 1) and x.dtype == "float32"
    np.testing.assert_array_equal(np.round(16 * x), np.round(16 * x, 4))  # 0 to 16
    expected, actual = model(images.x_test[:50]), network(x)
    np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=1e-4, atol=1e-5)
