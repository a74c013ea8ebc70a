"""The networks of the recipes, by name."""

import re

import keras

from recipes.models import norms
from recipes.models.resnet import resnet
from recipes.models.vgg import vgg16

DEPTHS = range(8, 1203, 6)  # of residual networks


def build(model, input_shape, num_classes, norm, activation, rho=1.0, omega=10.0):
    """Builds a network that returns logits.

    Args:
        model: `"resnet20"` (any depth 6n + 2) or `"vgg16"`.
        input_shape: `(height, width, channels)`.
        num_classes: Size of the output.
        norm: A name in `recipes.models.norms.NORMS`, or a `Norm`.
        activation: Name of a Keras activation.
        rho, omega: Arguments of CBN.

    Returns:
        A `keras.Model`.
    """
    check(model, activation)
    if isinstance(norm, str):
        norm = norms.get(norm, rho, omega)
    if model == "vgg16":
        return vgg16(input_shape, num_classes, norm, activation)
    depth = int(model.removeprefix("resnet"))
    return resnet(depth, input_shape, num_classes, norm, activation)


def check(model, activation):
    """Raises a ValueError unless `build` knows both names."""
    depth = re.fullmatch(r"resnet(\d+)", model)
    if model != "vgg16" and not (depth and int(depth[1]) in DEPTHS):
        raise ValueError(
            "Argument `model` must be 'vgg16' or 'resnet' and a depth 6n + 2, such as "
            f"'resnet8', 'resnet20' or 'resnet32'. Received: model={model!r}"
        )
    try:
        keras.activations.get(activation)
    except ValueError as error:
        raise ValueError(
            "Argument `activation` must be the name of a Keras activation, such as "
            f"sigmoid, tanh, relu, selu or swish. Received: activation={activation!r}"
        ) from error
