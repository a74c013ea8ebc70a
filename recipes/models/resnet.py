"""Residual networks of basic blocks (He et al., 2016).

`resnet` has depth 6n + 2 and is for images of 32x32 and smaller (Section 4.2): a
convolution of 16 channels, three stages of n blocks with 16, 32 and 64 channels.
`resnet18` and `resnet34` are for images of about 224x224 (Table 1): a 7x7 convolution
of 64 channels and a 3x3 maximum, each with stride 2, and four stages of 64, 128, 256
and 512 channels, of two blocks each, or of 3, 4, 6 and 3. All end with the mean over
the map and one Dense layer. A block is

    after:    x_next = act(shortcut + norm(conv2(act(norm(conv1(x))))))
    before:   x_next = act(shortcut + conv2(norm(act(conv1(norm(x))))))

by the place of the norm. The shortcut is x itself, or where the shape changes a 1x1
convolution of what conv1 reads, normalised after it as the others are. Nothing
normalises the image.

Reference: https://arxiv.org/abs/1512.03385
"""

from keras import Model, layers


def resnet(depth, input_shape, num_classes, norm, activation, activate_sum=True):
    """Builds the network for small images.

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
    make = _Layers(norm, activation, activate_sum)
    inputs = layers.Input(input_shape, name="image")
    x = make.act(make.conv(inputs, 16, 3, 1, "stem"), "stem")
    x = make.stages(x, (16, 32, 64), ((depth - 2) // 6,) * 3)
    return Model(inputs, make.logits(x, num_classes), name=f"resnet{depth}")


def resnet18(input_shape, num_classes, norm, activation):
    """Builds the network for images of about 224x224; the arguments are as above."""
    return _large(18, (2, 2, 2, 2), input_shape, num_classes, norm, activation)


def resnet34(input_shape, num_classes, norm, activation):
    """Builds the deeper network for such images."""
    return _large(34, (3, 4, 6, 3), input_shape, num_classes, norm, activation)


def _large(depth, blocks, input_shape, num_classes, norm, activation):
    make = _Layers(norm, activation)
    inputs = layers.Input(input_shape, name="image")
    x = make.act(make.conv(inputs, 64, 7, 2, "stem"), "stem")
    x = layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    x = make.stages(x, (64, 128, 256, 512), blocks)
    return Model(inputs, make.logits(x, num_classes), name=f"resnet{depth}")


class _Layers:
    """Makes the parts of a network of one norm and one activation."""

    def __init__(self, norm, activation, activate_sum=True):
        self.norm = norm
        self.activation = activation
        self.activate_sum = activate_sum

    def conv(self, x, filters, size, stride, name):
        layer = layers.Conv2D(
            filters,
            size,
            stride,
            padding="same",
            use_bias=self.norm.use_bias,
            kernel_initializer="he_normal",
            name=name,
        )
        return self.norm.after(self.norm.convolution(layer)(x), name)

    def act(self, x, name):
        return layers.Activation(self.activation, name=f"{name}_activation")(x)

    def block(self, x, filters, stride, name):
        conv1, conv2 = f"{name}_conv1", f"{name}_conv2"
        branch = self.norm.before(x, conv1)
        if stride != 1 or x.shape[-1] != filters:
            x = self.conv(branch, filters, 1, stride, f"{name}_shortcut")
        branch = self.act(self.conv(branch, filters, 3, stride, conv1), conv1)
        branch = self.conv(self.norm.before(branch, conv2), filters, 3, 1, conv2)
        add = layers.Add(name=f"{name}_sum")
        if self.activate_sum:
            return self.act(add([x, branch]), name)
        return add([x, self.act(branch, name)])

    def stages(self, x, widths, blocks):
        for stage, (filters, count) in enumerate(zip(widths, blocks), start=1):
            for index in range(count):
                stride = 2 if stage > 1 and index == 0 else 1
                x = self.block(x, filters, stride, f"stage{stage}_block{index}")
        return x

    def logits(self, x, num_classes):
        x = layers.GlobalAveragePooling2D(name="pool")(x)
        x = self.norm.before(x, "logits")
        last = layers.Dense(num_classes, kernel_initializer="he_normal", name="logits")
        return last(x)
