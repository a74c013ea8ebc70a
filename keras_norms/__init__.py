"""Normalisation layers for Keras 3, to replace BatchNormalization."""

from keras_norms import activations, diagnostics

# `as`: `keras_norms.layers` is then known to type checkers, without `__all__`, where
# `import *` would put it in place of `keras.layers`.
from keras_norms import layers as layers
from keras_norms import ops as ops
from keras_norms import surgery as surgery
from keras_norms.amat import AMAT
from keras_norms.layers import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from keras_norms.surgery import (
    ProjectWeights,
    Recalibrate,
    convert,
    fold,
    freeze,
    prune,
    recalibrate,
    unfreeze,
)

__version__ = "0.1.0"
__all__ = [
    "AMAT",
    "CBN",
    "CWN",
    "FusedCBN",
    "LpNorm",
    "NoisyBN",
    "ProjectWeights",
    "Recalibrate",
    "WN",
    "WS",
    "activations",
    "convert",
    "diagnostics",
    "fold",
    "freeze",
    "prune",
    "recalibrate",
    "unfreeze",
]
