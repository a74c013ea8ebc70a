"""The networks of the benchmarks, with each normalisation, from keras.applications."""

import warnings

import keras

from keras_norms import CBN
from keras_norms.surgery import convert
from recipes import models

NETWORKS = {
    "resnet20": lambda: models.build("resnet20", (32, 32, 3), 10, "bn", "relu"),
    "vgg16": lambda: models.build("vgg16", (32, 32, 3), 10, "bn", "relu"),
    "resnet50": lambda: keras.applications.ResNet50(
        weights=None, classifier_activation=None
    ),
    "efficientnetb0": lambda: keras.applications.EfficientNetB0(
        weights=None, classifier_activation=None
    ),
}
NORMS = ("none", "bn", "cbn", "fused_cbn", "noisy_bn", "lp_norm", "ws", "cwn", "wn")


def build(network, norm, learning_rate=0.1):
    """Build a network with random weights that returns logits.

    Args:
        network: A name in `NETWORKS`.
        norm: `"bn"` is the network as it is. `"none"` is without any normalisation,
            `"fused_cbn"` with `FusedCBN`, the others are those of `convert`.
        learning_rate: What the CBN layers are told: AMAT is on.

    Returns:
        A `keras.Model`.
    """
    if norm not in NORMS:
        raise ValueError(
            f"Argument `norm` must be one of {', '.join(NORMS)}. Received: norm={norm}"
        )
    model = NETWORKS[network]()
    if norm == "bn":
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Nothing is to be preserved here.
        if norm == "none":
            return convert(model, _nothing, preserve=False)
        fused = norm == "fused_cbn"
        model = convert(model, norm.removeprefix("fused_"), preserve=False, fused=fused)
    for layer in model._flatten_layers():
        if isinstance(layer, CBN):
            layer.set_learning_rate(learning_rate)
    return model


def _nothing(layer):
    return keras.layers.Activation("linear")
