"""A model in, a model out: other norms, folded for inference, recalibrated, pruned."""

from keras_norms.surgery.convert import convert
from keras_norms.surgery.fold import fold
from keras_norms.surgery.prune import Pruned, prune
from keras_norms.surgery.recalibrate import recalibrate

__all__ = ["Pruned", "convert", "fold", "prune", "recalibrate"]
