"""Normalisation layers for Keras 3, to replace BatchNormalization."""

from keras_norms import activations, diagnostics
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
