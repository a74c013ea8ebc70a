"""The networks of the benchmarks, with each normalisation, from keras.applications."""

import re
import warnings
from functools import partial

import keras
from absl import flags

from benchmarks import compare
from keras_norms import CBN, LpNorm
from keras_norms.layers import layers_of
from keras_norms.surgery import convert
from recipes import models


def _recipe(name, size):
    return models.build(name, (size, size, 3), 10, "bn", "relu")


def _application(name, size):
    return getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classifier_activation=None
    )


# Name -> usual size of images, function from a size to the network with BN.
NETWORKS = {
    "resnet20": (32, partial(_recipe, "resnet20")),
    "vgg16": (32, partial(_recipe, "vgg16")),
    "resnet50": (224, partial(_application, "ResNet50")),
    "efficientnetb0": (224, partial(_application, "EfficientNetB0")),
    "mobilenetv2": (224, partial(_application, "MobileNetV2")),
    "densenet121": (224, partial(_application, "DenseNet121")),
}
NORMS = ("none", "bn", "cbn", "fused_cbn", "noisy_bn", "lp_norm", "ws", "cwn", "wn")
YARDSTICK = "bn"
# With a p other than 2.
LP_NORMS = {"lp_norm:1": 1, "lp_norm:inf": "inf"}
ALL_NORMS = (*NORMS, *LP_NORMS)
_SIZED = re.compile(r"(\w+):([1-9]\d*):([1-9]\d*)", re.ASCII)


def build(network, norm, image_size=None, learning_rate=0.1, skip=None):
    """Build a `keras.Model` with random weights that returns logits.

    Args:
        network: A name in `NETWORKS`.
        norm: `"bn"` is the network as it is. `"none"` is without any normalisation,
            `"fused_cbn"` with `FusedCBN`, `"lp_norm:1"` and `"lp_norm:inf"` with
            `LpNorm(1)` and `LpNorm("inf")`; the others are those of `convert`, which
            leaves BN where it is for `"ws"`, `"cwn"` and `"wn"`.
        image_size: Height and width of the images, by default the usual ones.
        learning_rate: The rate that the CBN layers get: AMAT is on.
        skip: Regular expression; layers with a match in their name get no CBN.
    """
    if norm not in ALL_NORMS:
        names = ", ".join(ALL_NORMS)
        raise ValueError(
            f"Argument `norm` must be one of {names}. Received: norm={norm}"
        )
    usual_size, make = NETWORKS[network]
    model = make(image_size or usual_size)
    if norm == "bn":
        return model
    with warnings.catch_warnings(action="ignore"):  # Nothing need be preserved here.
        if norm == "none":
            return convert(model, _nothing, preserve=False)
        if norm in LP_NORMS:
            return convert(model, LpNorm(LP_NORMS[norm]), preserve=False)
        model = convert(
            model,
            norm.removeprefix("fused_"),
            preserve=False,
            fused=norm == "fused_cbn",
            skip=skip and (lambda layer: re.search(skip, layer.name)),
        )
    for layer in layers_of(model, CBN):
        layer.set_learning_rate(learning_rate)
    return model


def parse(text, any_name=False):
    """`"resnet20:32:128"` as name, image size and batch size.

    Raises:
        ValueError: If `text` is anything else, or, without `any_name`, if `NETWORKS`
            does not have the name.
    """
    found = _SIZED.fullmatch(text)
    if not found or not (any_name or found[1] in NETWORKS):
        names = "" if any_name else f", with a name of {', '.join(NETWORKS)}"
        raise ValueError(
            f"A network must be name:image size:batch size{names}. Received: {text}"
        )
    return found[1], int(found[2]), int(found[3])


def check_flag(flag, any_name=False):
    """Report what `parse` refuses in a flag, for one or more networks, as an error."""

    def check(given):
        try:
            for text in given if isinstance(given, list) else [given]:
                parse(text, any_name)
        except ValueError as error:
            raise flags.ValidationError(str(error)) from None
        return True

    flags.register_validator(flag, check)


def define_flags():
    """The flags of benchmarks that compare the norms of whole networks."""
    flags.DEFINE_list(
        "networks",
        ["resnet20:32:128", "resnet50:64:16"],
        f"Networks as name:image size:batch size, of {', '.join(NETWORKS)}.",
    )
    check_flag("networks")
    about = f"Normalisations, {YARDSTICK} among them."
    compare.define_names("norms", [*NORMS], ALL_NORMS, about)
    flags.register_validator(
        "norms", lambda norms: YARDSTICK in norms, f"must have {YARDSTICK} among them"
    )
    flags.DEFINE_string("dtype_policy", "float32", "Dtype policy, as mixed_bfloat16.")
    flags.DEFINE_bool(
        "jit_compile", None, "Whether XLA compiles the step. If None, Keras decides."
    )
    flags.DEFINE_string("output", None, "JSON file to write.")


def _nothing(layer):
    return keras.layers.Activation("linear")
