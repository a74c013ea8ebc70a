"""LeNet-5 (LeCun et al., 1998), as revised by Zhou et al.

Two 5x5 convolutions of 6 and 16 channels, each with a 2x2 maximum after it, and Dense
layers of 120, 84 and, added before the logits, seven of 20. Zhou et al. have ReLU and
maxima where the original has sigmoid and means. Convolutions are padded to allow images
of 8x8.

Reference: https://arxiv.org/abs/2205.15146, Table 7 and Appendix I.1.
"""

from keras import Model, layers

from recipes.models.head import conv2d, dense_head


def lenet(input_shape, num_classes, norm=None, place=1):
    """Builds the network, from `(batch, *input_shape)` to logits.

    Args:
        input_shape, num_classes: See `recipes.models.build`.
        norm, place: See `dense_head`. Places 1, 2 and 3 are LeNet-1, LeNet-2 and
            LeNet-3 of the paper.
    """
    x = inputs = layers.Input(input_shape, name="image")
    for index, filters in enumerate((6, 16), start=1):
        name = f"conv{index}"
        x = conv2d(filters, 5, name=name)(x)
        x = layers.Activation("relu", name=f"{name}_activation")(x)
        x = layers.MaxPooling2D(padding="same", name=f"{name}_pool")(x)
    x = layers.Flatten(name="flat")(x)
    x = dense_head(x, (120, 84, *[20] * 7), num_classes, "relu", norm, place)
    return Model(inputs, x, name="lenet")
