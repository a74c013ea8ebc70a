"""How much of a gradient a BatchNormalization layer removes."""

from typing import NamedTuple

import keras
import numpy as np

from keras_norms._checks.models import check_model
from keras_norms._types import Data, LayerOrName, Loss
from keras_norms.diagnostics._engine.calls import record
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.reading import (
    affine,
    by_channel,
    find_layer,
    moments,
    visible,
)
from keras_norms.layers.frozen import is_frozen


class LipschitzTerms(NamedTuple):
    """What `lipschitz_terms` returns, arrays of shape `(channels,)`, float64.

    Attributes:
        gradient: `|g|^2`, the squared gradient of the loss without the layer.
        mean: `<1, g>^2 / m`, removed with the mean.
        correlation: `<g, y_hat>^2 / m`, removed with the scale.
        scale: `gamma^2 / sigma^2`, the factor of what is left.
        bound: `scale * (gradient - mean - correlation)`.
        measured: The squared norm of the gradient that passes the layer. According to
            the theorem it is `bound`.
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
    """Measure how much of the gradient a BatchNormalization layer takes away.

    For each channel, these are the terms of Theorem 4.1. With `m` the elements of a
    channel, `y_hat` the normalised input, and `g` the gradient of the loss with respect
    to the layer's output, the gradient with respect to its input has the squared norm

    ```
    gamma^2 / sigma^2 * (|g|^2 - <1, g>^2 / m - <g, y_hat>^2 / m)
    ```

    The model does not change. Two details make the equality exact:

    * The layer's `epsilon` is in `sigma`, so `|y_hat|^2 = m r` with `r < 1`, and the
      last term is `(2 - r) <g, y_hat>^2 / m`.
    * With a mask, `m` and the statistics are those of the visible elements. If hidden
      ones have a gradient too, the terms are `<1, g> (2 <1, g_v> - <1, g>) / m` and
      `<g, y_hat> (2 <g_v, y_hat> - r <g, y_hat>) / m`, with `g_v` the gradient of the
      visible elements alone.

    Args:
        model, x, y, loss: See `Objective`.
        layer: A `keras.layers.BatchNormalization` that is not frozen, or its name.

    Reference:

    - Santurkar et al., NeurIPS 2018, Theorem 4.1 and Eq. 9. See `landscape`.
    """
    check_model(model)
    found = find_layer(model, layer)
    is_norm = isinstance(found, keras.layers.BatchNormalization)
    if not is_norm or is_frozen(found) or getattr(found, "renorm", False):
        raise ValueError(
            "Argument `layer` must be a BatchNormalization that is not frozen, and not "
            "with `renorm`. "
            f"Received: layer={layer!r}, a {type(found).__name__} with "
            f"trainable={found.trainable}"
        )
    before = Objective(model, x, y, loss, layer=found, side="input")
    after = Objective(model, x, y, loss, layer=found, side="output")
    inputs = before.unflatten(before.start)
    measured, g = (
        by_channel(each.unflatten(each.value_and_grad()[1]), found.axis)
        for each in (before, after)
    )
    mask = record(model, [found], x, training=True)[0].mask
    shown = visible(inputs, found.axis, mask)
    average, variance = moments(inputs, found.axis, mask)
    sigma = np.sqrt(variance + found.epsilon)
    y_hat = (by_channel(inputs, found.axis) - average) / sigma
    gamma, _ = affine(found, len(average))

    def taken_away(terms, r):
        every, of_visible = np.sum(terms, 0), np.sum(terms, 0, where=shown)
        return every * (2 * of_visible - r * every) / np.sum(shown, 0)

    gradient = np.sum(g**2, 0)
    mean = taken_away(g, 1.0)
    correlation = taken_away(g * y_hat, variance / sigma**2)
    scale = gamma**2 / sigma**2
    bound = scale * (gradient - mean - correlation)
    squared = np.sum(measured**2, 0)
    return LipschitzTerms(gradient, mean, correlation, scale, bound, squared)
