"""VGG-16 for images of 32x32 and smaller (Simonyan and Zisserman, 2015).

Thirteen 3x3 convolutions in five stages, each followed by a 2x2 maximum as long as the
map is larger than 1x1, then one Dense layer. The two hidden Dense layers of the paper
read a 7x7 map that small images do not have; they are left out, as is usual for CIFAR.

Reference: https://arxiv.org/abs/1409.1556, Table 1, column D.
"""

from keras import Model, layers

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def vgg16(input_shape, num_classes, norm, activation):
    """Builds the network.

    Args:
        input_shape: `(height, width, channels)`.
        num_classes: Size of the output, which are logits.
        norm: A `recipes.models.norms.Norm`.
        activation: Name of a Keras activation.

    Returns:
        A `keras.Model` from `(batch, height, width, channels)` to
        `(batch, num_classes)`.
    """
    x = inputs = layers.Input(input_shape, name="image")
    for stage, (filters, convs) in enumerate(STAGES, start=1):
        for index in range(1, convs + 1):
            name = f"stage{stage}_conv{index}"
            if x is not inputs:
                x = norm.before(x, name)
            conv = layers.Conv2D(
                filters,
                3,
                padding="same",
                use_bias=norm.use_bias,
                kernel_initializer="he_normal",
                name=name,
            )
            x = norm.after(norm.convolution(conv)(x), name)
            x = layers.Activation(activation, name=f"{name}_activation")(x)
        if max(x.shape[1:3]) > 1:
            x = layers.MaxPooling2D(padding="same", name=f"stage{stage}_pool")(x)
    # A 32x32 image is one position by now; of a larger one this takes the mean.
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = norm.before(x, "logits")
    x = layers.Dense(num_classes, kernel_initializer="he_normal", name="logits")(x)
    return Model(inputs, x, name="vgg16")
