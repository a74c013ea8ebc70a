import json

import keras
import numpy as np
import pytest
from recipes.precision import available

from recipes import blindness_classifier, data
from recipes.models import norms
from recipes.models.alexnet import alexnet
from recipes.models.head import dense_head
from recipes.models.lenet import lenet
from recipes.models.vgg import vgg, vgg16

CONFIG = {"train_size": 64, "batch_size": 32, "epochs": 1, "batches": 1}


def dense_and_norm(model):
    """The top of a network: Dense layers by size, the norm, from the top down."""
    top = []
    for layer in reversed(model.layers):
        if isinstance(layer, keras.layers.Dense):
            top.append(layer.units)
        elif layer.name == "norm":
            top.append("norm")
    return top


def norm():
    return keras.layers.BatchNormalization(name="norm")


@pytest.mark.parametrize("place", [1, 2, 3])
def test_networks_of_the_paper(place):
    """Table 7, and Appendix I.1 for AlexNet."""
    expected = [10, *[20] * 7, 84, 120]
    expected.insert(place, "norm")
    model = lenet((8, 8, 1), 10, norm(), place)
    assert dense_and_norm(model) == expected
    assert model(np.zeros((2, 8, 8, 1))).shape == (2, 10)

    expected = [10, *[20] * 5, 64, 64]
    expected.insert(place, "norm")
    model = alexnet((8, 8, 1), 10, norm(), place, width=1 / 64)
    assert dense_and_norm(model) == expected
    assert model(np.zeros((2, 8, 8, 1))).shape == (2, 10)
    filters = [x.filters for x in model.layers if isinstance(x, keras.layers.Conv2D)]
    assert filters == [2, 4, 6, 6, 4]


def test_alexnet_of_large_images():
    model = alexnet((224, 224, 3), 1000, width=1 / 64, added=())
    assert dense_and_norm(model) == [1000, 64, 64]
    assert model.get_layer("conv1").output.shape == (None, 56, 56, 2)


def test_vgg():
    plain = norms.get("none")
    model = vgg(11, (8, 8, 1), 10, plain, "relu", (16, 16), norm(), place=2)
    assert dense_and_norm(model) == [10, 16, "norm", 16]
    convolutions = [x for x in model.layers if isinstance(x, keras.layers.Conv2D)]
    assert len(convolutions) == 8
    assert len(vgg16((8, 8, 1), 10, plain, "relu").weights) == 2 * 14
    with pytest.raises(ValueError, match="`depth` must be one of"):
        vgg(12, (8, 8, 1), 10, plain, "relu")


def test_bad_place():
    with pytest.raises(ValueError, match="`place` must be between 1 and 2"):
        dense_head(keras.Input((3,)), (4,), 2, "relu", norm(), place=3)


def test_measure():
    """Nothing is trained: whatever the weights are, the theorems hold."""
    config = blindness_classifier.DEFAULTS | CONFIG
    images = data.load("digits", train_size=64)
    keras.utils.set_random_seed(0)
    model = blindness_classifier.build("lenet2", (8, 8, 1), 10, config)
    found = blindness_classifier.measure(model, images, config)
    for end in ("", ", one label"):
        assert found[f"first{end}"][0] < 1e-4
        assert found[f"diagonal{end}"][0] < 1e-4
        assert found[f"off_diagonal{end}"][0] > 1e-2
    squares = np.square(found["linear"]) + np.square(found["non"])
    np.testing.assert_allclose(squares, 1, rtol=1e-4)
    assert 0 < len(found["linear"]) <= 20


def test_blindness_classifier(tmp_path):
    run = blindness_classifier.blindness_classifier
    networks = ("lenet1",)
    directory = run(CONFIG, networks, runs_dir=tmp_path)
    (line,) = json.loads((directory / "results.json").read_text())["networks"]
    assert line["network"] == "lenet1"
    text = (directory / "table.md").read_text()
    for dtype in available():
        values = line[dtype]["linear"]
        assert f"| {values['mean']:.2f} ± {values['std']:.2f} | 0.67 ± 0.29 |" in text
    # Again: complete, so that nothing is trained.
    before = (directory / "results.json").stat().st_mtime_ns
    assert run(CONFIG, networks, runs_dir=tmp_path) == directory
    assert (directory / "results.json").stat().st_mtime_ns == before


def test_unknown_network(tmp_path):
    with pytest.raises(ValueError, match="`networks` must be of vgg11"):
        blindness_classifier.blindness_classifier(
            CONFIG, ("lenet4",), runs_dir=tmp_path
        )
