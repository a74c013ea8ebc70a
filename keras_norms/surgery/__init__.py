"""Functions that change the norms of a model, fold, freeze or prune it; callbacks."""

from keras_norms.surgery.convert import convert
from keras_norms.surgery.fold import fold
from keras_norms.surgery.freeze import freeze, unfreeze
from keras_norms.surgery.project_weights import ProjectWeights
from keras_norms.surgery.prune import Pruned, prune
from keras_norms.surgery.recalibrate import Recalibrate, recalibrate

__all__ = [
    "ProjectWeights",
    "Pruned",
    "Recalibrate",
    "convert",
    "fold",
    "freeze",
    "prune",
    "recalibrate",
    "unfreeze",
]
