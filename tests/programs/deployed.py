"""Exports a saved model and writes what other programs compute from the files.

python -m tests.programs.deployed model.keras images.npy outputs.npz FORMAT ...
"""

import pathlib
import sys
import tempfile

import keras
import numpy as np


def outputs(model, x, name):
    """The outputs of a model for `x`, computed by the program that `name` is for."""
    with tempfile.TemporaryDirectory() as folder:
        return FORMATS[name](model, pathlib.Path(folder), x)


def onnx(model, folder, x):
    import onnxruntime

    path = str(folder / "model.onnx")
    model(x)  # Keras exports to ONNX what has been called.
    model.export(path, format="onnx", verbose=False)
    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def openvino(model, folder, x):
    import openvino

    path = str(folder / "model.xml")
    model.export(path, format="openvino", verbose=False)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    return openvino.Core().compile_model(path, "CPU", settings)(x)[0]


def litert(model, folder, x, **kwargs):
    import tensorflow as tf

    path = str(folder / "model.tflite")
    model.export(path, format="litert", verbose=False, **kwargs)
    interpreter = tf.lite.Interpreter(path)
    (given,) = interpreter.get_input_details()
    (made,) = interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], x)
    interpreter.invoke()
    return interpreter.get_tensor(made["index"])


def litert_int8(model, folder, x):
    import tensorflow as tf

    settings = {
        "optimizations": [tf.lite.Optimize.DEFAULT],
        "representative_dataset": lambda: ([image[None]] for image in x),
        "target_spec": {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]},
    }
    return litert(model, folder, x, **settings)


FORMATS = {each.__name__: each for each in (onnx, openvino, litert, litert_int8)}

if __name__ == "__main__":
    file, images, made, *names = sys.argv[1:]
    model, x = keras.models.load_model(file), np.load(images)
    np.savez(made, **{name: outputs(model, x, name) for name in names})
    assert "keras_norms" not in sys.modules
