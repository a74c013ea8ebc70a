"""Gradient descent as the papers ran it."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class SGD(keras.optimizers.SGD):
    """Gradient descent with momentum and coupled weight decay, as in PyTorch.

        g = gradient + weight_decay * w
        v = momentum * v - learning_rate * g
        w = w + v

    The `weight_decay` of `keras.optimizers.SGD` is decoupled: it stays out of the
    momentum, and at momentum 0.9 shrinks the weights ten times less. Here every
    trainable weight decays, biases and the affine weights of norms too, and the loss
    that training reports is free of the penalty.

    Args:
        learning_rate: Float or `keras.optimizers.schedules.LearningRateSchedule`.
        momentum: Float in [0, 1].
        weight_decay: Float >= 0.
    """

    def __init__(self, learning_rate=0.1, momentum=0.9, weight_decay=5e-4, **kwargs):
        super().__init__(learning_rate, momentum, **kwargs)
        # Not `self.weight_decay`, which would switch on the decoupled decay as well.
        self.coupled_weight_decay = weight_decay

    def update_step(self, gradient, variable, learning_rate):
        decay = ops.cast(self.coupled_weight_decay, variable.dtype)
        gradient = ops.add(
            ops.cast(gradient, variable.dtype), ops.multiply(decay, variable)
        )
        super().update_step(gradient, variable, learning_rate)

    def get_config(self):
        return {**super().get_config(), "weight_decay": self.coupled_weight_decay}


def piecewise_schedule(learning_rate, total_steps):
    """The rate, a tenth of it from 1/2 of all steps on, a hundredth from 5/6 on.

    These are epochs 60 and 100 of the papers' 120.

    Args:
        learning_rate: Float, the rate of the first step.
        total_steps: Integer, the number of steps of the whole training.

    Returns:
        A `keras.optimizers.schedules.LearningRateSchedule`.
    """
    # Keras holds a value up to and including its boundary.
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        boundaries=[total_steps // 2 - 1, total_steps * 5 // 6 - 1],
        values=[learning_rate, learning_rate / 10, learning_rate / 100],
    )
