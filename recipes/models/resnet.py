"""Residual networks of basic blocks (He et al., 2016).

Depth 6n + 2 is for images of 32x32 and smaller (Section 4.2): a convolution of 16
channels, three stages of n blocks with 16, 32 and 64 channels. Depths 18 and 34 are for
images of about 224x224 (Table 1): a 7x7 convolution of 64 channels and a 3x3 maximum,
each with stride 2, and four stages of 64, 128, 256 and 512 channels, of two blocks
each, or of 3, 4, 6 and 3. All end with the mean over the map and one Dense layer. A
block is

    after:    x_next = act(shortcut + norm(conv2(act(norm(conv1(x))))))
    before:   x_next = act(shortcut + conv2(norm(act(conv1(norm(x))))))

by the place of the norm. The shortcut is x itself or, where the shape changes, a 1x1
convolution of conv1's input, normalised after it like the others. Nothing normalises
the image.

Reference: https://arxiv.org/abs/1512.03385
"""

from keras import Model, layers

from recipes.models.head import conv2d, dense_head

LARGE = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}  # blocks of each stage


def resnet(depth, input_shape, num_classes, norm, activation, activate_sum=True):
    """Builds the network, from `(batch, *input_shape)` to logits.

    Args:
        depth: Integer 6n + 2: 8, 14, 20, 32, 44, 56, 110; or 18 or 34.
        input_shape, num_classes, activation: See `recipes.models.build`.
        norm: A `recipes.models.norms.Norm`.
        activate_sum: Whether a block ends with the activation of the sum, as above. If
            not, x_next = shortcut + act(branch), as in Eq. 7 of the CBN paper.
    """
    if depth not in LARGE and (depth < 8 or depth % 6 != 2):
        raise ValueError(
            "Argument `depth` must be 6n + 2 with n >= 1, or 18 or 34. "
            f"Received: depth={depth}"
        )

    def conv(x, filters, size, stride, name):
        layer = conv2d(filters, size, stride, use_bias=norm.use_bias, name=name)
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
    blocks = LARGE.get(depth, ((depth - 2) // 6,) * 3)
    filters, size, stride = (64, 7, 2) if depth in LARGE else (16, 3, 1)
    x = act(conv(inputs, filters, size, stride, "stem"), "stem")
    if depth in LARGE:
        x = layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    for stage, count in enumerate(blocks, start=1):
        for index in range(count):
            stride = 2 if stage > 1 and index == 0 else 1
            x = block(x, filters, stride, f"stage{stage}_block{index}")
        filters *= 2
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = dense_head(norm.before(x, "logits"), (), num_classes, activation)
    return Model(inputs, x, name=f"resnet{depth}")
