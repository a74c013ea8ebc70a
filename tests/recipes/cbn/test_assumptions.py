import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes import models
from recipes.cbn import assumptions
from recipes.engine import data
from recipes.models import norms
from tests.support import small
from tests.support.backend import numpy

SETTINGS = {"model": "resnet8_0.25", "train_size": 64, "batch_size": 32, "epochs": 1}


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
    assert all(map(np.array_equal, before, model.get_weights()))
    assert [len(values[f"eta stage {i}"]) for i in (1, 2, 3)] == [4, 4, 8]
    layer = model.get_layer("stage1_block0_conv1_norm")
    ((batch, _),) = data.other_batches(settings, 1)
    x = numpy(keras.Model(model.inputs, layer.input)([batch]))
    gamma, beta, moving = map(numpy, (layer.gamma, layer.beta, layer.moving_mean))
    mean = x.mean((0, 1, 2))
    sigma = np.sqrt(np.square(x - mean + beta).mean((0, 1, 2)))
    eta = (mean - beta) / (0.7 * moving + 0.3 * mean)
    np.testing.assert_allclose(values["eta stage 1"], eta, rtol=1e-3)
    np.testing.assert_allclose(values["tau stage 1"], gamma / (2 * sigma), rtol=1e-3)


def test_run(tmp_path):
    own = SETTINGS | {"activations": ("relu",), "workers": 1}
    results, table = small.run(assumptions, tmp_path, "eta", "tau", **own)
    assert len(results["rows"]) == table.count("| relu ") == 6
    for row in results["rows"]:
        # After one epoch, the first one is all.
        assert 0 <= row["first"] == row["last"] == row["all"] <= 1


def test_shares_of_pooled_values():
    values = [[0.5, 2.5, np.nan, -1.0], [1.0, 1.5, 2.0, 0.0]]
    expected = {"first": 0.25, "last": 0.5, "all": 3 / 8, "not_finite": 1 / 8}
    assert assumptions.shares(values, (0, 2)) == expected
    curves = [[{"a": [1.0, None]}, {"a": [2.0]}], [{"a": [3.0]}], [{}]]
    first, second = assumptions.pooled(curves, "a")
    np.testing.assert_array_equal(first, [1, np.nan, 3])
    assert second == pytest.approx([2.0])
