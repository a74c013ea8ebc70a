from types import SimpleNamespace

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from recipes.blindness import flow
from recipes.blindness._flow_pairs import Batches, Pair
from tests.support import small

TINY = {"size": 4, "scales": 1, "couplings": 1, "width": 4}
TINY |= {"train_size": 64, "batch_size": 32}


@pytest.fixture(scope="module")
def pair():
    return Pair("digits", "3+8", 8)


def test_pixels_are_those_of_the_data_set(pair):
    digits = load_digits()
    for label, digit in enumerate((3, 8)):
        parts = (pair.x_train, pair.y_train), (pair.x_test, pair.y_test)
        found = np.concatenate([x[y == label].reshape(-1, 64) for x, y in parts])
        expected = digits.data[digits.target == digit]
        assert sorted(map(tuple, found)) == sorted(map(tuple, expected))
    blocks = pair.x_test[:, 2:4, 4:6, 0].mean((1, 2))
    found = Pair("digits", "3+8", 4).x_test[:, 1, 2, 0]
    np.testing.assert_array_equal(found, np.rint(blocks))


def test_colours_have_whole_levels(tmp_path):
    """Channels of other means and deviations, which standardising makes alike."""
    x = np.random.default_rng(0).integers(0, [256, 64, 20], (48, 8, 8, 3), "uint8")
    x[0, 0, 0], x[0, 0, 1] = 0, 255
    y = np.arange(48) % 2
    path = tmp_path / "colours.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    found = Pair(str(path), "0+1", 8)
    pixels = (np.sort(v.reshape(48, -1), 0) for v in (found.x_test, x))
    np.testing.assert_array_equal(*pixels)


def test_noise_and_interpolation(pair):
    x = pair.dequantised(pair.x_test)
    np.testing.assert_array_equal(np.floor(x * 17 - 1e-5).clip(0), pair.x_test)
    first, second = (pair.x_test[pair.y_test == label][:5] for label in (0, 1))
    expected = [second, 0.25 * first + 0.75 * second, first]
    found = pair.interpolated([0, 0.25, 1])
    np.testing.assert_allclose(found[:, :5], expected)
    few = Pair("digits", "3+8", 8, train_size=64)
    batches, later = Batches(few, 32, seed=1), Batches(few, 32, seed=1, first_epoch=1)
    np.testing.assert_array_equal(batches[2][0], later[0][0])


def test_bits_of_a_uniform_density(pair):
    class Uniform(keras.Model):
        dimensions = 64

        def call(self, x, training=None):
            return 0 * x[:, 0, 0, 0]

        def transform(self, x):
            return x, None

        def inverse(self, z):
            return z

    problem = SimpleNamespace(images=pair)
    run = SimpleNamespace(metrics=[{"train_log_likelihood": -64 * np.log(2)}])
    found = flow.measure(Uniform(), problem, None, run)
    assert found["train_bits_per_dim"] == pytest.approx(1)
    assert found["bits_per_dim"] == pytest.approx(np.log2(17))
    assert found["mean"] == pytest.approx([-64 * np.log(17)] * 11)
    assert found["gap"] == pytest.approx(0, abs=1e-9)
    assert found["auroc"] == 0.5 and found["round_trip"] == 0


@pytest.mark.thorough
def test_run(tmp_path):
    own = {"norms": ("bn",), "classes": ("3+8",), "architectures": ("narrow",)}
    own |= {"epochs": 3, "learning_rate": 1e-2, "seeds": 1, "workers": 1}
    small.run(flow, tmp_path, "interpolation", "training", **TINY, **own)
    (asked,) = flow.Settings(**TINY, **own, runs_dir=str(tmp_path)).runs()
    _, found, lines = flow.train(asked)
    parts = "train_log_likelihood", "test_log_likelihood"
    train, test = ([line[key] for line in lines] for key in parts)
    assert len(lines) == 3 and train[-1] > train[0] and test[-1] > test[0]
    assert found["round_trip"] < 1e-4
    mean = found["mean"]
    assert found["test_log_likelihood"] == pytest.approx(test[-1], rel=1e-4)
    assert found["real"] == pytest.approx((mean[0] + mean[-1]) / 2)
    assert found["gap"] == pytest.approx(found["real"] - mean[5], abs=1e-3)


def test_diverged_runs_are_counted():
    found = flow.summary([small.outcome(diverged=True)])
    assert found["diverged"] == found["seeds"] == 1 and found["gap"] is None
    row = found | {"classes": "0+1", "architecture": "full", "norm": "layer"}
    table = " ".join(flow.table([row], flow.Settings(seeds=1)).split())
    assert "| 0 and 1 | full | LN | – |" in table and "| 1 of 1 |" in table


def test_bad_arguments():
    for bad, message in (
        (("3+11", 8), "`classes` must be two different labels"),
        (("3+8", 3), "`size` must divide"),
        (("3+8", 8, 1000), "`train_size` must be between 1 and"),
    ):
        with pytest.raises(ValueError, match=message):
            Pair("digits", *bad)
