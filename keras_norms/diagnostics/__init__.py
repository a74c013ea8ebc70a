"""A model and a batch in, numbers out; nothing of the model changes."""

from keras_norms.diagnostics.gradient_noise import GradientNoise, gradient_noise
from keras_norms.diagnostics.gradients import (
    LossAndGradient,
    Objective,
    hessian_vector_product,
    value_and_grad,
)

__all__ = [
    "GradientNoise",
    "LossAndGradient",
    "Objective",
    "gradient_noise",
    "hessian_vector_product",
    "value_and_grad",
]
