import json

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes.blindness import features
from recipes.engine import training
from recipes.models import norms
from tests.support import tiny
from tests.support.backend import numpy, thorough_on

pytestmark = thorough_on("jax")


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
    batches = features.OneLabel(x, y, batch_size=3, seed=1)
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
    later = features.OneLabel(x, y, batch_size=3, seed=1, first_epoch=1)
    assert later[0][0].ravel().tolist() == orders[1][:3]
    other = features.OneLabel(x, y, batch_size=3, seed=2)
    assert other[0][0].ravel().tolist() != orders[0][:3]
    with pytest.raises(ValueError, match="at most 2, the training images"):
        features.OneLabel(x[:5], np.array([0, 0, 0, 1, 1]), 3, seed=0)


@pytest.mark.parametrize("norm", ["none", "layer", "cbn"])
def test_vgg_has_one_norm_before_the_second_dense_layer_from_the_top(norm):
    model = features.build("vgg11", (32, 32, 3), 10, norm, 1 / 64)
    layers = keras.layers
    kinds = (layers.Dense, layers.BatchNormalization, layers.GroupNormalization, CBN)
    found = [layer.name for layer in model.layers if isinstance(layer, kinds)]
    assert found == ["dense1", *["norm"] * (norm != "none"), "dense2", "logits"]
    assert model.get_layer("dense2").units == 64
    assert model.get_layer("stage5_conv2").filters == 8
    if norm != "none":
        kind = type(norms.get(norm).layer(1, name="x"))
        assert type(model.get_layer("norm")) is kind


def test_residual_networks_are_normalised_everywhere():
    model = features.build("resnet8", (8, 8, 1), 10, "layer", 1 / 4)
    kind = keras.layers.GroupNormalization
    found = [layer for layer in model.layers if isinstance(layer, kind)]
    assert len(found) == 9 and {layer.groups for layer in found} == {1}
    below, last = features.split(model)
    assert below.output_shape == (None, 16) and last.name == "logits"


def test_layer_normalization_is_over_the_whole_sample():
    layer = norms.get("layer").layer(3, name="x")
    x = np.random.default_rng(0).normal(2, 3, size=(2, 4, 5, 3)).astype("float32")
    mean, deviation = x.mean((1, 2, 3), keepdims=True), x.std((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(numpy(layer(x)), (x - mean) / deviation, atol=1e-4)


def test_silhouette():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(40, 5)).astype("float32")
    labels = rng.integers(0, 4, 40)
    labels[0] = 4  # alone
    found = features.silhouette(points, labels)
    assert found == pytest.approx(silhouette(points, labels), abs=1e-5)
    apart = points + 100 * labels[:, None]
    assert features.silhouette(apart, labels) > 0.9
    for nothing in (np.zeros((40, 5)), np.where(points > 2, np.nan, points)):
        assert features.silhouette(nothing, labels) is None
    assert features.silhouette(points, np.zeros(40)) is None


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
    path = tmp_path / "picture.npz"
    found = features.scores(features.split(model), x, y, path)
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == y).mean())
    assert found["silhouette"] == pytest.approx(silhouette(points, y), abs=1e-4)
    assert found["constant"] == 0.5
    with np.load(path) as file:
        assert file["points"].shape == (30, 2)
        score = silhouette(file["points"], file["labels"])
    assert found["silhouette_of_picture"] == pytest.approx(score, abs=1e-4)


def sweep(runs_dir, **others):
    small = {"train_size": 400, "test_size": 60, "width": 1, "batch_size": 16}
    small |= {"epochs": 1, "seeds": 1, "workers": 1, "runs_dir": str(runs_dir)}
    return features.Settings(**small, **others)


def test_run(tmp_path, monkeypatch):
    measure = features.measure

    def build(network, image_shape, num_classes, norm, width):
        norm = norms.get(norm)
        return tiny.build(network, image_shape, num_classes, norm, "relu")

    def checked(model, *arguments):
        before = model.get_weights()
        found = measure(model, *arguments)
        for weight, same in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(weight, same)
        return found

    monkeypatch.setattr(features, "build", build)
    monkeypatch.setattr(features, "measure", checked)
    monkeypatch.setattr(training, "_last", {})
    directory = features.run(sweep(tmp_path, norms=("none", "cbn")))
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["results.json", "table.md", "vgg11.png"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["norm"] for row in rows] == ["none", "cbn"]
    for row in rows:
        for kind in features.KINDS:
            assert (row[kind]["recalibrated"] is None) == (row["norm"] == "none")
            assert -1 <= row[kind]["silhouette"]["mean"] <= 1
            name = f"features-digits-vgg11-{row['norm']}-{kind}-seed0"
            (run,) = tmp_path.glob(f"{name}-*")
            found = json.loads((run / "results.json").read_text())
            assert found["test"]["silhouette"] == row[kind]["silhouette"]["mean"]
            assert np.load(run / "picture.npz")["points"].shape == (60, 2)
    text = (directory / "table.md").read_text()
    assert f" {rows[1]['one_label']['silhouette']['mean']:.3f} |" in text


def test_runs_that_diverge(tmp_path, monkeypatch):
    def lost(settings):
        return training.Outcome(settings, {"name": "x", "diverged": True}, [])

    monkeypatch.setattr(features, "train", lost)
    directory = features.run(sweep(tmp_path, norms=("none",)))
    (row,) = json.loads((directory / "results.json").read_text())["rows"]
    assert row["mixed"]["silhouette"] is None
    assert "| no normalization |" in (directory / "table.md").read_text()
    assert (directory / "vgg11.png").exists()


@pytest.mark.parametrize(
    "bad,message",
    [
        ({"epochs": 0}, "`epochs` must be at least 1"),
        ({"norm": "ws+gn"}, "`norm` must not normalise kernels"),
        ({"kind": "sorted"}, "`kind` must be of one_label, mixed"),
        ({"network": "vgg12"}, "`model` must be one of"),
    ],
)
def test_bad_arguments(bad, message):
    with pytest.raises(ValueError, match=message):
        features.Training(**bad)
