"""Layers without statistics that replace a norm: DyT and Derf.

Channels are last. Each layer has a weight and a bias per channel, and one scale.
"""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class DynamicTanh(keras.layers.Layer):
    """DyT: `y = gamma * tanh(alpha * x) + beta`, of the shape of x.

    Reference: Zhu et al., Transformers without Normalization, 2025, Eq. 2 of
    https://arxiv.org/abs/2503.10622

    Args:
        alpha: Float, the initial value of alpha.
    """

    def __init__(self, alpha=0.5, **kwargs):
        super().__init__(**kwargs)
        self.initial_alpha = alpha

    def build(self, input_shape):
        channels = input_shape[-1:]
        alpha = keras.initializers.Constant(self.initial_alpha)
        self.alpha = self.add_weight((), alpha, name="alpha")
        self.gamma = self.add_weight(channels, "ones", name="gamma")
        self.beta = self.add_weight(channels, "zeros", name="beta")

    def call(self, inputs):
        return self.gamma * ops.tanh(self.alpha * inputs) + self.beta

    def get_config(self):
        return {**super().get_config(), "alpha": self.initial_alpha}


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class DynamicErf(DynamicTanh):
    """Derf: `y = gamma * erf(alpha * x + s) + beta`, where s is one number, at first 0.

    Reference: Chen et al., Stronger Normalization-Free Transformers, 2025, Eq. 10
    of https://arxiv.org/abs/2512.10938
    """

    def build(self, input_shape):
        super().build(input_shape)
        self.shift = self.add_weight((), "zeros", name="shift")

    def call(self, inputs):
        return self.gamma * ops.erf(self.alpha * inputs + self.shift) + self.beta
