"""How much of a gradient a BatchNormalization layer takes away."""

from typing import NamedTuple

import keras
import numpy as np

from keras_norms._checks.models import check_model
from keras_norms._types import Data, LayerOrName, Loss
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.reading import affine, by_channel, find_layer


class LipschitzTerms(NamedTuple):
    """What `lipschitz_terms` returns, arrays of shape `(channels,)`, float64.

    Attributes:
        gradient: `|g|^2`, what the loss's gradient would be without the layer.
        mean: `<1, g>^2 / m`, taken away because the mean is.
        correlation: `<g, y_hat>^2 / m`, taken away because the scale is.
        scale: `gamma^2 / sigma^2`, what is left is multiplied by.
        bound: `scale * (gradient - mean - correlation)`.
        measured: The squared norm of the gradient that passes the layer, which the
            theorem says is `bound`.
    """

    gradient: np.ndarray
    mean: np.ndarray
    correlation: np.ndarray
    scale: np.ndarray
    bound: np.ndarray
    measured: np.ndarray


def lipschitz_terms(
    model: keras.Model, layer: LayerOrName, x: Data, y: Data, loss: Loss = None
) -> LipschitzTerms:
    """Measure the terms of Theorem 4.1 for each channel of a BatchNormalization layer.

    With `m` the elements of a channel, `y_hat` the normalised input, and `g` the
    gradient of the loss with respect to the layer's output, the gradient with respect
    to its input has the squared norm

    ```
    gamma^2 / sigma^2 * (|g|^2 - <1, g>^2 / m - <g, y_hat>^2 / m)
    ```

    The layer's `epsilon` is in `sigma`, and then `|y_hat|^2 = m r` with `r < 1`. The
    last term is `(2 - r) <g, y_hat>^2 / m` here, with which the equality stays exact.
    Nothing of the model changes.

    Args:
        model, x, y, loss: See `Objective`.
        layer: A `keras.layers.BatchNormalization` that is not frozen, or its name.

    Reference:

    - Santurkar et al., NeurIPS 2018, Theorem 4.1 and Eq. 9. See `landscape`.
    """
    check_model(model)
    found = find_layer(model, layer)
    if not isinstance(found, keras.layers.BatchNormalization) or not found.trainable:
        raise ValueError(
            "Argument `layer` must be a BatchNormalization that is not frozen. "
            f"Received: layer={layer!r}, a {type(found).__name__} with "
            f"trainable={found.trainable}"
        )
    before = Objective(model, x, y, loss, layer=found, side="input")
    after = Objective(model, x, y, loss, layer=found, side="output")
    inputs, measured, g = (
        by_channel(objective.unflatten(vector), found.axis)
        for objective, vector in (
            (before, before.start),
            (before, before.value_and_grad()[1]),
            (after, after.value_and_grad()[1]),
        )
    )
    m, channels = inputs.shape
    variance = np.var(inputs, 0)
    sigma = np.sqrt(variance + found.epsilon)
    y_hat = (inputs - np.mean(inputs, 0)) / sigma
    gamma, _ = affine(found, channels)
    gradient = np.sum(g**2, 0)
    mean = np.sum(g, 0) ** 2 / m
    correlation = (2 - variance / sigma**2) * np.sum(g * y_hat, 0) ** 2 / m
    scale = gamma**2 / sigma**2
    bound = scale * (gradient - mean - correlation)
    squared = np.sum(measured**2, 0)
    return LipschitzTerms(gradient, mean, correlation, scale, bound, squared)
