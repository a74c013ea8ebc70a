"""Folded models in the formats that are deployed compute what they did in training."""

import numpy as np
import pytest

from keras_norms import convert, fold
from tests.programs import deployed
from tests.support import surgery_models as m
from tests.support.backend import BACKEND, numpy
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


@pytest.mark.parametrize("name", deployed.FORMATS)
def test_formats(trained, outputs, name):
    """The largest difference from the model's outputs, of the largest output."""
    expected = numpy(trained(X, training=False))
    error = np.max(np.abs(outputs[name] - expected)) / np.max(np.abs(expected))
    least, most = (1e-3, 2e-2) if "int8" in name else (0, 1e-5)
    assert least <= error < most
