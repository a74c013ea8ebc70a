"""ChannelAffine: a scale and a shift for each channel."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_norms")
class ChannelAffine(keras.layers.EinsumDense):
    """A trainable scale and shift for each channel: `kernel * x + bias`.

    `convert` puts it where no other layer can take the scale and shift of a
    `BatchNormalization`. It is an `EinsumDense` whose kernel has only the letter of the
    channels. Unlike `EinsumDense` it passes masks on, as normalisation layers do.

    Args:
        *args, **kwargs: Those of `keras.layers.EinsumDense`; `bias_axes` is the letter
            of the kernel.

    Example:

    >>> ChannelAffine("abc,c->abc", output_shape=(None, 64), bias_axes="c")
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.supports_masking = True

    def call(self, inputs, training=None):
        # Without `ops.add`: on TensorFlow it adds to the last axis where sizes agree.
        bias = ops.convert_to_tensor(self.bias)
        return inputs * ops.reshape(self.kernel, bias.shape) + bias

    def compute_output_shape(self, input_shape):
        return input_shape  # also where sizes differ from call to call
