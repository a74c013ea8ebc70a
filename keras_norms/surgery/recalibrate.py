"""recalibrate: fresh moving statistics from data."""

import warnings

import keras
import numpy as np

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._types import Tensor
from keras_norms.layers.frozen import Frozen
from keras_norms.surgery._graph.affine import NORM_CLASSES
from keras_norms.surgery._graph.measure import measure, stored
from keras_norms.surgery._graph.units import assign, to_float64


def recalibrate(
    model: keras.Model,
    data: Tensor,
    steps: int | None = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
) -> keras.Model:
    """Measure the moving statistics of all normalisation layers anew ("precise BN").

    Use it after the weights were changed by other means than training: averaged (SWA,
    EMA), pruned, loaded into another data domain; or where batches were too small for
    good moving averages.

    One pass over the data. Every normalisation layer normalises each batch with the
    statistics of this batch, as in training, but without noise; everything else runs in
    inference mode, Dropout included. The new mean is that of all elements of the pass,
    and the variance is that of all elements around it (Chan et al.), not an average of
    batch variances. CBN's mean square follows from both with its `beta`. LpNorm's norm
    is the average over batches, as its moving average is.

    Layers that are frozen (`freeze`, or `layer.trainable = False`) use their statistics
    and keep them, and so do layers that the model has but does not call, and those of
    classes derived from these that override `call`; a warning names both. Layers inside
    of other layers are measured like all others. All other weights, and the optimizer,
    stay as they are.

    Args:
        model: A built Keras model of any kind. It is changed in place.
        data: What `fit` takes: arrays, a `tf.data.Dataset`, a `keras.utils.PyDataset`,
            a PyTorch `DataLoader`, or any iterable of batches. `(x, y)` and
            `(x, y, sample_weight)` are recognised; only `x` is used.
        steps: Optional positive integer, how many batches to use. Needed where data is
            endless.
        batch_size: Optional positive integer, for arrays. 32 by default.
        verbose: `"auto"`, 0, 1, or 2, as in `Model.predict`.

    Returns:
        The model.

    Raises:
        ValueError: If the model is not built, if it calls no layer to measure, if
            `data` is of another kind, empty, or does not fit the model, or if another
            argument is out of its range.

    Example:

    >>> recalibrate(model, x_train, steps=100, batch_size=256)
    """
    if not isinstance(model, keras.Model):
        raise arguments.wrong("model", "a Keras model", model)
    if not model.built:
        raise ValueError(
            "Argument `model` must be built: call it on data. "
            f"Received: model '{model.name}'"
        )
    if steps is not None:
        arguments.integer("steps", steps, at_least=1)
    if batch_size is not None:
        arguments.integer("batch_size", batch_size, at_least=1)
    arguments.choice("verbose", verbose, ("auto", 0, 1, 2))
    measure_anew(model, data, steps, batch_size, verbose)
    return model


def layers_to_measure(model: keras.Model) -> list[keras.layers.Layer]:
    """List the layers whose statistics `recalibrate` measures.

    Raises:
        ValueError: If there is none.
    """
    calls = [norm.call for norm in NORM_CLASSES]
    norms = [
        layer
        for layer in _keras.layers_of(model, NORM_CLASSES)
        if layer.trainable and not isinstance(layer, Frozen)
    ]
    found = [layer for layer in norms if type(layer).call in calls]
    others = [layer for layer in norms if layer not in found]
    if others:
        warnings.warn(
            "recalibrate: these layers are of classes that override `call`, and keep "
            f"their statistics: {[layer.name for layer in others]}.",
            stacklevel=4,
        )
    if not found:
        raise ValueError(
            "Argument `model` must have a normalisation layer that is not frozen: "
            "CBN, NoisyBN, LpNorm or BatchNormalization. "
            f"Received: model '{model.name}'"
        )
    return found


def statistics_of(layers: list[keras.layers.Layer]) -> list[keras.Variable]:
    """The variables of layers that `recalibrate` assigns."""
    return [
        v
        for layer in layers
        for v in layer.non_trainable_variables
        if v.name.startswith(("moving_", "renorm_")) or v.name == "average_weight"
    ]


def measure_anew(
    model: keras.Model,
    data: Tensor,
    steps: int | None,
    batch_size: int | None,
    verbose: str | int,
) -> int:
    """What `recalibrate` does. Returns how many batches it took."""
    found = layers_to_measure(model)
    measured = measure(
        model, found, data, steps, batch_size, verbose, with_batch_statistics=True
    )
    unread = [layer.name for layer, s in zip(found, measured) if s is None]
    if len(unread) == len(found):
        raise ValueError(
            f"Layers {unread} of model '{model.name}' were not called by the model."
        )
    for layer, statistics in zip(found, measured):
        if statistics is not None:
            _assign(layer, statistics)
    if unread:
        warnings.warn(
            f"recalibrate: model '{model.name}' does not call these layers, which keep "
            f"their statistics: {unread}.",
            stacklevel=3,
        )
    return max(s.batches for s in measured if s is not None)


def _assign(layer, statistics):
    values = stored(layer, statistics, to_float64)
    if getattr(layer, "renorm", False):
        deviation = np.sqrt(statistics.variance + layer.epsilon)
        values["renorm_mean"] = statistics.mean
        values["renorm_stddev"] = values["moving_stddev"] = deviation
    for name, value in values.items():
        assign(getattr(layer, name), value)
