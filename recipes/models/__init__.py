"""The networks of the recipes, by name."""

import contextlib
import re
from functools import partial

import keras

from keras_norms.layers.learning_rate import FollowsLearningRate
from recipes.models import norms
from recipes.models.applications import APPLICATIONS, application
from recipes.models.mlp import mlp
from recipes.models.resnet import resnet
from recipes.models.vgg import vgg11, vgg16

DEPTHS = range(8, 1203, 6)  # of residual networks for small images
SMALL = {"vgg11": vgg11, "vgg16": vgg16}
NAMED = {
    **SMALL,
    "resnet18": partial(resnet, 18),
    "resnet34": partial(resnet, 34),
    **{name: partial(application, name) for name in APPLICATIONS},
}
NAMES = f"Network: resnet8, resnet20, ..., mlp256, ..., {', '.join(NAMED)}."


def build(
    model, input_shape, num_classes, norm, activation, rho=1.0, omega=10.0, dtype=None
):
    """Builds a network that returns logits.

    Args:
        model: `"resnet20"` (any depth 6n + 2 but 50), `"vgg11"` or `"vgg16"`, for small
            images, which may end with a width, such as `"vgg16_0.25"` with a quarter of
            the channels; `"mlp256"`, Dense layers of 256 (or any number of) units; for
            ImageNet's images `"resnet18"`, `"resnet34"`, and, for at least 32x32
            pixels, `"resnet50"`, `"resnet101"`, `"densenet121"`, `"densenet169"` or
            `"efficientnetb0"`.
        input_shape: `(height, width, channels)`.
        num_classes: Size of the output.
        norm: A name in `recipes.models.norms.NORMS`, or a `Norm`.
        activation: Name of a Keras activation.
        rho, omega: Arguments of CBN.
        dtype: Name of a dtype policy, such as `"mixed_bfloat16"`; Keras' own if `None`.

    Returns:
        A `keras.Model` from `(batch, *input_shape)` to `(batch, num_classes)`.
    """
    check(model, activation)
    if isinstance(norm, str):
        norm = norms.get(norm, rho, omega)
    name, _, width = model.partition("_")
    kind, number = re.fullmatch(r"(\D+)(\d*)", name).groups()
    make = NAMED.get(name) or partial({"resnet": resnet, "mlp": mlp}[kind], int(number))
    with dtype_policy(dtype):
        network = make(input_shape, num_classes, norm, activation)
        return scaled(network, float(width)) if width else network


@contextlib.contextmanager
def dtype_policy(dtype):
    """Layers made in this context have the dtype policy `dtype`, if not `None`."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(before if dtype is None else dtype)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def scaled(model, width, initializer=None):
    """The same network, untrained, with `width` times as many channels.

    Each convolution keeps at least one filter. `initializer` names a Keras initializer
    for all kernels, instead of their own.
    """

    def clone(layer):
        config = layer.get_config()
        inner = config
        if "layer" in config:  # a wrapper that normalises the kernel of a convolution
            config["layer"].pop("build_config", None)
            inner = config["layer"]["config"]
        for key in ("filters", "groups"):
            if inner.get(key, 1) > 1:
                inner[key] = max(1, round(width * inner[key]))
        if isinstance(layer, keras.layers.GroupNormalization) and layer.groups > 1:
            channels = max(1, round(width * layer.input.shape[-1]))
            most = range(1, config["groups"] + 1)
            config["groups"] = max(n for n in most if channels % n == 0)
        if initializer is not None and "kernel_initializer" in inner:
            inner["kernel_initializer"] = initializer
        return type(layer).from_config(config)

    new = keras.models.clone_model(model, clone_function=clone)
    for layer, before in zip(new.layers, model.layers, strict=True):
        if isinstance(layer, FollowsLearningRate):
            layer.set_learning_rate(keras.ops.convert_to_numpy(before.learning_rate))
    return new


def check(model, activation):
    """Raises a ValueError unless `build` knows both names."""
    name, *widths = model.split("_", 1)
    depth = re.fullmatch(r"resnet(\d+)", name)
    small = name in SMALL or name not in NAMED and depth and int(depth[1]) in DEPTHS
    scales = all(re.fullmatch(r"0\.\d*[1-9]|[1-9]\d*", width) for width in widths)
    perceptron = re.fullmatch(r"mlp[1-9]\d*", model)
    if not (model in NAMED or perceptron or small and scales):
        raise ValueError(
            f"Argument `model` must be one of {', '.join(NAMED)}, or 'resnet' and a "
            "depth 6n + 2, such as 'resnet8', 'resnet20' or 'resnet32', or 'mlp' and a "
            f"number of units, such as 'mlp256'; residual ones and {', '.join(SMALL)} "
            "may have a width, such as 'vgg16_0.25'. "
            f"Received: model={model!r}"
        )
    try:
        keras.activations.get(activation)
    except ValueError as error:
        raise ValueError(
            "Argument `activation` must be the name of a Keras activation, such as "
            f"sigmoid, tanh, relu, selu or swish. Received: activation={activation!r}"
        ) from error
