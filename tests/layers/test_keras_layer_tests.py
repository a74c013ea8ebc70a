"""Keras' own tests of a layer: shapes, dtypes, masks, serialization, fit, precision."""

import pytest
from keras import layers
from keras.src.testing import TestCase

from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from tests.support.backend import later

VECTORS, SERIES, IMAGES = (5, 3), (4, 5, 3), (3, 4, 4, 3)
DENSE = {"layer": lambda: layers.Dense(2)}
REGULARIZED = {"layer": lambda: layers.Dense(2, kernel_regularizer="l2")}
CONVOLUTION = {"layer": lambda: layers.Conv2D(4, 2, padding="same"), "norm": CBN}
KEPT = [(CBN, {}, VECTORS), (WN, REGULARIZED, VECTORS)]
LATER = [
    (CBN, {"axis": 1, "decouple": False, "gamma_regularizer": "l2"}, IMAGES),
    (NoisyBN, {"activity_regularizer": "l2"}, SERIES),
    (LpNorm, {"p": 3}, IMAGES),
    (WS, {"layer": lambda: layers.Conv1D(3, 2), "gain": True}, SERIES),
    (CWN, {"layer": lambda: layers.SeparableConv2D(3, 2)}, IMAGES),
    (FusedCBN, DENSE, SERIES),
    (FusedCBN, CONVOLUTION, IMAGES),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("cls", "arguments", "shape"),
    KEPT + later(*LATER),
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_layer_passes(cls, arguments, shape):
    masks = None if cls in (WS, CWN, WN) else True
    arguments = {name: v() if callable(v) else v for name, v in arguments.items()}
    case = TestCase("assertEqual")
    case.setUp()
    case.run_layer_test(cls, arguments, input_shape=shape, supports_masking=masks)
