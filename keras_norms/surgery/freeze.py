"""freeze: norms that run with their stored statistics while the rest trains."""

import warnings

import keras

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_model
from keras_norms.layers.frozen import set_frozen
from keras_norms.surgery._graph.affine import NORM_CLASSES


def freeze(model: keras.Model, affine: bool = False) -> keras.Model:
    """Let all norms of a model run with their stored statistics, in training too.

    Use it to fine-tune on few images or small batches, or if new data must not change
    the statistics. `BatchNormalization`, `CBN`, `NoisyBN` and `LpNorm` layers at any
    depth then do in training what they do at inference: they scale and shift each
    channel. (A `NoisyBN` with `noise_at_inference` keeps its noise.) Everything else
    trains, `gamma` and `beta` included.

    Keras' own `layer.trainable = False` fixes gamma and beta as well, and
    `model.trainable = True` undoes it. `BatchNormalization()(x, training=False)` has no
    effect in a Functional model, which passes its own `training` on. `freeze` lasts
    until `unfreeze`, also in saved files, which need `import keras_norms` to load.
    `convert` freezes norms that replace frozen ones, except CBN, which takes other
    places.

    Args:
        model: A built Keras model of any kind. It is changed in place. Compile a larger
            model that holds it again, and with `affine=True` this one, as after each
            change of `layer.trainable`.
        affine: Boolean, whether gamma and beta are fixed too.

    Returns:
        The model.

    Raises:
        ValueError: If the model is not built or has no such layer, or if `affine` is
            not a boolean.

    Warns:
        UserWarning: If a layer is of a class derived from these. It gets
            `trainable = False`.

    Example:

    >>> base = keras.applications.ResNet50(include_top=False, pooling="avg")
    >>> head = keras.layers.Dense(10, activation="softmax")
    >>> model = keras.Sequential([freeze(base), head])
    >>> model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    >>> model.fit(images, labels, batch_size=4)
    """
    arguments.boolean("affine", affine)
    derived = []
    for layer in _norms_of(model):
        known = set_frozen(layer, True)
        if affine or not known:
            layer.trainable = False
        derived += [] if known or affine else [layer.name]
    _forget_step(model)
    if derived:
        warnings.warn(
            f"freeze: Gamma and beta of {derived} are fixed too, because their classes "
            "are derived from a norm.",
            stacklevel=2,
        )
    return model


def unfreeze(model: keras.Model) -> keras.Model:
    """Let all norms of a model train again, statistics, `gamma` and `beta`.

    A `trainable = False` of the model, or of a layer around them, stays.

    Args:
        model: A built Keras model of any kind, changed in place. See `freeze` for when
            to compile it again.

    Returns:
        The model.

    Raises:
        ValueError: If the model is not built or has no norm with statistics.

    Example:

    >>> unfreeze(model)
    >>> model.compile("adam", "sparse_categorical_crossentropy")
    """
    for layer in _norms_of(model):
        set_frozen(layer, False)
        layer.trainable = True
    _forget_step(model)
    return model


def _norms_of(model):
    check_model(model)
    norms = _keras.layers_of(model, NORM_CLASSES)
    if not norms:
        raise ValueError(
            "Argument `model` must have a normalisation layer with statistics: "
            "BatchNormalization, CBN, NoisyBN or LpNorm. "
            f"Received: model '{model.name}'"
        )
    return norms


def _forget_step(model):
    """Let `fit` trace its step again: the old one has the old calls in it."""
    # Not `None`: a callback may call this while `fit` runs, which uses it.
    if model.train_function is not None:
        model.make_train_function(force=True)
