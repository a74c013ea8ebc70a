import json

import keras
import numpy as np
import pytest

from recipes import cbn_gradient_variance, data, grid
from tests.recipes import tiny


def test_measure_of_a_linear_model():
    """Against the covariance of the gradients of the same batches, in NumPy."""
    rng = np.random.default_rng(0)
    images = data.ImageData(
        rng.normal(size=(40, 3)).astype("float32"),
        rng.normal(size=(40, 2)).astype("float32"),
        None,
        None,
        None,
    )
    dense = keras.layers.Dense(2, use_bias=False)
    model = keras.Sequential([keras.layers.Input((3,)), dense])
    model.compile("sgd", "mse")
    config = {"batch_size": 8, "seed": 3, "augment": False}
    values = cbn_gradient_variance.measure(model, images, config, batches=6)

    w = model.get_weights()[0].astype("float64")
    stream = grid.training_batches(images, config, cbn_gradient_variance.OTHER_BATCHES)
    gradients = []
    for i in range(6):
        x, y = stream[i * 5]  # 5 batches an epoch
        gradients.append((x.T @ (x @ w - y) * 2 / y.size).ravel())
    covariance = np.cov(np.transpose(gradients))
    variance = np.trace(covariance)
    square = np.square(np.mean(gradients, 0)).sum() - variance / 6
    assert values["gradient_variance"] == pytest.approx(variance, rel=1e-4)
    assert values["gradient_squared_norm"] == pytest.approx(square, rel=1e-4)


def test_cbn_gradient_variance(tmp_path, monkeypatch):
    monkeypatch.setattr(grid.models, "build", tiny.build)
    monkeypatch.setattr(cbn_gradient_variance, "NORMS", ("cbn_batch", "cbn"))
    directory = cbn_gradient_variance.cbn_gradient_variance(
        tiny.SETTINGS, activations=["relu"], batches=3, runs_dir=tmp_path, workers=1
    )
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["gradient_variance.png", "results.json", "table.md"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["norm"] for row in rows] == ["cbn_batch", "cbn"]
    for row in rows:
        assert row["gradient_variance"]["a tenth"] > 0
    table = (directory / "table.md").read_text()
    assert table.count("| relu | CBN without AMAT |") == 2 and "(1.00)" in table


def test_by_phase():
    values = [1.0, 4.0, 9.0, 100.0, None, 5.0]
    curve = [{"epoch": i, "v": value} for i, value in enumerate(values, start=1)]
    means = cbn_gradient_variance.by_phase([curve], "v")
    # Of six epochs the rate falls after the third and after the fifth.
    assert means["first rate"] == pytest.approx(2)
    assert means["a tenth"] == pytest.approx(30)
    assert means["a hundredth"] == pytest.approx(5)
    empty = cbn_gradient_variance.by_phase([curve], "w")
    assert set(empty.values()) == {None}


def test_bad_batches(tmp_path):
    with pytest.raises(ValueError, match="at least 2.*batches=1"):
        cbn_gradient_variance.cbn_gradient_variance({}, batches=1, runs_dir=tmp_path)
