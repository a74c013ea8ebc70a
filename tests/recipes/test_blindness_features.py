import json

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes import blindness_features, features_measured, features_training
from recipes.models import norms
from tests.recipes import tiny

SETTINGS = {
    "train_size": 400,
    "test_size": 60,
    "width": 1,
    "epochs": 1,
    "batch_size": 16,
}


def silhouette(points, labels):
    """Rousseeuw's (1987), straight from its definition, in float64."""
    points = np.asarray(points, "float64")
    distances = np.sqrt(np.square(points[:, None] - points).sum(-1))
    scores = []
    for i, own in enumerate(labels):
        others = [j for j in np.flatnonzero(labels == own) if j != i]
        if not others:
            scores.append(0.0)
            continue
        a = distances[i, others].mean()
        b = min(distances[i, labels == other].mean() for other in set(labels) - {own})
        scores.append((b - a) / max(a, b))
    return np.mean(scores)


def test_batches_of_one_label():
    rng = np.random.default_rng(0)
    y = rng.permutation(np.repeat([0, 1, 2], [7, 12, 9])).astype("int32")
    x = np.arange(len(y), dtype="float32").reshape(-1, 1, 1, 1)
    batches = features_training.OneLabel(x, y, batch_size=3, seed=1)
    assert batches.steps == 2 + 4 + 3
    orders = []
    for epoch in range(2):
        found = [batches[epoch * batches.steps + i] for i in range(batches.steps)]
        labels = [set(y.tolist()) for _, y in found]
        assert sorted(label for (label,) in labels) == [0] * 2 + [1] * 4 + [2] * 3
        images = np.concatenate([x.ravel() for x, _ in found]).astype(int)
        assert len(set(images)) == 27  # one of label 0 does not fill a batch
        assert (y[images] == np.concatenate([y for _, y in found])).all()
        orders.append(images.tolist())
    assert orders[0] != orders[1]
    # A function of the seed and the number alone, also from a later epoch on.
    batches.first_epoch = 1
    assert batches[0][0].ravel().tolist() == orders[1][:3]
    other = features_training.OneLabel(x, y, batch_size=3, seed=2)
    assert other[0][0].ravel().tolist() != orders[0][:3]


def test_too_few_images_of_a_label():
    y = np.array([0, 0, 0, 1, 1])
    with pytest.raises(ValueError, match="at most 2, the training images"):
        features_training.OneLabel(np.zeros((5, 1, 1, 1)), y, 3, seed=0)


@pytest.mark.parametrize("norm", ["none", "layer", "cbn"])
def test_vgg_has_one_norm_before_the_second_dense_layer_from_the_top(norm):
    model = features_training.build("vgg11", (32, 32, 3), 10, norm, 1 / 64)
    kinds = (
        keras.layers.Dense,
        keras.layers.BatchNormalization,
        keras.layers.GroupNormalization,
        CBN,
    )
    kept = [layer for layer in model.layers if isinstance(layer, kinds)]
    names = ["dense1", "norm", "dense2", "logits"]
    assert [layer.name for layer in kept] == [
        name for name in names if norm != "none" or name != "norm"
    ]
    assert model.get_layer("dense2").units == 64
    assert model.get_layer("stage5_conv2").filters == 8
    if norm != "none":
        assert isinstance(
            model.get_layer("norm"), type(norms.get(norm).layer(1, name="x"))
        )


def test_residual_networks_are_normalised_everywhere():
    model = features_training.build("resnet8", (8, 8, 1), 10, "layer", 1 / 4)
    found = [
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.GroupNormalization)
    ]
    assert len(found) == 9 and {layer.groups for layer in found} == {1}
    below, last = features_measured.split(model)
    assert below.output_shape == (None, 16) and last.name == "logits"


def test_layer_normalization_is_over_the_whole_sample():
    layer = norms.get("layer").layer(3, name="x")
    x = np.random.default_rng(0).normal(2, 3, size=(2, 4, 5, 3)).astype("float32")
    y = keras.ops.convert_to_numpy(layer(x))
    axes = (1, 2, 3)
    mean, deviation = x.mean(axes, keepdims=True), x.std(axes, keepdims=True)
    np.testing.assert_allclose(y, (x - mean) / deviation, atol=1e-4)


def test_silhouette():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(40, 5)).astype("float32")
    labels = rng.integers(0, 4, 40)
    labels[0] = 4  # alone
    found = features_measured.silhouette(points, labels)
    assert found == pytest.approx(silhouette(points, labels), abs=1e-5)
    apart = points + 100 * labels[:, None]
    assert features_measured.silhouette(apart, labels) > 0.9
    for nothing in (np.zeros((40, 5)), np.where(points > 2, np.nan, points)):
        assert features_measured.silhouette(nothing, labels) is None
    assert features_measured.silhouette(points, np.zeros(40)) is None


def test_measure(tmp_path):
    """Of features that are known: those of an affine classifier."""
    rng = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6)])
    model.add(keras.layers.Dense(3))
    x, y = rng.normal(size=(30, 4)).astype("float32"), rng.integers(0, 3, 30)
    kernel, bias = (np.array(w, "float64") for w in model.layers[0].get_weights())
    kernel[:, :3] = 0
    model.layers[0].set_weights([kernel, bias])
    points = x @ kernel + bias
    logits = points @ np.array(model.layers[1].get_weights()[0], "float64")
    path = tmp_path / "picture.npz"
    found = features_measured.measure(features_measured.split(model), x, y, path)
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == y).mean())
    assert found["silhouette"] == pytest.approx(silhouette(points, y), abs=1e-4)
    assert found["constant"] == 0.5
    with np.load(path) as file:
        assert file["points"].shape == (30, 2)
        score = silhouette(file["points"], file["labels"])
    assert found["silhouette_of_picture"] == pytest.approx(score, abs=1e-4)


@pytest.fixture
def small_network(monkeypatch):
    def build(network, image_shape, num_classes, norm, width):
        norm = norms.get(norm)
        return tiny.build(network, image_shape, num_classes, norm, "relu")

    monkeypatch.setattr(features_training, "build", build)


def test_blindness_features(tmp_path, small_network):
    run = blindness_features.blindness_features
    arguments = dict(networks=["vgg11"], norm_names=["none", "bn"], seeds=1)
    directory = run(SETTINGS, **arguments, runs_dir=tmp_path)
    assert sorted(path.name for path in directory.iterdir()) == [
        "results.json",
        "table.md",
        "vgg11.png",
    ]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["norm"] for row in rows] == ["none", "bn"]
    for row in rows:
        for batches in features_training.BATCHES:
            (results,) = row[batches]
            assert not results["diverged"]
            assert (results["recalibrated"] is None) == (row["norm"] == "none")
            assert -1 <= results["test"]["silhouette"] <= 1
            picture = np.load(tmp_path / results["name"] / "picture.npz")
            assert picture["points"].shape == (60, 2)
    text = (directory / "table.md").read_text()
    assert f"| BN | {rows[1]['one label'][0]['test']['silhouette']:.3f} |" in text
    # Again: complete, so that nothing is trained.
    results = tmp_path / rows[0]["mixed"][0]["name"] / "results.json"
    before = results.stat().st_mtime_ns
    run(SETTINGS, **arguments, runs_dir=tmp_path)
    assert results.stat().st_mtime_ns == before


def test_goes_on_where_it_was(tmp_path, small_network, monkeypatch):
    config = SETTINGS | {"network": "n", "norm": "bn", "batches": "one label"}
    config |= {"seed": 3, "epochs": 2, "learning_rate": 0.01}
    whole = features_training.train(config, tmp_path / "whole")

    log = features_training.experiment.Run.log

    def stops(self, **values):
        if values["epoch"] == 2:
            raise KeyboardInterrupt
        log(self, **values)

    monkeypatch.setattr(features_training.experiment.Run, "log", stops)
    with pytest.raises(KeyboardInterrupt):
        features_training.train(config, tmp_path / "parts")
    monkeypatch.setattr(features_training.experiment.Run, "log", log)
    parts = features_training.train(config, tmp_path / "parts")
    assert parts["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-4)
    assert parts["test"]["silhouette"] == pytest.approx(
        whole["test"]["silhouette"], abs=1e-4
    )


def test_a_run_that_diverges(tmp_path, small_network):
    settings = SETTINGS | {"learning_rate": 1e30}
    arguments = dict(networks=["n"], norm_names=["none"], seeds=1, runs_dir=tmp_path)
    directory = blindness_features.blindness_features(settings, **arguments)
    (row,) = json.loads((directory / "results.json").read_text())["rows"]
    assert row["mixed"][0]["diverged"] and row["mixed"][0]["test"] is None
    assert "| n | no normalization | – | – |" in (directory / "table.md").read_text()


def test_bad_arguments(tmp_path):
    config = {"network": "vgg11", "norm": "bn", "batches": "mixed", "seed": 0}
    with pytest.raises(ValueError, match="`config` must have the keys"):
        features_training.train(config | {"depth": 3}, tmp_path)
    with pytest.raises(ValueError, match="`epochs` must be positive"):
        features_training.train(config | {"epochs": 0}, tmp_path)
    with pytest.raises(ValueError, match="`norm` must not normalise kernels"):
        features_training.build("vgg11", (32, 32, 3), 10, "ws+gn")
    with pytest.raises(ValueError, match="`batches` must be one of"):
        features_training.train(config | {"batches": "sorted"}, tmp_path)
