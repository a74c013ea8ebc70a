import json

import keras
import numpy as np
import pytest

from recipes import grid, optimizers, weight_growth
from tests.recipes import tiny

SETTINGS = {**tiny.SETTINGS, "epochs": 2}


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    monkeypatch.setattr(grid.models, "build", tiny.build)
    monkeypatch.setattr(weight_growth, "OTHERS", ("conv", "conv_norm"))
    grid._last.clear()


def test_weight_growth(tmp_path):
    run = weight_growth.weight_growth
    arguments = {"norms": ("bn",), "seeds": 1, "runs_dir": tmp_path, "workers": 1}
    directory = run(SETTINGS, weight_decay=0.05, **arguments)
    results = json.loads((directory / "results.json").read_text())
    plain, decayed = results["rows"]
    assert (plain["weight_decay"], decayed["weight_decay"]) == (0, 0.05)
    # Lemma 3, on every convolution; the epsilon of BN is what is left.
    assert plain["lowest"] > 0.99 and plain["highest"] < 1.01
    assert plain["end"]["mean"] > plain["start"]["mean"]
    assert decayed["end"]["mean"] < decayed["start"]["mean"]
    assert {"table.md", "growth.png", "variance.png", "mean.png"} < {
        path.name for path in directory.iterdir()
    }
    text = (directory / "table.md").read_text()
    assert f"| {plain['lowest']:.4f} to {plain['highest']:.4f} |" in text
    distances = results["distances"]
    assert [row["decay"] for row in distances] == ["no decay", "decay"] * 2

    # Again: every run is complete.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics*")}
    assert run(SETTINGS, weight_decay=0.05, **arguments) == directory
    assert before == {
        path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics*")
    }


def test_lines_of_a_new_a_used_and_a_resumed_network(tmp_path):
    kernels = []

    def measure(model, images, config):
        kernel = keras.ops.convert_to_numpy(model.get_layer("conv").kernel)
        kernels.append(np.linalg.norm(kernel.astype("float64")))
        return {"rate": float(model.optimizer.learning_rate)}

    def stop(model, images, config):
        if len(list(tmp_path.glob("resumed/*/checkpoint.npz"))) == 1:
            raise KeyboardInterrupt
        return measure(model, images, config)

    config = {**weight_growth.SETTINGS, **SETTINGS, "epochs": 3, "norm": "bn"}
    config["weight_decay"] = 0.0

    def train(name, measure=measure, seed=0):
        _, curve = grid.train(
            {**config, "seed": seed},
            measure=measure,
            optimizer=weight_growth.gradient_descent,
            callbacks=weight_growth.callbacks,
            runs_dir=tmp_path / name,
        )
        for line in curve:
            line.pop("seconds_per_step")
        return curve

    curve = train("new")
    np.testing.assert_allclose([line["conv norm"] for line in curve], kernels)
    squares = np.square(kernels)
    growth = [line["conv growth"] for line in curve]
    np.testing.assert_allclose(np.diff(squares), growth[1:], rtol=1e-4)
    start = np.sqrt(squares[0] - growth[0])
    assert weight_growth.start(curve, "conv") == pytest.approx(start)
    last = weight_growth.predicted(curve, "conv")[-1]
    assert last["norm"] == pytest.approx(kernels[-1], rel=1e-5)
    measured = weight_growth.norms_of(curve, "conv", 0.0)[-1]
    assert measured["gain"] == pytest.approx(kernels[-1] - start, rel=1e-5)
    assert measured["gain"] == pytest.approx(last["gain"], rel=1e-2)
    assert "gain" not in weight_growth.norms_of(curve, "conv", 0.1)[-1]
    assert weight_growth.convolutions(curve[0]) == ["stem", "conv"]
    assert all(line["rate"] == pytest.approx(0.1) for line in curve)  # throughout
    for line in curve:
        assert len(line["variance_distance"]) == len(line["mean_distance"]) == 4

    # The program of the last network is used again; its rate is no state of a run.
    model = grid._last["model"]
    assert train("other", seed=1) != curve
    assert train("used") == curve
    with pytest.raises(KeyboardInterrupt):
        train("resumed", stop)
    assert train("resumed") == curve
    assert grid._last["model"] is model


def test_what_diverged():
    runs, curves = [{"diverged": True}], [[{"test_accuracy": 0.1}]]
    row = {"norm": "bn", "weight_decay": 0.0, "diverged": 1}
    row |= weight_growth.summary(runs, curves, "conv")
    results = {"layer": "conv", "rows": [row], "distances": []}
    assert "| BN | 0 | diverged | – |" in weight_growth.table(results)
    assert weight_growth.predicted(curves[0], "conv") == []


def test_bad_weight_decay(tmp_path):
    with pytest.raises(ValueError, match="`weight_decay` must be positive"):
        weight_growth.weight_growth(SETTINGS, weight_decay=0.0, runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_optimizer_is_the_one_with_coupled_decay():
    schedule = optimizers.piecewise_schedule(0.25, 100)
    made = weight_growth.gradient_descent(schedule, 0.5, 0.1)
    assert isinstance(made, optimizers.SGD)
    assert (made.momentum, made.coupled_weight_decay) == (0.5, 0.1)
    assert float(made.learning_rate) == 0.25
