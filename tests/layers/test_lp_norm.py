"""What only LpNorm has: `p`, and where the mean and `epsilon` enter."""

import json

import keras
import numpy as np
import pytest

from keras_norms import LpNorm
from tests.support.backend import numpy


@pytest.mark.parametrize("p", [np.inf, "inf", 1, np.float32(2.5)], ids=repr)
def test_p_survives_json(p):
    layer = LpNorm(p)
    text = json.dumps(keras.saving.serialize_keras_object(layer))
    again = keras.saving.deserialize_keras_object(json.loads(text))
    assert again.p == layer.p == float(p)


def test_the_norm_is_that_of_the_input_by_default():
    """Santurkar et al. remove the mean after the norm is taken."""
    x = np.array([[1.0], [2.0], [6.0]], "float32")
    for p, norm in ((1, 3), (2, np.sqrt(41 / 3)), (np.inf, 6)):
        y = numpy(LpNorm(p)(x, training=True))
        np.testing.assert_allclose(y, (x - 3) / norm, rtol=1e-5)


def test_epsilon_is_added_to_the_norm():
    """Where BN divides by sqrt(s^2 + epsilon), LpNorm divides by s + epsilon."""
    x = np.random.default_rng(0).normal(1, 2, (8, 5, 4)).astype("float32")
    lp = LpNorm(2, norm_of="centered", epsilon=0.5, momentum=0)
    bn = keras.layers.BatchNormalization(epsilon=0.5, momentum=0)
    s = x.std((0, 1), dtype="float64")
    for training in (True, False):
        expected = numpy(bn(x, training=training)) * np.sqrt(s**2 + 0.5) / (s + 0.5)
        y = numpy(lp(x, training=training))
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
