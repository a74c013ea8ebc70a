"""Networks of keras.applications with any norm and activation.

`keras_norms.convert` finds the places of norms that stand before linear layers.
Differences from keras.applications: all ReLU or Swish layers have the given activation,
including the one inside squeeze-and-excitation, but not its sigmoid gates; the output
is logits; a convolution has a bias unless a norm follows it; EfficientNet does not
scale its input, which is already standardised. Convolutions of ResNet and DenseNet
start with `he_normal`, like those of the other networks. CBN also stands before the
convolutions of squeeze-and-excitation, which no BatchNormalization follows, unless the
norm skips them. DenseNet normalises concatenated inputs again in each layer that reads
them, before the activation; CBN stands after that activation.

Reference: https://arxiv.org/abs/1512.03385 (Table 1), https://arxiv.org/abs/1905.11946,
https://arxiv.org/abs/1608.06993 (Table 1)
"""

import keras
from keras import layers

from keras_norms import CBN, convert

CONVOLUTIONS = (layers.Conv2D, layers.DepthwiseConv2D)
NORMALISED = (CBN, layers.BatchNormalization)
BETWEEN = (layers.Concatenate, layers.AveragePooling2D)  # convolution and norm
APPLICATIONS = {
    "resnet50": keras.applications.ResNet50,
    "resnet101": keras.applications.ResNet101,
    "densenet121": keras.applications.DenseNet121,
    "densenet169": keras.applications.DenseNet169,
    "efficientnetb0": keras.applications.EfficientNetB0,
}


def application(name, input_shape, num_classes, norm, activation):
    """Builds a network, from `(batch, *input_shape)` to logits.

    Args:
        name: A key of `APPLICATIONS`.
        input_shape: `(height, width, channels)`, at least 32x32.
        num_classes, activation: See `recipes.models.build`.
        norm: A `recipes.models.norms.Norm`.
    """
    sizes = {"input_shape": input_shape, "classes": num_classes}
    model = APPLICATIONS[name](weights=None, classifier_activation=None, **sizes)
    replaced, changes = keras.activations.relu, {"kernel_initializer": "he_normal"}
    if name == "efficientnetb0":
        replaced, changes = keras.activations.swish, {}
        image = model.get_layer("stem_conv_pad").input
        model = keras.Model(image, model.output, name=model.name)

    def original(layer):
        config = layer.get_config()
        if getattr(layer, "activation", None) is replaced:
            config["activation"] = activation
        if isinstance(layer, layers.Conv2D):
            config.update(changes)
        if isinstance(layer, CONVOLUTIONS) and _is_normalised(layer):
            config["use_bias"] = norm.use_bias
        return type(layer).from_config(config)

    model = keras.models.clone_model(model, clone_function=original)
    if norm.placement == "before":
        model = convert(model, CBN, preserve=False, skip=norm.skip)

    def normalised(layer):
        if isinstance(layer, NORMALISED):
            if norm.layer is None:
                return None
            return norm.layer(layer.input.shape[-1], name=layer.name)
        new = type(layer).from_config(layer.get_config())
        return norm.convolution(new) if isinstance(layer, CONVOLUTIONS) else new

    return keras.models.clone_model(
        model, clone_function=normalised, call_function=_call
    )


def _call(layer, *args, mask=None, **kwargs):
    # Images have no masks, which most layers would not accept.
    return args[0] if layer is None else layer(*args, **kwargs)


def _is_normalised(layer):
    readers = [node.operation for node in layer._outbound_nodes]
    return any(
        isinstance(reader, layers.BatchNormalization)
        or (isinstance(reader, BETWEEN) and _is_normalised(reader))
        for reader in readers
    )
