"""The 25-layer deep linear network and its regression (Santurkar et al., A.1).

The network maps x to W_k ... W_1 x and should match A x, where x and A are Gaussian.
All matrices are square. The loss is |W_k ... W_1 x - A x|^2, summed over the data set:
with the mean instead, the paper's learning rate of 1e-6 would move nothing. A norm
stands after each layer but the last, which leaves outputs free to have any size.

Reference: https://arxiv.org/abs/1805.11604, Appendix A.1, item 2.
"""

import keras
import numpy as np
from keras import Model, layers, ops

DIMENSION, DEPTH, SAMPLES = 10, 25, 1000


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class SumOfSquares(keras.losses.Loss):
    """The squared distance between target and prediction, summed over the batch."""

    def __init__(self, reduction="sum", name="sum_of_squares", dtype=None):
        super().__init__(name=name, reduction=reduction, dtype=dtype)

    def call(self, y_true, y_pred):
        return ops.sum(ops.square(y_pred - ops.cast(y_true, y_pred.dtype)), axis=-1)


def dln(norm, dimension=DIMENSION, depth=DEPTH):
    """Builds the network, with Glorot's normal initialisation and no biases.

    Args:
        norm: A `recipes.models.norms.Norm` that stands after linear layers, or nowhere.
        dimension: Size of input, output and everything between.
        depth: Number of linear layers, named `layer1` to `layer<depth>`.
    """
    if norm.placement == "before" or norm.wrapper is not None:
        raise ValueError(
            "Argument `norm` must stand after linear layers. "
            f"Received: norm with placement={norm.placement!r}, wrapper={norm.wrapper}"
        )
    x = inputs = layers.Input((dimension,), name="x")
    for i in range(1, depth + 1):
        options = {"use_bias": False, "kernel_initializer": "glorot_normal"}
        x = layers.Dense(dimension, **options, name=f"layer{i}")(x)
        if i < depth:
            x = norm.after(x, f"layer{i}")
    return Model(inputs, x, name="dln")


def regression(seed, dimension=DIMENSION, samples=SAMPLES):
    """Standard Gaussian inputs and their images under a Gaussian matrix.

    Returns:
        x and y, float32 arrays of shape `(samples, dimension)`.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, dimension))
    matrix = rng.normal(size=(dimension, dimension))
    return x.astype("float32"), (x @ matrix.T).astype("float32")
