"""ChannelAffine: a scale and a shift for each channel."""

import keras


@keras.saving.register_keras_serializable(package="keras_norms")
class ChannelAffine(keras.layers.EinsumDense):
    """A trainable scale and shift for each channel: `kernel * x + bias`.

    What `convert` leaves of a `BatchNormalization` that no other layer takes in: an
    `EinsumDense` whose kernel has the one letter of the channels, and which passes
    masks on, as normalisation layers do and `EinsumDense` does not.

    Args:
        *args, **kwargs: Those of `keras.layers.EinsumDense`.

    Example:

    >>> ChannelAffine("abc,c->abc", output_shape=(None, 64), bias_axes="c")
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.supports_masking = True
