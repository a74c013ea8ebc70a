import json

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes import models
from recipes.cbn import assumptions
from recipes.engine import data
from recipes.engine.training import Outcome
from recipes.models import norms
from tests.support.backend import numpy, thorough_on

pytestmark = thorough_on("jax")
SETTINGS = {"model": "resnet8_0.25", "train_size": 64, "batch_size": 32, "epochs": 1}


def test_dead_channels_are_not_finite():
    x, zeros = np.zeros((4, 2)), np.zeros(2)
    found = assumptions.assumption_values(x, np.ones(2), zeros, 1.0, zeros)
    assert not np.isfinite(found).any()


def test_measure():
    """Against the formulas, on the first CBN, whose inputs no other CBN touches."""
    norm = norms.get("cbn", rho=2.0)
    model = models.build("resnet8_0.25", (8, 8, 1), 10, norm, "tanh")
    settings = assumptions.Settings(**SETTINGS).one(seed=3)
    rng = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, CBN):
            layer.set_learning_rate(0.03)  # eta = 0.7
            layer.average_weight.assign(1.0)
            for variable in (layer.moving_mean, layer.beta, layer.gamma):
                variable.assign(rng.normal(size=variable.shape))
    before = [np.array(v) for v in model.get_weights()]
    values = assumptions.measure(model, None, settings)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert {key: len(value) for key, value in values.items()} == {
        f"{name} stage {i}": n
        for name in ("eta", "tau")
        for i, n in ((1, 4), (2, 4), (3, 8))
    }
    layer = model.get_layer("stage1_block0_conv1_norm")
    ((batch, _),) = data.other_batches(settings, 1)
    x = numpy(keras.Model(model.inputs, layer.input)([batch]))
    gamma, beta, moving = map(numpy, (layer.gamma, layer.beta, layer.moving_mean))
    mean = x.mean((0, 1, 2))
    sigma = np.sqrt(np.square(x - mean + beta).mean((0, 1, 2)))
    eta = (mean - beta) / (0.7 * moving + 0.3 * mean)
    np.testing.assert_allclose(values["eta stage 1"], eta, rtol=1e-3)
    np.testing.assert_allclose(values["tau stage 1"], gamma / (2 * sigma), rtol=1e-3)


def test_run(tmp_path, monkeypatch):
    values = [-0.5, None, 0.5, 1.5, 2.5]
    line = {
        f"{name} {s}": values for name in ("eta", "tau") for s in assumptions.LAYERS
    }

    def trained(settings):
        return Outcome(settings, {"name": "x", "diverged": False}, [line])

    monkeypatch.setattr(assumptions, "train", trained)
    own = {"activations": ("relu",), "runs_dir": str(tmp_path), "workers": 1}
    directory = assumptions.run(assumptions.Settings(**SETTINGS, **own))
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["eta.png", "results.json", "table.md", "tau.png"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert len(rows) == 2 * 3
    for row in rows:
        within = {"eta": 2 / 5, "tau": 1 / 5}[row["value"]]
        assert row["all"] == row["first"] == row["last"] == within
        assert row["not_finite"] == 1 / 5
    assert (directory / "table.md").read_text().count("| relu ") == 6


@pytest.mark.thorough
def test_a_training_is_measured(tmp_path):
    settings = assumptions.Settings(**SETTINGS, runs_dir=str(tmp_path)).one(seed=0)
    (line,) = assumptions.train(settings).metrics
    assert np.isfinite(line["tau stage 3"]).all() and len(line["tau stage 3"]) == 8


def test_shares_of_pooled_values():
    values = [[0.5, 2.5, np.nan, -1.0], [1.0, 1.5, 2.0, 0.0]]
    expected = {"first": 0.25, "last": 0.5, "all": 3 / 8, "not_finite": 1 / 8}
    assert assumptions.shares(values, (0, 2)) == expected
    assert assumptions.shares([], (0, 2))["all"] is None
    curves = [[{"a": [1.0, None]}, {"a": [2.0]}], [{"a": [3.0]}], [{}]]
    first, second = assumptions.pooled(curves, "a")
    np.testing.assert_array_equal(first, [1, np.nan, 3])
    assert second == pytest.approx([2.0])
