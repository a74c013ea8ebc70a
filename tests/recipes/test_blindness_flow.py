import json

import keras
import numpy as np
import pytest
from recipes.flow_pairs import Pair
from sklearn.datasets import load_digits

from recipes import blindness_flow, flow_training

TINY = {"size": 4, "scales": 1, "couplings": 1, "width": 4}
TINY |= {"train_size": 64, "batch_size": 32}
CONFIG = TINY | {"epochs": 3, "learning_rate": 1e-2, "first": 0, "second": 1}


def test_pixels_are_those_of_the_data_set():
    pair = Pair("digits", (3, 8), 8)
    digits = load_digits()
    for label, digit in enumerate((3, 8)):
        found = np.concatenate(
            [pair.x_train[pair.y_train == label], pair.x_test[pair.y_test == label]]
        )
        expected = digits.images[digits.target == digit]
        found, expected = found.reshape(-1, 64), expected.reshape(-1, 64)
        assert sorted(map(tuple, found)) == sorted(map(tuple, expected))


def test_smaller_images():
    whole, small = (Pair("digits", (3, 8), size) for size in (8, 4))
    assert small.image_shape == (4, 4, 1)
    blocks = whole.x_test[:, 2:4, 4:6, 0].mean((1, 2))
    np.testing.assert_array_equal(small.x_test[:, 1, 2, 0], np.rint(blocks))


def test_noise():
    pair = Pair("digits", (3, 8), 8, train_size=64)
    x = pair.dequantised(pair.x_test)
    assert x.dtype == "float32" and x.min() >= 0 and x.max() <= 1
    np.testing.assert_array_equal(np.floor(x * 17 - 1e-5).clip(0), pair.x_test)
    batches, later = pair.batches(32, seed=1), pair.batches(32, seed=1)
    later.first_epoch = 1
    assert (batches[0][0] != batches[2][0]).any()
    np.testing.assert_array_equal(batches[2][0], later[0][0])
    np.testing.assert_array_equal(batches[3][1], later[1][1])


def test_interpolated():
    pair = Pair("digits", (3, 8), 8)
    x = pair.interpolated([0, 0.25, 1], count=5)
    assert x.shape == (3, 5, 8, 8, 1)
    first, second = (pair.x_test[pair.y_test == label][:5] for label in (0, 1))
    np.testing.assert_array_equal(x[0], second)
    np.testing.assert_array_equal(x[2], first)
    np.testing.assert_allclose(x[1], 0.25 * first + 0.75 * second)


def test_bits_of_a_uniform_density():
    class Uniform(keras.Model):
        dimensions = 64

        def call(self, x, training=None):
            return 0 * x[:, 0, 0, 0]

        def transform(self, x):
            return x, None

        def inverse(self, z):
            return z

    pair = Pair("digits", (3, 8), 8)
    found = flow_training.measure(Uniform(), pair)
    assert found["bits_per_dim"] == pytest.approx(np.log2(17))
    assert found["mean"] == pytest.approx([-64 * np.log(17)] * 11)
    assert found["gap"] == pytest.approx(0, abs=1e-9)
    assert found["auroc"] == 0.5 and found["round_trip"] == 0


def test_apart():
    assert flow_training.apart(np.array([3, 1.0]), np.array([2.0])) == (0, 0.5)
    assert flow_training.apart(np.array([3, 1.0]), np.array([0, 2.0])) == (1, 0.75)


@pytest.mark.parametrize("norm", ["layer", "bn"])
def test_training_learns(norm, tmp_path):
    results, lines = flow_training.train(CONFIG | {"norm": norm}, runs_dir=tmp_path)
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    for part in ("train", "test"):
        values = [line[f"{part}_log_likelihood"] for line in lines]
        assert values[-1] > values[0]
    assert results["round_trip"] < 1e-4
    last = lines[-1]["test_log_likelihood"]
    assert results["test_log_likelihood"] == pytest.approx(last, rel=1e-4)
    mean = results["mean"]
    gap = (mean[0] + mean[-1]) / 2 - mean[5]
    assert results["gap"] == pytest.approx(gap, abs=1e-3)


def test_a_training_goes_on(tmp_path, monkeypatch):
    config = CONFIG | {"norm": "bn"}
    results, lines = flow_training.train(config, runs_dir=tmp_path / "whole")

    class Dies(flow_training._Recorder):
        def on_epoch_begin(self, epoch, logs=None):
            super().on_epoch_begin(epoch, logs)
            if epoch == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(flow_training, "_Recorder", Dies)
        with pytest.raises(KeyboardInterrupt):
            flow_training.train(config, runs_dir=tmp_path / "parts")
    # The program was made for the run before; another process makes its own.
    assert flow_training._last
    flow_training._last.clear()
    again, others = flow_training.train(config, runs_dir=tmp_path / "parts")
    assert len(others) == 3
    for line, other in zip(lines, others):
        assert other == pytest.approx(line, rel=1e-4)
    assert again["mean"] == pytest.approx(results["mean"], rel=1e-4)


def test_blindness_flow(tmp_path):
    settings = TINY | {"epochs": 1}
    arguments = (settings, ["bn"], [(3, 8)], ["narrow"], 2)
    places = {"workers": 1, "pairs": 10, "runs_dir": tmp_path}
    directory = blindness_flow.blindness_flow(*arguments, **places)
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["classes"] for row in rows] == ["3 and 8"]
    runs = sorted(tmp_path.glob("flow-digits-3+8-bn-seed*-width2"))
    found = [json.loads((run / "results.json").read_text()) for run in runs]
    assert rows[0]["gap"]["mean"] == pytest.approx(np.mean([r["gap"] for r in found]))
    assert rows[0]["auroc"]["std"] == pytest.approx(np.std([r["auroc"] for r in found]))
    table = (directory / "table.md").read_text()
    gap = rows[0]["gap"]
    assert f"| {gap['mean']:.1f} ± {gap['std']:.1f} |" in table
    assert {path.name for path in directory.glob("*.png")} == {
        "interpolation.png",
        "training.png",
    }
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("flow*/*")}
    assert blindness_flow.blindness_flow(*arguments, **places) == directory
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert before.keys() == set(tmp_path.glob("flow*/*"))


def test_diverged_runs_are_counted():
    lost = {"diverged": True}, [{"train_log_likelihood": None}]
    found = blindness_flow.summary([lost])
    assert found["diverged"] == found["seeds"] == 1 and found["gap"] is None
    row = found | {"classes": "0 and 1", "architecture": "full", "norm": "layer"}
    line = blindness_flow.table([row]).splitlines()[-1]
    assert line.startswith("| 0 and 1 | full | LN | – |") and "| 1 of 1 |" in line


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="`classes` must be two different labels"):
        Pair("digits", (3, 3), 8)
    with pytest.raises(ValueError, match="`size` must divide"):
        Pair("digits", (3, 8), 3)
    with pytest.raises(ValueError, match="`train_size` must be between 2 and"):
        Pair("digits", (3, 8), 8, train_size=1000)
    with pytest.raises(ValueError, match="`epochs` must be positive"):
        flow_training.complete({"epochs": 0})
    with pytest.raises(ValueError, match="A flow has the settings"):
        flow_training.complete({"depth": 3})
    with pytest.raises(ValueError, match="`architectures` must be of full"):
        blindness_flow.blindness_flow({}, ["bn"], [(0, 1)], ["deep"], 1)
