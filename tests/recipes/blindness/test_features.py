import functools

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes.blindness import features
from tests.support import small


def test_batches_of_one_label():
    rng = np.random.default_rng(0)
    y = rng.permutation(np.repeat([0, 1, 2], [7, 12, 9]))
    x = np.arange(len(y))
    batches = features.OneLabel(x, y, batch_size=3, seed=1)
    assert batches.steps == 2 + 4 + 3
    orders = []
    for epoch in range(2):
        found = [batches[epoch * batches.steps + i] for i in range(batches.steps)]
        labels = [set(y.tolist()) for _, y in found]
        assert sorted(label for (label,) in labels) == [0] * 2 + [1] * 4 + [2] * 3
        images, labels = map(np.concatenate, zip(*found))
        assert len(set(images)) == 27  # one of label 0 does not fill a batch
        np.testing.assert_array_equal(y[images], labels)
        orders.append(images.tolist())
    assert orders[0] != orders[1]
    with pytest.raises(ValueError, match="at most 2, the training images"):
        features.OneLabel(x[:5], np.array([0, 0, 0, 1, 1]), 3, seed=0)


@pytest.mark.parametrize("norm", ["none", "layer", "cbn"])
def test_places_of_norms(norm):
    """In VGG one before the second Dense layer from the top, elsewhere everywhere."""
    model = features.build("vgg11", (32, 32, 3), 10, norm, 1 / 64)
    layers = keras.layers
    kinds = (layers.Dense, layers.BatchNormalization, layers.GroupNormalization, CBN)
    found = [layer.name for layer in model.layers if isinstance(layer, kinds)]
    assert found == ["dense1", *["norm"] * (norm != "none"), "dense2", "logits"]
    assert model.get_layer("dense2").units == 64
    model = features.build("resnet8", (8, 8, 1), 10, norm, 1 / 4)
    found = [layer for layer in model.layers if isinstance(layer, kinds[1:])]
    assert len(found) == {"none": 0, "layer": 9, "cbn": 7}[norm]
    below, last = features.split(model)
    assert below.output_shape == (None, 16) and last.name == "logits"


def test_points_without_a_silhouette():
    points, labels = np.array([[0.0], [1], [10], [11]]), np.array([0, 0, 1, 1])
    assert features.silhouette(points, labels) > 0.8
    for nothing in (np.zeros((4, 1)), np.where(points > 2, np.nan, points)):
        assert features.silhouette(nothing, labels) is None


def test_scores_of_an_affine_classifier(tmp_path):
    rng = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6)])
    model.add(keras.layers.Dense(3))
    x, y = rng.normal(size=(30, 4)).astype("float32"), rng.integers(0, 3, 30)
    kernel, bias = (np.array(w, "float64") for w in model.layers[0].get_weights())
    kernel[:, :3] = 0
    model.layers[0].set_weights([kernel, bias])
    points = x @ kernel + bias
    logits = points @ np.array(model.layers[1].get_weights()[0], "float64")
    found = features.scores(features.split(model), x, y, tmp_path / "picture.npz")
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == y).mean())
    expected = features.silhouette(points, y)
    assert found["silhouette"] == pytest.approx(expected, abs=1e-4)
    assert found["constant"] == 0.5
    with np.load(tmp_path / "picture.npz") as file:
        score = features.silhouette(file["points"], file["labels"])
    assert found["silhouette_of_picture"] == pytest.approx(score, abs=1e-4)


SWEEP = {"train_size": 400, "test_size": 60, "width": 1, "batch_size": 16}
SWEEP |= {"epochs": 1, "seeds": 1, "workers": 1}


@pytest.mark.thorough
def test_run(tmp_path, monkeypatch, small_network):
    def build(network, image_shape, num_classes, norm, width):
        return small.convolutions(network, image_shape, num_classes, norm, "relu")

    monkeypatch.setattr(features, "build", build)
    own = SWEEP | {"norms": ("cbn",), "kinds": ("one_label",)}
    results, table = small.run(features, tmp_path, "vgg11", **own)
    found = results["rows"][0]["one_label"]
    assert found["recalibrated"] is not None
    assert f" {found['silhouette']['mean']:.3f} |" in table
    (run,) = tmp_path.glob("features-digits-vgg11-cbn-one_label-seed0-*")
    assert np.load(run / "picture.npz")["points"].shape == (60, 2)


def test_runs_that_diverge(tmp_path, monkeypatch):
    lost = functools.partial(small.outcome, diverged=True)
    monkeypatch.setattr(features, "train", lost)
    own = SWEEP | {"norms": ("none",)}
    results, table = small.run(features, tmp_path, "vgg11", **own)
    assert results["rows"][0]["mixed"]["silhouette"] is None
    assert "| no normalization |" in table
