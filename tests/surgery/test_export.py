"""A folded model leaves Keras: SavedModel and LiteRT."""

import functools

import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, convert, fold
from tests.support import surgery_models as m
from tests.support.backend import numpy, tensorflow_only

pytestmark = pytest.mark.thorough


@tensorflow_only
def test_saved_model_and_lite_rt(tmp_path):
    """The residual network with a CBN before each layer, off the identity, folded."""
    import tensorflow as tf

    x = m.images(2, 12, 12, 3)
    unfolded = m.randomize(m.quiet(convert, m.residual(), "cbn", data=x), seed=4)
    expected = numpy(unfolded(x, training=False))
    close = functools.partial(
        np.testing.assert_allclose, rtol=0, atol=1e-5 * np.max(np.abs(expected))
    )
    model = m.quiet(fold, unfolded)
    # A shift before zero padding is in it.
    assert m.of_class(model, layers.Rescaling) and not m.of_class(model, CBN)
    model.export(str(tmp_path / "saved"), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    close(loaded.serve(x).numpy(), expected)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "saved"))
    content = converter.convert()
    interpreter = m.quiet(tf.lite.Interpreter, model_content=content)
    source = interpreter.get_input_details()[0]["index"]
    interpreter.resize_tensor_input(source, x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(source, x)
    interpreter.invoke()
    result = interpreter.get_output_details()[0]["index"]
    close(interpreter.get_tensor(result), expected)
