import keras
import numpy as np
import pytest

from recipes.blindness import classifier
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
def test_run(tmp_path, monkeypatch):
    """What is measured is as the theorems say."""
    measured, measure = [], classifier.measure

    def recorded(*arguments):
        measured.append(measure(*arguments))
        return measured[-1]

    monkeypatch.setattr(classifier, "measure", recorded)
    own = {"train_size": 64, "batch_size": 32, "epochs": 1, "batches": 1}
    own |= {"networks": ("lenet2",), "workers": 1}
    small.run(classifier, tmp_path, **own)
    limits = {"float32": 1e-4, "float64": 1e-10}
    for dtype, found in zip(available(), measured, strict=True):
        for end in ("", ", one label"):
            assert found[f"first{end}"][0] < limits[dtype]
            assert found[f"diagonal{end}"][0] < limits[dtype]
            assert found[f"off_diagonal{end}"][0] > 1e-2
        squares = np.square(found["linear"]) + np.square(found["non"])
        np.testing.assert_allclose(squares, 1, rtol=1e-4)
        assert 0 < len(found["linear"]) <= 20


def test_a_network_that_diverges():
    line = {"network": "lenet1", "seed": 1, "diverged": True}
    table = classifier.table([line])
    assert "| lenet1, seed 1 " in table and "diverged" in table
