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
)
from keras_norms.diagnostics._engine.arrays import aligned
from keras_norms.diagnostics._engine.layers import find_layer, names_of
from keras_norms.diagnostics._engine.slopes import Slopes
from keras_norms.diagnostics._engine.types import Data, LayerOrName, Layers, Loss
from keras_norms.layers.channel_normalization import ChannelNormalization
from keras_norms.layers.fused_cbn import FusedCBN
from keras_norms.layers.kernel_normalization import KernelNormalization

TERMS = ("first", "diagonal", "off_diagonal", "third")
_OF_KERAS = "Batch", "Group", "Layer", "RMS", "Spectral", "Unit"
_NORM_CLASSES = (
    *(ChannelNormalization, FusedCBN, KernelNormalization),
    *(getattr(keras.layers, f"{name}Normalization") for name in _OF_KERAS),
)


class Blindness(NamedTuple):
    """What `blindness` returns, for each layer and batch. `print` shows a table.

    Attributes:
        layers: Names; paths where several layers have that name.
        kinds: The names of their classes.
        batches: `"mixed"` and `"one label"`, or one of them.
        samples: The number of samples of each batch.
        changes: Array of shape `(layers, batches, 4)`, the relative change of the
            gradient at the input by a term of each of `TERMS`.
        shares: Array of that shape: how much of a term arrives, relative to how much
            of the loss itself does, 0 for a term that is blocked.
        shared: Array of shape `(layers, batches)`, from 0 to 1: the part of the loss's
            gradient at the output that is the same for all samples.
    """

    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    batches: tuple[str, ...]
    samples: tuple[int, ...]
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
        return aligned(lines)


def blindness(
    model: keras.Model,
    x: Data,
    y: Data,
    loss: Loss = None,
    *,
    layers: Layers | None = None,
    source: LayerOrName | None = None,
    labels: Data = None,
    deviation: float = 0.1,
    axis: int = -1,
    seed: int = 0,
    training: bool = True,
) -> Blindness:
    """Measure how much of a term of the loss in a layer's output arrives at its input.

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
        deviation: Positive, of `e` and `E`.
        axis: The axis of features of `X` and `Y`.
        seed: Of the random numbers `e` and `E`.

    Returns:
        A `Blindness`. Where the loss has no gradient at all, numbers are not finite.

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
        samples=tuple(map(len, batches.values())),
        changes=np.reshape(changes, (*shape, -1)),
        shares=np.reshape(shares, (*shape, -1)),
        shared=np.reshape(shared, shape),
    )


def _disturb(slopes, deviation, axis, rng):
    """Measure the changes, shares, and the shared part of one layer and batch."""
    inputs = np.moveaxis(slopes.inputs, axis, -1)
    outputs = np.moveaxis(slopes.outputs, axis, -1)
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
    """Return the slopes of the four terms in the outputs, features last."""
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
    found = _keras.layers_of(model, kind=_NORM_CLASSES, include_self=False)
    # A FusedCBN has a CBN of its own, that it does not call.
    inner = {id(layer.norm) for layer in found if isinstance(layer, FusedCBN)}
    found = [layer for layer in found if id(layer) not in inner]
    if not found:
        raise ValueError(
            "Argument `layers` must be given where a model has no normalisation. "
            f"Received: layers=None for model '{model.name}'"
        )
    return found


def _batches(x, y, labels):
    """Return the samples of each batch by its name: all, and those of one label."""
    everything = np.arange(len(tree.flatten(x)[0]))
    if labels is not None:
        y = arguments.array("labels", labels)
        if not _are_labels(y, everything.size):
            raise arguments.wrong("labels", "an integer for each sample", labels)
    if not _are_labels(y, everything.size):
        return {"mixed": everything}
    found, counts = np.unique(y, return_counts=True)
    if len(found) == 1:
        return {"one label": everything}
    most = np.flatnonzero(y == found[np.argmax(counts)])
    return {"mixed": everything, "one label": most}


def _are_labels(y, samples):
    is_integer = isinstance(y, np.ndarray) and np.issubdtype(y.dtype, np.integer)
    return is_integer and y.shape[:1] == (samples,) and y.size == samples


def _numpy(value):
    """Make arrays, which can be indexed in the same way on every backend."""
    if value is None:
        return None
    return ops.convert_to_numpy(value) if ops.is_tensor(value) else np.asarray(value)
