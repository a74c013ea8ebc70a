"""A folded model leaves Keras: SavedModel, LiteRT, ONNX."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms.layers.cbn import CBN
from keras_norms.surgery import convert, fold
from tests.support import surgery_models as m

tensorflow_only = pytest.mark.skipif(
    m.BACKEND != "tensorflow", reason="TensorFlow only"
)


def folded_and_its_data():
    """The residual network with a CBN before each layer, off the identity, folded."""
    x = m.images(2, 12, 12, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = m.randomize(convert(m.residual(), "cbn", data=x), seed=4)
        folded = fold(model)
    # A shift before zero padding is in it.
    assert m.of_class(folded, layers.Rescaling) and not m.of_class(folded, CBN)
    return folded, x, m.numpy(model(x, training=False))


def assert_close(actual, expected, tolerance=1e-5):
    limit = tolerance * np.max(np.abs(expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


@tensorflow_only
def test_saved_model(tmp_path):
    import tensorflow as tf

    model, x, expected = folded_and_its_data()
    model.export(str(tmp_path / "saved"), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert_close(loaded.serve(x).numpy(), expected)


@tensorflow_only
def test_lite_rt(tmp_path):
    import tensorflow as tf

    model, x, expected = folded_and_its_data()
    model.export(str(tmp_path / "saved"), verbose=False)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "saved"))
    content = converter.convert()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interpreter = tf.lite.Interpreter(model_content=content)
    source = interpreter.get_input_details()[0]["index"]
    interpreter.resize_tensor_input(source, x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(source, x)
    interpreter.invoke()
    result = interpreter.get_output_details()[0]["index"]
    assert_close(interpreter.get_tensor(result), expected)


def test_onnx(tmp_path):
    converters = {"tensorflow": "tf2onnx", "jax": "jax2onnx", "torch": "onnxscript"}
    pytest.importorskip(converters[m.BACKEND])
    runtime = pytest.importorskip("onnxruntime")
    model, x, expected = folded_and_its_data()
    file = str(tmp_path / "model.onnx")
    model(x)  # Keras wants it to have been called.
    model.export(file, format="onnx", verbose=False)
    session = runtime.InferenceSession(file)
    (result,) = session.run(None, {session.get_inputs()[0].name: x})
    assert_close(result, expected)


def test_weights_are_plain_files(tmp_path):
    model, x, expected = folded_and_its_data()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_close(m.numpy(loaded(x)), expected)
