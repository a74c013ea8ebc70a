"""Internal covariate shift, as a change of gradients (Santurkar et al.)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_layers, check_loss, check_model
from keras_norms._types import BatchOrFunction, Data, Directory, Layers, Loss, Tensor
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.reading import (
    find_layer,
    learning_rate_of,
    names_of,
)
from keras_norms.diagnostics.probe import Probe, batch_by_step
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
    updated: Sequence[Tensor] | None = None,
    learning_rate: float | None = None,
    training: bool = True,
) -> CovariateShift:
    """Measure how a step of the layers before a layer changes its gradient.

    With `W_1 ... W_k` the weights of all layers at step `t`, on one batch:

    ```
    G_i  = grad_i L(W_1, ..., W_k)                                     all at step t
    G'_i = grad_i L(W_1', ..., W_{i-1}', W_i, ..., W_k)      ' after their step t + 1
    ```

    Without shift their distance is 0 and their cosine 1. The batch, moving statistics,
    dropout and noise are the same for both. The model does not change.

    The layers before layer `i` are those whose weights come before its own in
    `model.trainable_variables`. In a Functional or Sequential model this is the order
    of `model.layers`, in a subclassed one the order in which it created its layers.

    Args:
        model, x, y, loss, training: See `Objective`.
        layers: Layers of the model or their names. If a layer holds others, all their
            weights count as one. `None`: every layer that owns a kernel.
        updated: Arrays, `model.trainable_variables` after step `t + 1`. `None`:
            after a step of gradient descent on this batch.
        learning_rate: Positive, of that step. `None`: the optimizer's.

    Returns:
        A `CovariateShift`. It costs one gradient, and one for each layer but the first.

    Reference:

    - Santurkar et al., NeurIPS 2018, Definition 2.1 (2.2 in the first version), Figure
      3. See `landscape`.
    """
    check_model(model)
    found = _layers(model, layers)
    objective = Objective(model, x, y, loss, training=training)
    rate = None
    if updated is not None:
        updated = objective._flatten("updated", updated)
    if updated is None or learning_rate is not None:
        rate = learning_rate_of(model, learning_rate)
    return _shift_of(model, objective, found, updated, rate)


def _shift_of(model, objective, layers, updated, rate=None):
    """Measure the shift of a step to `updated` weights, or of gradient descent."""
    _, gradient = objective.value_and_grad()
    updated = objective.start - rate * gradient if updated is None else updated
    places = objective.unflatten(np.arange(objective.start.size))
    place_of = dict(zip(map(id, model.trainable_variables), places))
    parts = []
    layers = list(dict.fromkeys(layers))  # each once
    layers = dict(zip(names_of(layers), layers))
    for layer in layers.values():
        place = [place_of[id(v)].ravel() for v in layer.trainable_variables]
        place, after = np.sort(np.concatenate(place)), gradient
        if place[0] > 0:
            point = [updated[: place[0]], objective.start[place[0] :]]
            _, after = objective.value_and_grad(np.concatenate(point))
        parts.append(_compare(gradient[place], after[place]))
    distances, cosines, norms = np.array(parts).T
    not_finite = tuple(n for n, bad in zip(layers, np.isnan(distances)) if bad)
    return CovariateShift(tuple(layers), distances, cosines, norms, not_finite)


def _compare(g, g_after):
    g, g_after = g.astype("float64"), g_after.astype("float64")
    norm, norm_after = np.linalg.norm(g), np.linalg.norm(g_after)
    if not np.isfinite(norm + norm_after):
        return np.nan, np.nan, norm
    product = norm * norm_after
    cosine = g @ g_after / product if product else np.nan
    return np.linalg.norm(g - g_after), cosine, norm


def _layers(model, layers):
    """Find layers by name, or those that own kernels."""
    check_layers(layers)
    if layers is None:
        every = _keras.layers_of(model, include_self=False)
        found = [layer for layer in every if kernels_owned_by(layer)]
    else:
        found = [find_layer(model, layer, "layers") for layer in layers]
    if not found:
        raise ValueError(
            "Argument `model` must have a layer with a trainable kernel. "
            f"Received: model '{model.name}'"
        )
    without = [layer.name for layer in found if not layer.trainable_variables]
    if without:
        raise arguments.wrong("layers", "layers with trainable weights", without)
    return found


class CovariateShiftProbe(Probe):
    """Measures `covariate_shift` in training, for the steps that the optimizer takes.

    Its numbers are `<layer>_distance` and `<layer>_cosine` of each layer. A step is one
    execution: with `steps_per_execution=N`, of N batches.

    Args:
        batch: A batch `(x, y)`, or a function of the step that returns one: Definition
            2.1 takes the batch of the step itself.
        layers: See `covariate_shift`.
        every, log_dir: See `Probe`.
        loss: See `covariate_shift`.
    """

    prefix = "shift"

    def __init__(
        self,
        batch: BatchOrFunction,
        layers: Layers | None = None,
        every: int = 200,
        log_dir: Directory | None = None,
        loss: Loss = None,
    ) -> None:
        super().__init__(every, log_dir)
        check_layers(layers)
        check_loss(loss)
        self._batch = batch_by_step(batch)
        self._layers = layers
        self._loss = loss
        self._objective: Any = None

    def before_step(self) -> None:
        x, y = self._batch(self._step)
        self._objective = Objective(self.model, x, y, self._loss)

    def after_step(self) -> None:
        model, objective = self.model, self._objective
        self._objective = None
        updated = [ops.convert_to_numpy(v) for v in model.trainable_variables]
        layers = _layers(model, self._layers)
        found = _shift_of(model, objective, layers, objective.flatten(updated))
        numbers = {}
        for name, distance, cosine in zip(found.layers, found.distances, found.cosines):
            numbers[f"{name}_distance"] = distance
            numbers[f"{name}_cosine"] = cosine
        self.record(numbers)
