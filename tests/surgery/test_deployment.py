"""Folded models in the formats that are deployed compute what they did in training."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, convert, fold, prune, recalibrate
from tests.programs import deployed
from tests.support import surgery_models as m
from tests.support.backend import BACKEND, numpy, tensorflow_only
from tests.support.processes import run

pytestmark = pytest.mark.thorough

X = m.images(64, 12, 12, 3)
# The formats to which Keras exports here without more packages than `deploy` has.
HERE = {"tensorflow": deployed.FORMATS, "torch": ("onnx", "openvino")}.get(BACKEND, ())


@pytest.fixture(scope="module", params=["bn", "cbn"])
def trained(request):
    """The residual network; with CBN, shifts before padding stay when it is folded."""
    model = m.residual()
    if request.param == "cbn":
        model = m.randomize(m.quiet(convert, model, "cbn", data=X), seed=4)
    return model


@pytest.fixture(scope="module")
def outputs(trained, tmp_path_factory):
    """By format. What the backend cannot export TensorFlow does, of a saved model."""
    for package in ("tensorflow", "tf2onnx", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    folded = m.quiet(fold, trained)
    made = {name: deployed.outputs(folded, X, name) for name in HERE}
    others = [name for name in deployed.FORMATS if name not in HERE]
    if others:
        folder = tmp_path_factory.mktemp("deployed")
        files = [str(folder / name) for name in ("model.keras", "x.npy", "y.npz")]
        folded.save(files[0])
        np.save(files[1], X)
        program = ("-m", "tests.programs.deployed", *files, *others)
        run(*program, KERAS_BACKEND="tensorflow")
        made |= np.load(files[2])
    return made


def error(actual, model):
    """The largest difference from the model's outputs, of the largest output."""
    expected = numpy(model(X, training=False))
    return np.max(np.abs(actual - expected)) / np.max(np.abs(expected))


@pytest.mark.parametrize("name", deployed.FORMATS)
def test_formats(trained, outputs, name):
    least, most = (1e-3, 2e-2) if "int8" in name else (0, 1e-5)
    assert least <= error(outputs[name], trained) < most


@tensorflow_only
def test_dead_channels_before_int8():
    """Their scale in CBN takes the range of int8 from the others, until they go."""
    stack = layers.Conv2D(8, 3, activation="relu"), CBN(), layers.Conv2D(8, 1)
    flat = layers.ReLU(), layers.Flatten(), layers.Dense(5)
    model = keras.Sequential([keras.Input((12, 12, 3)), *stack, *flat])
    stack[0].bias.assign([-99] * 2 + [0] * 6)
    recalibrate(model, X, verbose=0)
    errors = [
        error(deployed.outputs(fold(each), X, "litert_int8"), model)
        for each in (model, prune(model, X).model)
    ]
    assert errors[1] < 2e-2 < 10 * errors[1] < errors[0]
