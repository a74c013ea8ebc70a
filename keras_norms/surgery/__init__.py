"""A model in, a model out: other normalisation, folded for inference, recalibrated."""

from keras_norms.surgery.convert import convert
from keras_norms.surgery.fold import fold
from keras_norms.surgery.recalibrate import recalibrate

__all__ = ["convert", "fold", "recalibrate"]
