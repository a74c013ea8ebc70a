"""Exports a saved model and writes what other programs compute from the files.

python -m tests.programs.deployed model.keras images.npy outputs.npz FORMAT ...
"""

import sys
import tempfile

import keras
import numpy as np

from benchmarks import runtimes

# Format -> suffix of the file.
FORMATS = {"onnx": "onnx", "openvino": "xml"}
FORMATS |= {"litert": "tflite", "litert_int8": "tflite"}


def outputs(model, x, name):
    """The outputs of a model for `x`, computed by the program that `name` is for."""
    kind = name.removesuffix("_int8")
    settings = runtimes.litert_int8(x) if name != kind else {}
    model(x)  # Keras exports to ONNX what has been called.
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.{FORMATS[name]}"
        model.export(path, format=kind, verbose=False, **settings)
        run = getattr(runtimes, kind)(path)
        return np.concatenate([run(image[None]) for image in x])


if __name__ == "__main__":
    file, images, made, *names = sys.argv[1:]
    model, x = keras.models.load_model(file), np.load(images)
    np.savez(made, **{name: outputs(model, x, name) for name in names})
    assert "keras_norms" not in sys.modules
