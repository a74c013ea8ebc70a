import functools
import types

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes.blindness import classifier, features
from recipes.engine.precision import available
from recipes.models import norms
from recipes.models.alexnet import alexnet
from recipes.models.head import dense_head
from recipes.models.lenet import lenet
from recipes.models.vgg import vgg
from tests.support import small


def dense_and_norm(model):
    """The top of a network: Dense layers by size, the norm, from the top down."""
    kinds = (keras.layers.Dense, keras.layers.BatchNormalization)
    top = [layer for layer in reversed(model.layers) if isinstance(layer, kinds)]
    return [getattr(layer, "units", "norm") for layer in top]


def filters(model):
    kind = keras.layers.Conv2D
    return [layer.filters for layer in model.layers if isinstance(layer, kind)]


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("network", ["lenet", "alexnet"])
def test_networks_of_the_paper(network, place):
    """Table 7, and Appendix I.1 for AlexNet."""
    norm = keras.layers.BatchNormalization(name="norm")
    if network == "lenet":
        model, hidden = lenet((8, 8, 1), 10, norm, place), [20] * 7 + [84, 120]
    else:
        model = alexnet((8, 8, 1), 10, norm, place, width=1 / 64)
        hidden = [20] * 5 + [64, 64]
        assert filters(model) == [2, 4, 6, 6, 4]
    expected = [10, *hidden[: place - 1], "norm", *hidden[place - 1 :]]
    assert dense_and_norm(model) == expected


def test_other_sizes_of_the_networks():
    model = alexnet((224, 224, 3), 1000, width=1 / 64)
    assert model.get_layer("conv1").output.shape == (None, 56, 56, 2)
    norm = keras.layers.BatchNormalization(name="norm")
    model = vgg(11, (8, 8, 1), 10, norms.get("none"), "relu", (16, 16), norm)
    assert dense_and_norm(model) == [10, 16, "norm", 16] and len(filters(model)) == 8
    with pytest.raises(ValueError, match="`place` must be between 1 and 2"):
        dense_head(keras.Input((3,)), (4,), 2, "relu", norm, place=3)


@pytest.mark.thorough
def test_classifier(tmp_path):
    """What is measured is as the theorems say."""
    own = {"train_size": 64, "batch_size": 32, "epochs": 1, "batches": 1}
    own |= {"networks": ("lenet2",), "workers": 1}
    results, _ = small.run(classifier, tmp_path, **own)
    limits = {"float32": 1e-4, "float64": 1e-10}
    for dtype in available():
        found = results["networks"][0][dtype]
        for end in ("", ", one label"):
            assert found[f"first{end}"]["mean"] < limits[dtype]
            assert found[f"diagonal{end}"]["mean"] < limits[dtype]
            assert found[f"off_diagonal{end}"]["mean"] > 1e-2
        assert 0 < found["linear"]["count"] <= 20


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
def test_places_of_norms_for_features(norm):
    """In VGG one before the second Dense layer from the top, elsewhere everywhere."""
    model = features.build("vgg11", (32, 32, 3), 10, norm, 1 / 64)
    layers = keras.layers
    kinds = (layers.Dense, layers.BatchNormalization, layers.GroupNormalization, CBN)
    found = [layer.name for layer in model.layers if isinstance(layer, kinds)]
    assert found == ["dense1", *["norm"] * (norm != "none"), "dense2", "logits"]
    model = features.build("resnet8", (8, 8, 1), 10, norm, 1 / 4)
    found = [layer for layer in model.layers if isinstance(layer, kinds[1:])]
    assert len(found) == {"none": 0, "layer": 9, "cbn": 7}[norm]
    below, last = features.split(model)
    assert below.output_shape == (None, 16) and last.name == "logits"


@pytest.mark.parametrize("given, omega", [({}, 10.0), ({"omega": 0.0}, 0.0)])
def test_omega_of_a_network_for_features(given, omega):
    settings = features.Training(norm="cbn", kind="mixed", width=1 / 64, **given)
    model = features.problem(settings).network()
    assert model.get_layer("norm").omega == omega


def test_points_without_a_silhouette():
    points, labels = np.array([[0.0], [1], [10], [11]]), np.array([0, 0, 1, 1])
    assert features.silhouette(points, labels) > 0.8
    for nothing in (np.zeros((4, 1)), np.where(points > 2, np.nan, points)):
        assert features.silhouette(nothing, labels) is None
    assert features.silhouette(points, np.arange(4)) is None


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


def test_a_frozen_norm_has_nothing_to_recalibrate(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)).astype("float32"), np.arange(40) % 3
    images = types.SimpleNamespace(x_train=x, y_train=y)
    problem = types.SimpleNamespace(images=images, test=(x[:20], y[:20]))
    settings = features.Training(test_size=20, batch_size=10)
    norm = keras.layers.BatchNormalization()
    layers = keras.layers.Dense(6), norm, keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((4,)), *layers])
    run = types.SimpleNamespace(directory=tmp_path)
    for frozen in (False, True):
        norm.trainable = not frozen
        found = features.measure(model, problem, settings, run)
        assert (found["recalibrated"] is None) == frozen


SWEEP = {"train_size": 400, "test_size": 60, "width": 1, "batch_size": 16}
SWEEP |= {"epochs": 1, "seeds": 1, "workers": 1}


@pytest.mark.thorough
def test_features(tmp_path, monkeypatch, small_network):
    def build(network, image_shape, num_classes, norm, width, omega):
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
    table = classifier.table([{"network": "lenet1", "seed": 1, "diverged": True}])
    assert "| lenet1, seed 1 " in table and "diverged" in table
