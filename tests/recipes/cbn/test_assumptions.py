import json

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes import models
from recipes.cbn import assumptions
from recipes.engine import data
from recipes.models import norms

SETTINGS = {"model": "resnet8", "train_size": 64, "batch_size": 32, "epochs": 1}


def test_values_against_loops():
    rng = np.random.default_rng(0)
    x = rng.normal(1, 2, size=(4, 2, 2, 3))
    gamma, beta, moving = rng.normal(size=(3, 3))
    eta, tau = assumptions.assumption_values(x, gamma, beta, 2.0, moving)
    for k in range(3):
        values = x[..., k].ravel().tolist()
        mean = sum(values) / 16
        square = sum((value - mean + beta[k]) ** 2 for value in values) / 16
        assert eta[k] == pytest.approx((mean - beta[k]) / moving[k])
        assert tau[k] == pytest.approx(gamma[k] / (2.0 * square**0.5))


def test_dead_channels_are_not_finite():
    zeros = np.zeros(2)
    eta, tau = assumptions.assumption_values(
        np.zeros((4, 2)), np.ones(2), zeros, 1.0, zeros
    )
    assert not np.isfinite([*eta, *tau]).any()


def test_measure():
    """On the first CBN, whose inputs no other CBN touches; nothing changes."""
    norm = norms.get("cbn", rho=2.0)
    model = models.build("resnet8", (8, 8, 1), 10, norm, "tanh")
    settings = assumptions.Settings(**SETTINGS).one(seed=3)
    rng = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, CBN):
            layer.set_learning_rate(0.03)  # eta = 0.7
            layer.moving_mean.assign(rng.normal(size=layer.moving_mean.shape))
            layer.average_weight.assign(1.0)
            layer.beta.assign(rng.normal(size=layer.beta.shape))
            layer.gamma.assign(rng.normal(size=layer.beta.shape))
    before = [np.array(v) for v in model.get_weights()]
    values = assumptions.measure(model, None, settings)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    sizes = {key: len(value) for key, value in values.items()}
    assert sizes == {
        f"{name} stage {i}": n
        for name in ("eta", "tau")
        for i, n in ((1, 16), (2, 16), (3, 32))
    }

    layer = model.get_layer("stage1_block0_conv1_norm")
    ((batch, _),) = data.other_batches(settings, 1)
    x = keras.Model(model.inputs, layer.input).predict(batch, verbose=0)
    gamma, beta, moving = (
        keras.ops.convert_to_numpy(v.value)
        for v in (layer.gamma, layer.beta, layer.moving_mean)
    )
    mean = x.mean((0, 1, 2))
    sigma = np.sqrt(np.square(x - mean + beta).mean((0, 1, 2)))
    eta = (mean - beta) / (0.7 * moving + 0.3 * mean)
    np.testing.assert_allclose(values["eta stage 1"], eta, rtol=1e-3)
    np.testing.assert_allclose(values["tau stage 1"], gamma / (2 * sigma), rtol=1e-3)


def test_assumptions(tmp_path):
    directory = assumptions.run(
        assumptions.Settings(
            **SETTINGS, activations=("relu",), runs_dir=str(tmp_path), workers=1
        )
    )
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["eta.png", "results.json", "table.md", "tau.png"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert len(rows) == 2 * 3
    (run,) = tmp_path.glob("*/metrics.jsonl")
    line = json.loads(run.read_text())
    for row in rows:
        low, high = assumptions.INTERVALS[row["value"]]
        values = line[f"{row['value']} {row['layer']}"]
        within = [low < (np.nan if v is None else v) < high for v in values]
        assert row["all"] == row["first"] == row["last"] == np.mean(within)
    assert (directory / "table.md").read_text().count("| relu ") == 6


def test_shares():
    values = [[0.5, 2.5, np.nan, -1.0], [1.0, 1.5, 2.0, 0.0]]
    assert assumptions.shares(values, (0, 2)) == {
        "first": 0.25,
        "last": 0.5,
        "all": 3 / 8,
        "not_finite": 1 / 8,
    }
    assert assumptions.shares([], (0, 2))["all"] is None


def test_pooled():
    curves = [[{"a": [1.0, None]}, {"a": [2.0]}], [{"a": [3.0]}], [{}]]
    first, second = assumptions.pooled(curves, "a")
    np.testing.assert_array_equal(first, [1, np.nan, 3])
    assert second == [2.0]
