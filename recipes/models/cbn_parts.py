"""The two halves of CBN, each alone: mean removal and the l2 norm.

They have the arguments of `CBN` except `axis`: channels are last.
"""

import keras
from keras import ops

from keras_norms import CBN


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class MeanRemoval(CBN):
    """Eq. 4 of the CBN paper alone: `y = x - mu_A + beta`, with mu_A as in CBN."""

    def __init__(self, scale=False, **kwargs):
        super().__init__(scale=scale, **kwargs)

    def call(self, inputs, training=None):
        scale, shift = self.scale_and_shift(inputs, training)
        return inputs + ops.cast(shift / scale, inputs.dtype)


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class L2Norm(CBN):
    """Eq. 5 alone: `y = (gamma / rho) * x / sqrt(sq_A + epsilon)`, sq_A that of x."""

    def __init__(self, center=False, **kwargs):
        super().__init__(center=center, **kwargs)

    def call(self, inputs, training=None):
        # x and -x together have mean 0 and the mean square of x.
        mirrored = ops.concatenate([inputs, -inputs])
        scale, _ = self.scale_and_shift(mirrored, training)
        return inputs * ops.cast(scale, inputs.dtype)
