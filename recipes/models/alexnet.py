"""AlexNet (Krizhevsky et al., 2012), as revised by Zhou et al.

Five convolutions of 96, 256, 384, 384 and 256 channels, a 3x3 maximum with stride 2
after the first, the second and the last, Dense layers of 4096 and 4096 and, added
before the logits, five of 20. No dropout, as in the revision, and no local response
normalisation. The first kernel is 11x11 with stride 4; images with sides under 64
pixels, for which that is too large, get one of 3x3.

Reference: https://arxiv.org/abs/2205.15146, Appendix I.1.
"""

from keras import Model, layers

from recipes.models.head import conv2d, dense_head

CONVOLUTIONS = ((96, 11, True), (256, 5, True), (384, 3, False), (384, 3, False))
CONVOLUTIONS += ((256, 3, True),)  # filters, kernel size, whether a maximum follows


def alexnet(input_shape, num_classes, norm=None, place=1, width=1.0):
    """Builds the network, from `(batch, *input_shape)` to logits.

    Args:
        input_shape, num_classes: See `recipes.models.build`.
        norm, place: See `dense_head`. Places 1, 2 and 3 are AlexNet-1, AlexNet-2 and
            AlexNet-3 of the paper.
        width: Factor for all channels and sizes but those of the added layers.
    """
    x = inputs = layers.Input(input_shape, name="image")
    for index, (filters, size, pool) in enumerate(CONVOLUTIONS, start=1):
        name, stride = f"conv{index}", 1
        if index == 1:
            size, stride = (11, 4) if min(input_shape[:2]) >= 64 else (3, 1)
        x = conv2d(max(1, round(width * filters)), size, stride, name=name)(x)
        x = layers.Activation("relu", name=f"{name}_activation")(x)
        if pool:
            x = layers.MaxPooling2D(3, 2, padding="same", name=f"{name}_pool")(x)
    x = layers.Flatten(name="flat")(x)
    hidden = max(1, round(width * 4096))
    x = dense_head(x, (hidden, hidden, *[20] * 5), num_classes, "relu", norm, place)
    return Model(inputs, x, name="alexnet")
