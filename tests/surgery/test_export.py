"""A folded model leaves Keras: SavedModel, LiteRT, ONNX."""

import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, convert, fold
from tests.support import surgery_models as m
from tests.support.backend import BACKEND, numpy, tensorflow_only

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def folded():
    """The residual network with a CBN before each layer, off the identity, folded.

    With data, and the outputs before it was folded.
    """
    x = m.images(2, 12, 12, 3)
    model = m.randomize(m.quiet(convert, m.residual(), "cbn", data=x), seed=4)
    new = m.quiet(fold, model)
    # A shift before zero padding is in it.
    assert m.of_class(new, layers.Rescaling) and not m.of_class(new, CBN)
    return new, x, numpy(model(x, training=False))


def assert_close(actual, expected):
    limit = 1e-5 * np.max(np.abs(expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


@tensorflow_only
def test_saved_model_and_lite_rt(folded, tmp_path):
    import tensorflow as tf

    model, x, expected = folded
    model.export(str(tmp_path / "saved"), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert_close(loaded.serve(x).numpy(), expected)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "saved"))
    content = converter.convert()
    interpreter = m.quiet(tf.lite.Interpreter, model_content=content)
    source = interpreter.get_input_details()[0]["index"]
    interpreter.resize_tensor_input(source, x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(source, x)
    interpreter.invoke()
    result = interpreter.get_output_details()[0]["index"]
    assert_close(interpreter.get_tensor(result), expected)


def test_onnx(folded, tmp_path):
    converters = {"tensorflow": "tf2onnx", "jax": "jax2onnx", "torch": "onnxscript"}
    pytest.importorskip(converters[BACKEND])
    runtime = pytest.importorskip("onnxruntime")
    model, x, expected = folded
    file = str(tmp_path / "model.onnx")
    model(x)  # Keras wants it to have been called.
    model.export(file, format="onnx", verbose=False)
    session = runtime.InferenceSession(file)
    (result,) = session.run(None, {session.get_inputs()[0].name: x})
    assert_close(result, expected)
