"""VGG networks for images of 32x32 and smaller (Simonyan and Zisserman, 2015).

Five stages of 3x3 convolutions, each stage followed by a 2x2 maximum as long as the map
is larger than 1x1, then Dense layers. The two hidden Dense layers of the paper read a
7x7 map that small images do not have; they are left out by default, as is usual for
CIFAR.

Reference: https://arxiv.org/abs/1409.1556, Table 1, columns A and D.
"""

from functools import partial

from keras import Model, layers

from recipes.models.head import conv2d, dense_head

FILTERS = (64, 128, 256, 512, 512)
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3)}


def vgg(depth, input_shape, num_classes, norm, activation, hidden=(), head_norm=None):
    """Builds the network, from `(batch, *input_shape)` to logits.

    Args:
        depth: A key of `CONVOLUTIONS`: the layers with weights in the paper's networks.
        input_shape, num_classes, activation: See `recipes.models.build`.
        norm: A `recipes.models.norms.Norm` for the convolutions and the logits.
        hidden: Sizes of the hidden Dense layers, in the paper `(4096, 4096)`.
        head_norm: A layer before the last hidden one, if any; see `dense_head`.
    """
    x = inputs = layers.Input(input_shape, name="image")
    for stage, (filters, convs) in enumerate(zip(FILTERS, CONVOLUTIONS[depth]), 1):
        for index in range(1, convs + 1):
            name = f"stage{stage}_conv{index}"
            if x is not inputs:
                x = norm.before(x, name)
            conv = conv2d(filters, 3, use_bias=norm.use_bias, name=name)
            x = norm.after(norm.convolution(conv)(x), name)
            x = layers.Activation(activation, name=f"{name}_activation")(x)
        if max(x.shape[1:3]) > 1:
            x = layers.MaxPooling2D(padding="same", name=f"stage{stage}_pool")(x)
    # A 32x32 image is one position by now; for a larger one this takes the mean.
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = norm.before(x, "logits")
    place = 2 if hidden else 1
    x = dense_head(x, hidden, num_classes, activation, head_norm, place)
    return Model(inputs, x, name=f"vgg{depth}")


vgg11, vgg16 = partial(vgg, 11), partial(vgg, 16)
