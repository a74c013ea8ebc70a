"""What networks share: their convolution, and Dense layers with one norm among them."""

from functools import partial

from keras import layers

conv2d = partial(layers.Conv2D, padding="same", kernel_initializer="he_normal")


def dense_head(x, widths, num_classes, activation, norm=None, place=1):
    """Adds hidden Dense layers, each with its activation, and the logits.

    Args:
        x: Tensor `(batch, features)`.
        widths: Sizes of the hidden layers, first one first.
        num_classes, activation: See `recipes.models.build`.
        norm: `None`, or a layer, not yet called, to put before a Dense layer.
        place: Positive integer, which Dense layer: 1 for the logits, 2 the next below.
    """
    if not 1 <= place <= len(widths) + 1:
        raise ValueError(
            f"Argument `place` must be between 1 and {len(widths) + 1}, the number of "
            f"Dense layers. Received: place={place}"
        )
    for index, width in enumerate((*widths, num_classes), start=1):
        from_top = len(widths) + 2 - index
        if norm is not None and from_top == place:
            x = norm(x)
        name = "logits" if from_top == 1 else f"dense{index}"
        x = layers.Dense(width, kernel_initializer="he_normal", name=name)(x)
        if from_top > 1:
            x = layers.Activation(activation, name=f"{name}_activation")(x)
    return x
