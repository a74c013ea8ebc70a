import json

import keras
import numpy as np
import pytest

from recipes.blindness import classifier
from recipes.engine import data
from recipes.engine.precision import available
from recipes.models import norms
from recipes.models.alexnet import alexnet
from recipes.models.head import dense_head
from recipes.models.lenet import lenet
from recipes.models.vgg import vgg, vgg16

SMALL = {"train_size": 64, "batch_size": 32, "epochs": 1, "batches": 1}


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
    settings = classifier.Training(**SMALL, network="lenet2")
    images = data.load("digits", train_size=64)
    keras.utils.set_random_seed(0)
    model = classifier.build(settings, images)
    found = classifier.measure(model, images, settings)
    for end in ("", ", one label"):
        assert found[f"first{end}"][0] < 1e-4
        assert found[f"diagonal{end}"][0] < 1e-4
        assert found[f"off_diagonal{end}"][0] > 1e-2
    squares = np.square(found["linear"]) + np.square(found["non"])
    np.testing.assert_allclose(squares, 1, rtol=1e-4)
    assert 0 < len(found["linear"]) <= 20


def test_run(tmp_path):
    settings = classifier.Settings(
        **SMALL, networks=("lenet1",), workers=1, runs_dir=str(tmp_path)
    )
    directory = classifier.run(settings)
    (line,) = json.loads((directory / "results.json").read_text())["networks"]
    assert line["network"] == "lenet1"
    text = (directory / "table.md").read_text()
    for dtype in available():
        values = line[dtype]["linear"]
        assert f" {values['mean']:.2f} ± {values['std']:.2f} | 0.67 ± 0.29 |" in text
    # Again: complete, so that nothing is trained.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*lenet1*/*")}
    assert before and classifier.run(settings) == directory
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_network_that_diverges():
    line = {"network": "lenet1", "seed": 1, "diverged": True}
    table = classifier.table([line])
    assert "| lenet1, seed 1 " in table and "diverged" in table


def test_unknown_network():
    with pytest.raises(ValueError, match="`networks` must be of vgg11"):
        classifier.Settings(networks=("lenet4",))
