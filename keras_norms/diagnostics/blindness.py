"""Which terms of a loss a normalisation does not pass to the layers before it."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_norms._checks import arguments
from keras_norms._checks.models import check_batch, check_layers, check_model
from keras_norms._types import Data, LayerOrName, Layers, Loss
from keras_norms.diagnostics._engine.reading import (
    aligned,
    by_channel,
    find_layer,
    names_of,
    norms_in,
    visible,
)
from keras_norms.diagnostics._engine.slopes import Slopes
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
        changes: Array of shape `(layers, batches, 4)`, `change` by each of `TERMS`.
        shares: Array of that shape, `share`: 0 for a term that is blocked.
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

    def __str__(self) -> str:
        lines: list[tuple[str, ...]]
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
    """Measure which terms of a loss a normalisation blocks.

    Batch normalization does not pass what all samples of a batch have in common. To see
    it, one of four terms, the same formula for every sample, is added to the loss at
    the layer's output. `share` says how much of it arrives at the layer's input: 0 if
    the layer is blind to it, 1 if it arrives as the loss itself does. `change`, which
    `print` shows, is its size beside the gradient of the loss.

    Example:

    >>> print(blindness(model, x, y))

    With `y_i` the layer's output for sample `i` and `c_i = y_i - mean(y)`, where the
    gradient treats `mean(y)` as a constant, the terms are

    ```
    first          mean_i  sum_d e_d y_id                e_d, E_de ~ N(0, deviation^2)
    diagonal       mean_i  sum_d e_d c_id^2
    off_diagonal   mean_i  sum_de E_de c_id c_ie         E_dd = 0
    third          mean_i  sum_d e_d c_id^3
    ```

    and with `L` the loss, `L_k` the loss with the term, and `X` and `Y` the layer's
    input and output,

    ```
    change = |dL_k/dX - dL/dX| / |dL/dX|
    share  = (|dL_k/dX - dL/dX| / |dL_k/dY - dL/dY|) / (|dL/dX| / |dL/dY|)
    ```

    Batch normalization passes neither the first nor, up to its `epsilon`, the diagonal
    term. Sums go over the batch and over positions, without what a mask hides: a
    channel of a convolution is one feature. Features of `X` that do not vary in the
    batch are left out, because batch normalization has a gradient of the size of
    `epsilon^(-1/2)` there. If none varies, all are kept.

    Nothing of the model changes. It costs six gradients for each layer and batch,
    seven with `source`. (The formulas that the paper prints compare the disturbed
    losses with each other, which cannot give the printed values.)

    Args:
        model, x, y, loss, training: See `Objective`.
        layers: Layers of the model or their names. `None`: every normalisation of Keras
            and of this package.
        source: `None`, or an earlier layer or its name: `X` is then the input of that
            layer, and all layers from there to the output count as one.
        labels: Integers of shape `(samples,)`, the classes. `None`: `y`, if it is such
            an array. They give a second batch, the samples of the most frequent label.
        deviation: Positive, the standard deviation of `e` and `E`.
        axis: The axis of features of `X` and `Y`.
        seed: Of the random numbers `e` and `E`.

    Returns:
        A `Blindness`. If the loss has no gradient at all, numbers are not finite.

    Reference:

    - Zhou, Shen, Chen, Tang and Zhang, Batch Normalization Is Blind to the First and
      Second Derivatives of the Loss, 2022, Section 4, Table 2.
      https://arxiv.org/abs/2205.15146
    """
    arguments.number("deviation", deviation, above=0)
    arguments.integer("axis", axis)
    arguments.integer("seed", seed, at_least=0)
    check_model(model)
    check_batch(model, x, y)
    layers = _layers(model, layers)
    x, y = _take((x, y), slice(None))
    batches = _batches(x, y, labels)
    results = []
    for layer in layers:
        for chosen in batches.values():
            part_x, part_y = _take((x, y), chosen)
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
    ndim = min(slopes.inputs.ndim, slopes.outputs.ndim)
    arguments.integer("axis", axis, at_least=-ndim, at_most=ndim - 1)
    varies = np.ptp(by_channel(slopes.inputs, axis), 0) > 0
    varies = varies if varies.any() else ~varies

    def norm_at_input(gradient):
        return np.linalg.norm(by_channel(gradient, axis)[:, varies])

    outputs = by_channel(slopes.outputs, axis)
    shown = visible(slopes.outputs, axis, slopes.mask)
    shape = np.moveaxis(slopes.outputs, axis, -1).shape
    plain, at_output = slopes.at_input(), by_channel(slopes.at_output(), axis)
    at_input, length = norm_at_input(plain), np.linalg.norm(at_output)
    changes, shares = [], []
    with np.errstate(divide="ignore", invalid="ignore"):
        for term in _slopes_of_terms(outputs, shown, deviation, rng):
            disturbance = term.reshape(shape) / shape[0]
            slope = np.moveaxis(disturbance, -1, axis)
            change = norm_at_input(slopes.at_input(slope) - plain) / at_input
            changes.append(change)
            shares.append(change * (length / np.linalg.norm(disturbance)))
        same = np.sum(at_output, 0, where=shown) / np.sqrt(np.sum(shown, 0))
        return changes, shares, np.linalg.norm(same) / length


def _slopes_of_terms(outputs, shown, deviation, rng):
    """Compute the slopes of the four terms in the outputs, of the sum over samples."""
    features = outputs.shape[-1]
    c = np.where(shown, outputs - outputs.mean(0, where=shown), 0)
    e = rng.normal(0, deviation, features)
    off = rng.normal(0, deviation, (features, features))
    np.fill_diagonal(off, 0)
    return shown * e, 2 * e * c, shown * (c @ (off + off.T)), 3 * e * c**2


def _layers(model, layers):
    check_layers(layers)
    if layers is not None:
        return list(dict.fromkeys(find_layer(model, one, "layers") for one in layers))
    found = norms_in(model, _NORM_CLASSES)
    if not found:
        raise arguments.wrong("layers", "given if a model has no normalisation", None)
    return found


def _batches(x, y, labels):
    """Return the samples of each batch by its name: all, and those of one label."""
    everything = np.arange(len(tree.flatten(x)[0]))
    y = y if labels is None else arguments.array("labels", labels)
    are_labels = isinstance(y, np.ndarray) and np.issubdtype(y.dtype, np.integer)
    if not are_labels or y.shape[:1] != everything.shape or y.size != everything.size:
        if labels is not None:
            raise arguments.wrong("labels", "an integer for each sample", labels)
        return {"mixed": everything}
    found, counts = np.unique(y, return_counts=True)
    if len(found) == 1:
        return {"one label": everything}
    most = np.flatnonzero(y == found[np.argmax(counts)])
    return {"mixed": everything, "one label": most}


def _take(batch, chosen):
    """Take samples of a batch, as arrays, which all index in one way."""
    return tree.map_structure(
        lambda a: None if a is None else ops.convert_to_numpy(a)[chosen], batch
    )
