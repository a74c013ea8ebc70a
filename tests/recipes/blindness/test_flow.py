import json

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from recipes.blindness import flow
from recipes.blindness._flow_pairs import Pair
from recipes.engine import recorder, training

TINY = {"size": 4, "scales": 1, "couplings": 1, "width": 4}
TINY |= {"train_size": 64, "batch_size": 32}


def settings(runs_dir, **others):
    own = {"epochs": 3, "learning_rate": 1e-2, "runs_dir": str(runs_dir)}
    return flow.Training(**TINY | own | others)


def test_pixels_are_those_of_the_data_set():
    pair = Pair("digits", "3+8", 8)
    digits = load_digits()
    for label, digit in enumerate((3, 8)):
        found = np.concatenate(
            [pair.x_train[pair.y_train == label], pair.x_test[pair.y_test == label]]
        )
        expected = digits.images[digits.target == digit]
        found, expected = found.reshape(-1, 64), expected.reshape(-1, 64)
        assert sorted(map(tuple, found)) == sorted(map(tuple, expected))


def test_smaller_images():
    whole, small = (Pair("digits", "3+8", size) for size in (8, 4))
    assert small.image_shape == (4, 4, 1)
    blocks = whole.x_test[:, 2:4, 4:6, 0].mean((1, 2))
    np.testing.assert_array_equal(small.x_test[:, 1, 2, 0], np.rint(blocks))


def test_noise():
    pair = Pair("digits", "3+8", 8, train_size=64)
    x = pair.dequantised(pair.x_test)
    assert x.dtype == "float32" and x.min() >= 0 and x.max() <= 1
    np.testing.assert_array_equal(np.floor(x * 17 - 1e-5).clip(0), pair.x_test)
    batches, later = pair.batches(32, seed=1), pair.batches(32, seed=1)
    later.first_epoch = 1
    assert (batches[0][0] != batches[2][0]).any()
    np.testing.assert_array_equal(batches[2][0], later[0][0])
    np.testing.assert_array_equal(batches[3][1], later[1][1])


def test_interpolated():
    pair = Pair("digits", "3+8", 8)
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

    pair = Pair("digits", "3+8", 8)
    found = flow.measure(Uniform(), pair)
    assert found["bits_per_dim"] == pytest.approx(np.log2(17))
    assert found["mean"] == pytest.approx([-64 * np.log(17)] * 11)
    assert found["gap"] == pytest.approx(0, abs=1e-9)
    assert found["auroc"] == 0.5 and found["round_trip"] == 0


def test_apart():
    assert flow.apart(np.array([3, 1.0]), np.array([2.0])) == (0, 0.5)
    assert flow.apart(np.array([3, 1.0]), np.array([0, 2.0])) == (1, 0.75)


@pytest.mark.parametrize("norm", ["layer", "bn"])
def test_training_learns(norm, tmp_path):
    _, found, lines = flow.train(settings(tmp_path, norm=norm))
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    for part in ("train", "test"):
        values = [line[f"{part}_log_likelihood"] for line in lines]
        assert values[-1] > values[0]
    assert found["round_trip"] < 1e-4
    last = lines[-1]["test_log_likelihood"]
    assert found["test_log_likelihood"] == pytest.approx(last, rel=1e-4)
    mean = found["mean"]
    assert found["real"] == pytest.approx((mean[0] + mean[-1]) / 2)
    assert found["gap"] == pytest.approx(found["real"] - mean[5], abs=1e-3)
    ratio = last / lines[-1]["train_log_likelihood"]
    assert found["bits_per_dim"] / found["train_bits_per_dim"] == pytest.approx(
        ratio, rel=1e-4
    )


def test_a_training_goes_on(tmp_path, monkeypatch):
    _, found, lines = flow.train(settings(tmp_path / "whole"))

    class Dies(flow._Nats):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "CHECKPOINT_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(flow, "_Nats", Dies)
        with pytest.raises(KeyboardInterrupt):
            flow.train(settings(tmp_path / "parts"))
    _, again, others = flow.train(settings(tmp_path / "parts"))
    assert len(others) == 3
    for line, other in zip(lines, others):
        del line["seconds_per_step"], other["seconds_per_step"]
        assert other == pytest.approx(line, rel=1e-4)
    assert again["mean"] == pytest.approx(found["mean"], rel=1e-4)


def test_measuring_leaves_the_flow_as_it_is():
    pair = Pair("digits", "0+1", 4)
    model = flow.problem(settings("runs")).network()
    before = model.get_weights()
    flow.measure(model, pair, pairs=4)
    for weight, same in zip(model.get_weights(), before):
        np.testing.assert_array_equal(weight, same)


def test_run(tmp_path):
    sweep = flow.Settings(
        **TINY,
        epochs=1,
        norms=("bn",),
        classes=("3+8",),
        architectures=("narrow",),
        seeds=2,
        pairs=10,
        workers=1,
        runs_dir=str(tmp_path),
    )
    directory = flow.run(sweep)
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["classes"] for row in rows] == ["3+8"]
    runs = sorted(tmp_path.glob("flow-digits-3+8-bn-seed*-architecturenarrow-*"))
    found = [json.loads((run / "results.json").read_text()) for run in runs]
    gaps, aurocs = ([r[key] for r in found] for key in ("gap", "auroc"))
    assert rows[0]["gap"]["mean"] == pytest.approx(np.mean(gaps))
    assert rows[0]["auroc"]["std"] == pytest.approx(np.std(aurocs, ddof=1))
    gap = rows[0]["gap"]
    assert (
        f" {gap['mean']:.1f} ± {gap['std']:.1f} |"
        in (directory / "table.md").read_text()
    )
    assert {path.name for path in directory.glob("*.png")} == {
        "interpolation.png",
        "training.png",
    }
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("flow*/*")}
    assert flow.run(sweep) == directory
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert before.keys() == set(tmp_path.glob("flow*/*"))


def test_runs():
    sweep = flow.Settings(classes=("3+8", "0+1"), norms=("bn",), seeds=2)
    found = [(run.classes, run.seed) for run in sweep.runs()]
    assert found == [("3+8", 0), ("3+8", 1), ("0+1", 0), ("0+1", 1)]


@pytest.mark.parametrize("architecture, couplings", [("full", 2), ("shallow", 1)])
def test_architectures(architecture, couplings):
    of = settings("runs", architecture=architecture, couplings=2, between=False)
    model = flow.problem(of).network()
    assert len(model.steps) == 1 + couplings + 1  # a logit, and one coupling more


def test_diverged_runs_are_counted():
    lost = training.Outcome(None, {"diverged": True}, [])
    found = flow.summary([lost])
    assert found["diverged"] == found["seeds"] == 1 and found["gap"] is None
    row = found | {"classes": "0+1", "architecture": "full", "norm": "layer"}
    table = flow.table([row], flow.Settings(seeds=1))
    table = " ".join(table.split())
    assert "| 0 and 1 | full | LN | – |" in table and "| 1 of 1 |" in table


def test_bad_arguments(tmp_path):
    for classes in ("3+3", "3", "3+11", "3+x"):
        with pytest.raises(ValueError, match="`classes` must be two different labels"):
            Pair("digits", classes, 8)
    with pytest.raises(ValueError, match="`size` must divide"):
        Pair("digits", "3+8", 3)
    with pytest.raises(ValueError, match="`train_size` must be between 2 and"):
        Pair("digits", "3+8", 8, train_size=1000)
    with pytest.raises(ValueError, match="`epochs` must be at least 1"):
        settings(tmp_path, epochs=0)
    with pytest.raises(ValueError, match="`architectures` must be of full"):
        flow.Settings(architectures=("deep",))
