"""Which terms of a loss a normalisation does not pass to what is before it."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import (
    check_batch,
    check_compiled_or_loss,
    check_layers,
    check_model,
)
from keras_norms.diagnostics.model_loss import find_layer, names_of
from keras_norms.diagnostics.slopes import Slopes
from keras_norms.layers.channel_normalization import ChannelNormalization
from keras_norms.layers.fused_cbn import FusedCBN
from keras_norms.layers.kernel_normalization import KernelNormalization

TERMS = ("first", "diagonal", "off_diagonal", "third")
NORMS = (
    ChannelNormalization,
    FusedCBN,
    KernelNormalization,
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
    keras.layers.SpectralNormalization,
    keras.layers.UnitNormalization,
)


class Blindness(NamedTuple):
    """What `blindness` returns, for each layer and batch. `print` shows a table.

    Attributes:
        layers: Tuple of names; of paths where several layers have that name.
        kinds: Tuple of the names of their classes.
        batches: Tuple of `"mixed"` and `"one label"`, or one of them.
        samples: Tuple, the number of samples of each batch.
        changes: Array of shape `(layers, batches, 4)`, the relative change of the
            gradient at the input by a term of each of `TERMS`.
        shares: Array of that shape: how much of a term arrives, relative to how much
            of the loss itself does, 0 for a term that is blocked.
        shared: Array of shape `(layers, batches)`, from 0 to 1: the part of the loss's
            gradient at the output that is the same for all samples.
    """

    layers: tuple
    kinds: tuple
    batches: tuple
    samples: tuple
    changes: np.ndarray
    shares: np.ndarray
    shared: np.ndarray

    def __str__(self):
        lines = [("layer", "kind", "batch", *TERMS, "shared")]
        for i, (layer, kind) in enumerate(zip(self.layers, self.kinds)):
            for j, (batch, samples) in enumerate(zip(self.batches, self.samples)):
                changes = [f"{change:.1e}" for change in self.changes[i, j]]
                shared = f"{self.shared[i, j]:.2f}"
                lines.append((layer, kind, f"{batch} ({samples})", *changes, shared))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
            for line in lines
        )


def blindness(
    model,
    x,
    y,
    loss=None,
    *,
    layers=None,
    source=None,
    labels=None,
    deviation=0.1,
    axis=-1,
    seed=0,
    training=True,
):
    """How much of a term of the loss in a layer's output arrives at its input.

    To the mean loss of a batch, one of these terms is added, with `y_i` the layer's
    output for sample `i` and `c_i = y_i - mean(y)`; for the gradient, `mean(y)` is a
    constant:

    ```
    first          mean_i  sum_d e_d y_id                e_d, E_de ~ N(0, deviation^2)
    diagonal       mean_i  sum_d e_d c_id^2
    off_diagonal   mean_i  sum_de E_de c_id c_ie         E_dd = 0
    third          mean_i  sum_d e_d c_id^3
    ```

    and with `L` the loss, `L_k` the loss with the term and `X` the layer's input,

    ```
    change = |dL_k/dX - dL/dX| / |dL/dX|
    share  = (|dL_k/dX - dL/dX| / |dL_k/dY - dL/dY|) / (|dL/dX| / |dL/dY|)
    ```

    Batch normalization passes neither the first nor, up to its `epsilon`, the diagonal
    term: all samples have the same formula for them. The printed formulas of the paper
    compare the disturbed losses with each other, which cannot give the printed values.

    Sums go over the batch and over positions, so that a channel of a convolution is one
    feature. Features of `X` that do not vary in the batch are left out, unless none
    does: there batch normalization has a gradient of the size of `epsilon^(-1/2)`.

    Nothing of the model changes. It costs six gradients for each layer and batch.

    Example:

    >>> print(diagnostics.blindness(model, x, y))

    Args:
        model, x, y, loss, training: See `Objective`.
        layers: Layers of the model or their names; every normalisation of Keras and
            of this package if `None`.
        source: `None`, or a layer or its name: `X` is the input of this layer instead,
            and what is between it and the output counts as one.
        labels: Integers of shape `(samples,)`, the classes; `y` if `None` and if it
            is such an array. They give a second batch, the samples of the most
            frequent label.
        deviation: Positive float.
        axis: Integer, the axis of features of `X` and `Y`.
        seed: Integer, of the random numbers `e` and `E`.

    Returns:
        A `Blindness`. Where the loss has no gradient at all, numbers are not finite.

    Raises:
        ValueError: If the model has no normalisation and `layers` is `None`, if
            `labels` are not one integer for each sample, or `deviation` is not
            positive. See also `Objective`.

    Reference:

    - Zhou, Shen, Chen, Tang and Zhang, Batch Normalization Is Blind to the First and
      Second Derivatives of the Loss, 2022, Section 4, Table 2.
      https://arxiv.org/abs/2205.15146
    """
    arguments.number("deviation", deviation, above=0)
    arguments.integer("axis", axis)
    arguments.integer("seed", seed, at_least=0)
    arguments.boolean("training", training)
    check_compiled_or_loss(model, loss)
    check_batch(model, x, y)
    layers = _layers(model, layers)
    if source is not None:
        find_layer(model, source, "source")
    x, y = tree.map_structure(_numpy, (x, y))
    batches = _batches(x, y, labels)
    results = []
    for layer in layers:
        for chosen in batches.values():
            part_x, part_y = tree.map_structure(
                lambda a, chosen=chosen: None if a is None else a[chosen], (x, y)
            )
            slopes = Slopes(model, part_x, part_y, loss, layer, source, training)
            rng = np.random.default_rng(seed)
            results.append(_disturb(slopes, deviation, axis, rng))
    changes, shares, shared = zip(*results)
    shape = len(layers), len(batches)
    return Blindness(
        layers=tuple(names_of(layers)),
        kinds=tuple(type(layer).__name__ for layer in layers),
        batches=tuple(batches),
        samples=tuple(len(np.arange(_size(x))[c]) for c in batches.values()),
        changes=np.reshape(changes, (*shape, len(TERMS))),
        shares=np.reshape(shares, (*shape, len(TERMS))),
        shared=np.reshape(shared, shape),
    )


class SecondOrder(NamedTuple):
    """What `second_order` returns, an element for each feature `d` of the output.

    Features whose output does not vary in the batch have `nan`.

    Attributes:
        linear_at_input: Array, `|dL_linear_d/dX|` (Table 3).
        non_at_input: Array, `|dL_non_d/dX|`.
        linear: Array, `|dL_linear_d/dy_d| / |dL_d/dy_d|` (Table 4).
        non: Array, `|dL_non_d/dy_d| / |dL_d/dy_d|` (Table 4). The squares of both sum
            to 1.
        hessian: Array of shape `(features, features)`, the mean over samples of the
            Hessian of the loss in the mean output.
    """

    linear_at_input: np.ndarray
    non_at_input: np.ndarray
    linear: np.ndarray
    non: np.ndarray
    hessian: np.ndarray


def second_order(model, x, y, loss=None, *, layer, source=None, training=True):
    """The two parts of the off-diagonal second-order loss in a layer's output.

    With `C` of shape `(features, samples)` the outputs less their means `m`, `c_d` its
    row of feature `d`, and `H` the Hessian at `m` without its diagonal, averaged over
    samples:

    ```
    L_d     = L_linear_d + L_non_d
    L_linear_d = H_d C_linear c_d        C_linear = C c_d c_d^T / |c_d|^2
    L_non_d    = H_d C_non c_d           C_non = C - C_linear
    ```

    `C_linear` and `C_non` are constants of the derivative, as in the proof of Theorem
    3: `dL_linear_d/dy_d = (H_d C_linear)^T`. Batch normalization does not pass it.
    The paper has `y` without affine weights and `m = 0`; with deviations from `m`, the
    numbers are the same with affine weights.

    Nothing of the model changes. It costs a Hessian-vector product and two gradients
    for each feature.

    Args:
        model, x, y, loss, training: See `Objective`. The loss must be a mean over
            samples. No layer after `layer` may mix samples.
        layer: A layer of the model or its name, with an output of shape
            `(samples, features)`.
        source: See `blindness`.

    Returns:
        A `SecondOrder`.

    Raises:
        ValueError: If the output of the layer has another rank. See also `Objective`.

    Reference:

    - Zhou et al., 2022, Lemma 2, Theorem 3, Tables 3 and 4. See `blindness`.
    """
    check_model(model)
    layer = find_layer(model, layer)
    if source is not None:
        source = find_layer(model, source, "source")
    slopes = Slopes(model, x, y, loss, layer, source, training)
    outputs = slopes.outputs
    if outputs.ndim != 2:
        raise ValueError(
            "Argument `layer` must have an output of shape (samples, features). "
            f"Received: layer={layer!r} with an output of shape {outputs.shape}"
        )
    hessian = slopes.hessian_at(outputs.mean(0, dtype="float64"))
    off = hessian - np.diag(np.diag(hessian))
    c = outputs - outputs.mean(0, dtype="float64")
    numbers = np.full((4, len(hessian)), np.nan)
    for d in np.flatnonzero(np.ptp(outputs, 0)):
        whole = c @ off[d]
        linear = c[:, d] * (c[:, d] @ whole) / (c[:, d] @ c[:, d])
        parts = linear, whole - linear
        for i, part in enumerate(parts):
            disturbance = np.zeros_like(c)
            disturbance[:, d] = part
            numbers[i, d] = np.linalg.norm(slopes.at_input(disturbance, loss=0.0))
            with np.errstate(divide="ignore", invalid="ignore"):
                numbers[2 + i, d] = np.linalg.norm(part) / np.linalg.norm(whole)
    return SecondOrder(*numbers, hessian)


def _disturb(slopes, deviation, axis, rng):
    """The changes, shares, and the shared part of one layer and batch."""
    inputs, outputs = (
        np.moveaxis(a, axis, -1) for a in (slopes.inputs, slopes.outputs)
    )
    varies = np.ptp(inputs.reshape(-1, inputs.shape[-1]), 0) > 0
    varies = varies if varies.any() else ~varies

    def norm_at_input(gradient):
        return np.linalg.norm(np.moveaxis(gradient, axis, -1)[..., varies])

    plain, at_output = slopes.at_input(), slopes.at_output()
    at_input = norm_at_input(plain)
    changes, shares = [], []
    with np.errstate(divide="ignore", invalid="ignore"):
        for disturbance in _disturbances(outputs, deviation, rng):
            slope = np.moveaxis(disturbance, -1, axis)
            change = norm_at_input(slopes.at_input(slope) - plain) / at_input
            changes.append(change)
            ratio = np.linalg.norm(at_output) / np.linalg.norm(disturbance)
            shares.append(change * ratio)
        mean = np.moveaxis(at_output, axis, -1).reshape(-1, outputs.shape[-1]).mean(0)
        same = np.sqrt(outputs.size / outputs.shape[-1]) * np.linalg.norm(mean)
        return changes, shares, same / np.linalg.norm(at_output)


def _disturbances(outputs, deviation, rng):
    """The slopes of the four terms with respect to the outputs, features last."""
    features, samples = outputs.shape[-1], len(outputs)
    flat = outputs.reshape(-1, features).astype("float64")
    c = flat - flat.mean(0)
    e = rng.normal(0, deviation, features)
    off = rng.normal(0, deviation, (features, features))
    np.fill_diagonal(off, 0)
    slopes = (np.tile(e, (len(c), 1)), 2 * e * c, c @ (off + off.T), 3 * e * c**2)
    return [slope.reshape(outputs.shape) / samples for slope in slopes]


def _layers(model, layers):
    check_layers(layers)
    if layers is not None:
        return [find_layer(model, layer, "layers") for layer in layers]
    every = _keras.layers_of(model, include_self=False)
    found = [layer for layer in every if isinstance(layer, NORMS)]
    # A FusedCBN has a CBN of its own, that it does not call.
    inner = {id(layer.norm) for layer in found if isinstance(layer, FusedCBN)}
    found = [layer for layer in found if id(layer) not in inner]
    if not found:
        raise ValueError(
            "Argument `layers` must be given where a model has no normalisation. "
            f"Received: layers=None for model '{model.name}'"
        )
    return found


def _size(x):
    arrays = tree.flatten(x)
    return len(arrays[0]) if arrays else 0


def _batches(x, y, labels):
    """Name -> what to take of each array: everything, or the samples of one label."""
    given, labels = labels, y
    if given is not None:
        labels = arguments.array("labels", given)
        if not _are_labels(labels, _size(x)):
            raise arguments.wrong("labels", "an integer for each sample", given)
    everything = slice(None)
    if not _are_labels(labels, _size(x)) or not _size(x):
        return {"mixed": everything}
    labels = np.reshape(labels, -1)
    found, counts = np.unique(labels, return_counts=True)
    if len(found) == 1:
        return {"one label": everything}
    most = np.flatnonzero(labels == found[np.argmax(counts)])
    return {"mixed": everything, "one label": most}


def _are_labels(y, samples):
    if not isinstance(y, np.ndarray) or y.size != samples or len(y) != samples:
        return False
    return np.issubdtype(y.dtype, np.integer)


def _numpy(value):
    """Arrays, that can be indexed in the same way on every backend."""
    if value is None:
        return None
    return ops.convert_to_numpy(value) if ops.is_tensor(value) else np.asarray(value)
