"""Exports a saved model and writes what other programs compute from the files.

python -m tests.programs.deployed model.keras images.npy outputs.npz FORMAT ...
"""

import sys
import tempfile

import keras
import numpy as np


def outputs(model, x, name):
    """The outputs of a model for `x`, computed by the program that `name` is for."""
    run, suffix = FORMATS[name]
    settings = int8(x) if name == "litert_int8" else {}
    model(x)  # Keras exports to ONNX what has been called.
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.{suffix}"
        model.export(path, format=run.__name__, verbose=False, **settings)
        return run(path, x)


def onnx(path, x):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def openvino(path, x):
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    return openvino.Core().compile_model(path, "CPU", settings)(x)[0]


def litert(path, x):
    import tensorflow as tf

    interpreter = tf.lite.Interpreter(path)
    (given,) = interpreter.get_input_details()
    (made,) = interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], x)
    interpreter.invoke()
    return interpreter.get_tensor(made["index"])


def int8(images):
    import tensorflow as tf

    return {
        "optimizations": [tf.lite.Optimize.DEFAULT],
        "representative_dataset": lambda: ([image[None]] for image in images),
        "target_spec": {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]},
    }


FORMATS = {"onnx": (onnx, "onnx"), "openvino": (openvino, "xml")}
FORMATS |= {"litert": (litert, "tflite"), "litert_int8": (litert, "tflite")}

if __name__ == "__main__":
    file, images, made, *names = sys.argv[1:]
    model, x = keras.models.load_model(file), np.load(images)
    np.savez(made, **{name: outputs(model, x, name) for name in names})
    assert "keras_norms" not in sys.modules
