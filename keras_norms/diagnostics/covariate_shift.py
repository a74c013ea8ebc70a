"""Internal covariate shift, as a change of gradients (Santurkar et al.)."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_norms import _keras
from keras_norms._checks.models import check_layers, check_model
from keras_norms.diagnostics._engine.layers import (
    find_layer,
    learning_rate_of,
    names_of,
)
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.types import Data, Layers, Loss
from keras_norms.layers.kernels import kernels_owned_by


class CovariateShift(NamedTuple):
    """What `covariate_shift` returns, an element for each layer.

    Attributes:
        layers: Names; paths where several layers have that name.
        distances: `|G - G'|_2`.
        cosines: Of the angle between `G` and `G'`; `nan` where one of them is zero.
        norms: `|G|_2`.
        not_finite: The names of the layers where `G` or `G'` is not finite, with `nan`
            for each.
    """

    layers: tuple[str, ...]
    distances: np.ndarray
    cosines: np.ndarray
    norms: np.ndarray
    not_finite: tuple[str, ...]


def covariate_shift(
    model: keras.Model,
    x: Data,
    y: Data,
    loss: Loss = None,
    *,
    layers: Layers | None = None,
    updated: Sequence[np.ndarray] | None = None,
    learning_rate: float | None = None,
    training: bool = True,
) -> CovariateShift:
    """Measure how a step of the layers before a layer changes its gradient.

    With `W_1 ... W_k` the weights of all layers at step `t`, on one batch:

    ```
    G_i  = grad_i L(W_1, ..., W_k)                                     all at step t
    G'_i = grad_i L(W_1', ..., W_{i-1}', W_i, ..., W_k)      ' after their step t + 1
    ```

    Without shift the distance of both is 0 and their cosine 1. The batch, moving
    statistics, dropout and noise are the same for both. Nothing of the model changes.

    The layers before layer `i` are those whose weights come before its own in
    `model.trainable_variables`: in a Functional or Sequential model the order of
    `model.layers`, in a subclassed one that in which it has made its layers.

    Args:
        model, x, y, loss, training: See `Objective`.
        layers: Layers of the model or their names; a layer may hold others, whose
            weights are taken together. `None`: every layer that owns a kernel.
        updated: Arrays, `model.trainable_variables` after step `t + 1`. `None`:
            after a step of gradient descent on this batch.
        learning_rate: Positive, of that step; the optimizer's if `None`.

    Returns:
        A `CovariateShift`. It costs one gradient, and one for each layer but the first.

    Reference:

    - Santurkar, Tsipras, Ilyas and Madry, How Does Batch Normalization Help
      Optimization?, NeurIPS 2018, Definition 2.1 (2.2 in the first version), Figure 3.
      https://arxiv.org/abs/1805.11604
    """
    check_model(model)
    places = weights_of_layers(model, layers)
    if updated is None or learning_rate is not None:
        rate = learning_rate_of(model, learning_rate)
    objective = Objective(model, x, y, loss, training=training)
    if updated is not None:
        updated = objective._flatten("updated", updated)
    _, gradient = objective.value_and_grad()
    if updated is None:
        updated = objective.start - rate * gradient
    return shift_of(objective, gradient, updated, places)


def shift_of(objective, gradient, updated, places):
    """Measure the shift where the weights of an `Objective` step to `updated`."""
    parts = []
    for place in places.values():
        before, after = place[0], gradient
        if before > 0:
            point = np.concatenate([updated[:before], objective.start[before:]])
            _, after = objective.value_and_grad(point)
        parts.append(_compare(gradient[place], after[place]))
    distances, cosines, norms = np.array(parts).T
    not_finite = tuple(n for n, bad in zip(places, np.isnan(distances)) if bad)
    return CovariateShift(tuple(places), distances, cosines, norms, not_finite)


def _compare(g, g_after):
    g, g_after = g.astype("float64"), g_after.astype("float64")
    norm, norm_after = np.linalg.norm(g), np.linalg.norm(g_after)
    if not np.isfinite(norm + norm_after):
        return np.nan, np.nan, norm
    product = norm * norm_after
    cosine = g @ g_after / product if product else np.nan
    return np.linalg.norm(g - g_after), cosine, norm


def weights_of_layers(model, layers=None):
    """Find the indices of layers, by name, in the vector of all trainable weights."""
    check_layers(layers)
    variables = model.trainable_variables
    sizes = [int(np.prod(v.shape)) for v in variables]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    places = dict(zip(map(id, variables), parts))
    if layers is None:
        layers = _keras.layers_of(model, include_self=False)
        found = [layer for layer in layers if kernels_owned_by(layer)]
    else:
        found = [find_layer(model, layer, "layers") for layer in layers]
    if not found:
        raise ValueError(
            "Argument `model` must have a layer with a trainable kernel. "
            f"Received: model '{model.name}'"
        )
    result = {}
    for name, layer in zip(names_of(found), found):
        if not layer.trainable_variables:
            raise ValueError(
                "Argument `layers` must name layers with trainable weights. "
                f"Received: layer '{layer.name}'"
            )
        own = [places[id(v)] for v in layer.trainable_variables]
        result[name] = np.sort(np.concatenate(own))
    return result
