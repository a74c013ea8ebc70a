"""Residual networks of depth 6n + 2 for images of 32x32 and smaller (He et al., 2016).

A convolution of 16 channels, three stages of n blocks with 16, 32 and 64 channels, the
mean over the map, one Dense layer. A block is

    after:    x_next = act(shortcut + norm(conv2(act(norm(conv1(x))))))
    before:   x_next = act(shortcut + conv2(norm(act(conv1(norm(x))))))

by the place of the norm. The shortcut is x itself, or where the shape changes a 1x1
convolution of what conv1 reads. Nothing normalises the image.

Reference: https://arxiv.org/abs/1512.03385, Section 4.2.
"""

from keras import Model, layers


def resnet(depth, input_shape, num_classes, norm, activation, activate_sum=True):
    """Builds the network.

    Args:
        depth: Integer 6n + 2: 8, 14, 20, 32, 44, 56, 110.
        input_shape: `(height, width, channels)`.
        num_classes: Size of the output, which are logits.
        norm: A `recipes.models.norms.Norm`.
        activation: Name of a Keras activation.
        activate_sum: Whether a block ends with the activation of the sum, as above. If
            not, x_next = shortcut + act(branch), as Eq. 7 of the CBN paper has it.

    Returns:
        A `keras.Model` from `(batch, height, width, channels)` to
        `(batch, num_classes)`.
    """
    if depth < 8 or depth % 6 != 2:
        raise ValueError(
            f"Argument `depth` must be 6n + 2 with n >= 1. Received: depth={depth}"
        )

    def conv(x, filters, size, stride, name):
        layer = layers.Conv2D(
            filters,
            size,
            stride,
            padding="same",
            use_bias=norm.use_bias,
            kernel_initializer="he_normal",
            name=name,
        )
        return norm.after(norm.convolution(layer)(x), name)

    def act(x, name):
        return layers.Activation(activation, name=f"{name}_activation")(x)

    def block(x, filters, stride, name):
        conv1, conv2 = f"{name}_conv1", f"{name}_conv2"
        branch = norm.before(x, conv1)
        if stride != 1 or x.shape[-1] != filters:
            x = conv(branch, filters, 1, stride, f"{name}_shortcut")
        branch = act(conv(branch, filters, 3, stride, conv1), conv1)
        branch = conv(norm.before(branch, conv2), filters, 3, 1, conv2)
        add = layers.Add(name=f"{name}_sum")
        if activate_sum:
            return act(add([x, branch]), name)
        return add([x, act(branch, name)])

    inputs = layers.Input(input_shape, name="image")
    x = act(conv(inputs, 16, 3, 1, "stem"), "stem")
    for stage, filters in enumerate((16, 32, 64), start=1):
        for index in range((depth - 2) // 6):
            stride = 2 if stage > 1 and index == 0 else 1
            x = block(x, filters, stride, f"stage{stage}_block{index}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = norm.before(x, "logits")
    x = layers.Dense(num_classes, kernel_initializer="he_normal", name="logits")(x)
    return Model(inputs, x, name=f"resnet{depth}")
