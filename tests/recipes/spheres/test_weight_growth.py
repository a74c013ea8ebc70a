import dataclasses
import json

import keras
import numpy as np
import pytest

from recipes import models
from recipes.engine import recorder, training
from recipes.engine.classifier import Training
from recipes.spheres import weight_growth
from recipes.spheres.weight_growth import Settings
from tests.support import tiny


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    monkeypatch.setattr(models, "build", tiny.build)
    monkeypatch.setattr(weight_growth, "OTHERS", ("conv", "conv_norm"))
    training._last.clear()


def written(directory):
    return {path: path.stat().st_mtime_ns for path in directory.glob("*/metrics*")}


def test_weight_growth(tmp_path):
    settings = Settings(
        **tiny.SETTINGS,
        norms=("bn",),
        weight_decays=(0, 0.05),
        runs_dir=str(tmp_path),
        workers=1,
    )
    directory = weight_growth.run(settings)
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
    assert f" {plain['lowest']:.4f} to {plain['highest']:.4f} |" in text
    distances = results["distances"]
    assert [row["decay"] for row in distances] == ["no decay", "decay 0.05"] * 2

    # Again: every run is complete.
    before = written(tmp_path)
    assert weight_growth.run(settings) == directory
    assert len(before) == 2 and before == written(tmp_path)


def test_lines_of_a_new_a_used_and_a_resumed_network(tmp_path, monkeypatch):
    kernels, rates = [], []
    train = training.train

    def measure(model, problem, settings):
        kernel = keras.ops.convert_to_numpy(model.get_layer("conv").kernel)
        kernels.append(np.linalg.norm(kernel.astype("float64")))
        rates.append(float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)))
        return {}

    def stop(model, problem, settings):
        if list(tmp_path.glob("resumed/*/checkpoint.npz")):
            raise KeyboardInterrupt
        return {}

    def curve_of(name, after=None, **changes):
        monkeypatch.setattr(
            training, "train", lambda *args, **hooks: train(*args, after=after, **hooks)
        )
        settings = Settings(
            **tiny.SETTINGS | {"epochs": 3}, runs_dir=str(tmp_path / name)
        ).one(norm="bn", **{"weight_decay": 0.0} | changes)
        curve = weight_growth.train(settings).metrics
        for line in curve:
            line.pop("seconds_per_step")
        return curve

    monkeypatch.setattr(recorder, "CHECKPOINT_SECONDS", 0)
    curve = curve_of("new", measure)
    np.testing.assert_allclose([line["conv norm"] for line in curve], kernels)
    np.testing.assert_allclose(rates, 0.1)  # throughout
    squares = np.square(kernels)
    growth = [line["conv growth"] for line in curve]
    np.testing.assert_allclose(np.diff(squares), growth[1:], rtol=1e-4)
    start = np.sqrt(squares[0] - growth[0])
    assert weight_growth.epochs(curve, "conv")["start"][0] == pytest.approx(start)
    last = weight_growth.predicted(curve, "conv")[-1]
    assert last["norm"] == pytest.approx(kernels[-1], rel=1e-5)
    measured = weight_growth.measured(curve, "conv", 0.0)[-1]
    assert measured["gain"] == pytest.approx(kernels[-1] - start, rel=1e-5)
    assert measured["gain"] == pytest.approx(last["gain"], rel=1e-2)
    assert "gain" not in weight_growth.measured(curve, "conv", 0.1)[-1]
    assert weight_growth.convolutions(curve[0]) == ["stem", "conv"]
    for line in curve:
        assert len(line["variance_distance"]) == len(line["mean_distance"]) == 4

    # The program of the last network is used again; its rate is no state of a run.
    model = training._last["model"]
    assert curve_of("other", seed=1) != curve
    assert curve_of("decayed", weight_decay=0.1) != curve
    assert curve_of("used") == curve
    assert training._last["model"] is model
    with pytest.raises(KeyboardInterrupt):
        curve_of("resumed", stop)
    assert curve_of("resumed") == curve


def test_what_diverged():
    metrics = [{"test_accuracy": 0.1, "variance_distance": [None]}]
    diverged = training.Outcome(Training(), {"diverged": True}, metrics)
    row = {"norm": "bn", "weight_decay": 0.0}
    row |= weight_growth.summary([diverged], "conv")
    results = {"layer": "conv", "rows": [row], "distances": []}
    text = weight_growth.table(results, 1)
    (line,) = [line for line in text.splitlines() if line.startswith("| BN")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["BN", "0", "– (1 diverged)", *["–"] * 4]
    assert weight_growth.predicted(metrics, "conv") == []
    assert weight_growth.measured(metrics, "conv", 0) == []
    assert weight_growth.pooled([metrics], "variance_distance") == []


def test_cbn_is_told_the_rate():
    settings = Settings(**tiny.SETTINGS).one(norm="cbn", learning_rate=0.3)
    found = weight_growth.problem(settings)
    assert found.amat and found.schedule.values == [0.3, 0.3]
    assert dataclasses.replace(settings, momentum=0.5, weight_decay=0.1).program() == (
        settings.program()
    )


def test_bad_settings():
    with pytest.raises(ValueError, match="`weight_decays` must be at least 0"):
        Settings(weight_decays=(-1.0,))
