"""Keras layers: state, configuration, shapes. Mathematics is in `keras_norms.ops`."""

from keras_norms._keras import layers_of
from keras_norms.layers.cbn import CBN
from keras_norms.layers.cwn import CWN
from keras_norms.layers.fused_cbn import FusedCBN
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.layers.wn import WN
from keras_norms.layers.ws import WS

__all__ = ["CBN", "CWN", "FusedCBN", "LpNorm", "NoisyBN", "WN", "WS", "layers_of"]
