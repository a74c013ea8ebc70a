"""prune: fewer channels, up to a given error or by a given share."""

import contextlib
import itertools
import math
from typing import NamedTuple

import keras
import numpy as np
from keras import tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._types import Tensor
from keras_norms.layers.fused_cbn import FusedCBN
from keras_norms.surgery._graph import affine, linear
from keras_norms.surgery._graph.arrays import to_float64
from keras_norms.surgery._graph.blocks import graph_of
from keras_norms.surgery._graph.fused_cbn import split_fused_cbn
from keras_norms.surgery._graph.graph import Graph
from keras_norms.surgery._graph.measure import check_end, inputs_of, wrong_data
from keras_norms.surgery._prune.channels import Channels
from keras_norms.surgery._prune.resize import resize, substitute
from keras_norms.surgery._prune.selection import Site, select


class Pruned(NamedTuple):
    """What `prune` returns.

    Attributes:
        model: The smaller model.
        removed: Dictionary from the name of each convolution or Dense layer that makes
            fewer channels to the numbers of the removed ones, a sorted integer vector.
            A layer of a nested model is called `model/layer`.
        channels: How many channels the convolutions (without depthwise ones) and Dense
            layers make, before and after: two integers. EinsumDense and layers in
            wrappers, such as WS, are not counted, here and in `macs`.
        parameters: How many weights there are, before and after.
        macs: Multiply-accumulates of convolutions and Dense layers for one sample,
            before and after; `None` if the model takes more than one size.
        error: Root mean square of the change of the outputs, relative to that of the
            outputs, over `data` and all outputs.
        largest: Largest change of an output, relative to the largest output.
    """

    model: keras.Model
    removed: dict[str, np.ndarray]
    channels: tuple[int, int]
    parameters: tuple[int, int]
    macs: tuple[int, int] | None
    error: float
    largest: float

    @property
    def share(self) -> float:
        """The removed share of all channels, from 0 to 1."""
        return 1 - self.channels[1] / self.channels[0]

    def __str__(self) -> str:
        lines = [
            f"{name}: {before:,} -> {after:,} ({after / before - 1:+.1%})"
            for name, (before, after) in (
                ("channels", self.channels),
                ("parameters", self.parameters),
                ("multiply-accumulates", self.macs or (0, 0)),
            )
            if before
        ]
        lines.append(
            f"outputs change by {self.error:.1e} (root mean square) and at most by "
            f"{self.largest:.1e} of the largest"
        )
        lines += [f"  {name}: {len(gone)} gone" for name, gone in self.removed.items()]
        return "\n".join(lines)


def prune(
    model: keras.Model,
    data: Tensor,
    *,
    gamma: float | None = 0.0,
    similarity: float | None = 1.0,
    steps: int | None = None,
    batch_size: int = 32,
    inline: bool = True,
    ratio: float | None = None,
    round_to: int = 1,
) -> Pruned:
    """Make a copy with fewer channels that computes the same, up to a given error.

    Channels are measured on `data`, at inference, where the next convolutions and Dense
    layers read them: after sums and activations.

    * **Constants**: a channel with a standard deviation of at most `gamma` is removed.
      Its mean times the kernels that read it goes into their biases, or if a norm
      follows, into the mean that the norm subtracts.
    * **Merging**: if x_c is about alpha x_d + offset, c is removed and d does its work:
      alpha times the kernel rows of c are added to those of d, and the offset goes into
      the biases. This needs a correlation of at least `similarity` in magnitude, or a
      rest with a standard deviation of at most `gamma`.

    The defaults, 0 and 1, remove only channels that are constant on `data`, such as
    dead ReLUs, and duplicates, up to rounding. On other data they may differ: give data
    like those that the network will see.

    With `ratio`, that share of all channels is removed, whatever the error. Those go
    first that matter least: where the error of the constant or the merging, weighted
    with the kernel rows that read it, is the smallest share of what the layer reads.

    With `padding="same"` a convolution reads zeros outside of the image, where a
    constant in its bias is wrong. This error counts as well: with `gamma=0`, only
    channels that are constantly 0 go there. Of several other constants one stays and
    does the work of all, which is exact at the border too.

    Channels go through norms with batch statistics, activations, depthwise
    convolutions, pooling, padding, cropping, upsampling, Flatten, Reshape and Permute.
    Sums, products and concatenations along another axis bind channels together: all of
    them are removed, or none. Inputs and outputs of the model stay, and so does what
    other layers read or make, such as grouped convolutions, softmax, norms of samples,
    recurrent layers, attention, EinsumDense, subclasses, and layers in wrappers (of
    these, `fold` removes WS, CWN and WN). Each layer keeps at least one channel.

    Blocks and subclassed models are entered as in `convert`.

    Args:
        model: A built Functional, Sequential or subclassed model, nested or with shared
            layers. It is not changed. A `FusedCBN` comes back as a CBN and its layers.
        data: Inputs to measure on, as in `recalibrate`: a few hundred to a few
            thousand. They are kept in memory.
        gamma: Float >= 0, the largest standard deviation that counts as none, or `None`
            for no constants. After BatchNormalization, whose gamma is the deviation,
            0.01 is little and 0.3 is much.
        similarity: Float from 0 (exclusive) to 1, the smallest magnitude of a
            correlation, or `None` for no merging.
        steps: Optional integer, how many batches of `data` to use. Needed for endless
            data.
        batch_size: Integer, for arrays.
        inline: Boolean, whether blocks are entered. If not, they keep their channels,
            and subclassed models are refused.
        ratio: Share of all channels to remove, from 0 to 1 (exclusive), counted as in
            `Pruned.channels`. Fewer are removed if that many cannot be, or do not fit
            `round_to`. `None`: what `gamma` and `similarity` allow. With a ratio, these
            are 0 and 1, or one of them `None` to do without it.
        round_to: Positive integer. A layer that loses channels keeps a multiple of it,
            such as 8 for hardware that computes in blocks: the most expensive ones
            stay.

    Returns:
        A `Pruned`: the new model, with the same name and layer names and compiled in
        the same way; which channels were removed; and the error on `data`. The moving
        statistics and all other weights are those of `model`. The error grows with each
        layer that loses channels that varied: then `recalibrate` the result on training
        data, or train it more.

    Raises:
        ValueError: If the model is not built, if it is subclassed and cannot be traced,
            if it has no channel to remove, if its outputs are not finite, or if an
            argument is out of its range.

    Example:

    >>> pruned = prune(model, images, gamma=0.05, similarity=0.98)
    >>> print(pruned)
    >>> recalibrate(pruned.model, images).save("smaller.keras")
    >>> half = prune(model, images, ratio=0.5, round_to=8).model  # needs training

    Reference: Sun, Cao, Liang, Huang, Chen and Li, New Interpretations of Normalization
    Methods in Deep Learning, AAAI 2020, Section 2.2, which leaves it as future work.
    https://arxiv.org/abs/2006.09104. Removing by gamma alone: Liu et al., Learning
    Efficient Convolutional Networks through Network Slimming, ICCV 2017.
    https://arxiv.org/abs/1708.06519
    """
    _check(gamma, similarity, steps, batch_size, ratio, round_to)
    graph = graph_of(model, "prune", inline, holding=linear.PLAIN)
    if any(unit.cls is FusedCBN for unit in graph.all_units()):
        split_fused_cbn(graph)
        model = graph.make()
        graph = Graph(model)
    channels = Channels(graph)
    sites = [
        Site(unit, labels, channels.roots(labels.ids))
        for unit, labels in channels.readers.items()
    ]
    roots = [channels.roots(made.ids) for made in channels.makers.values()]
    read = {int(r) for site in sites for group in site.groups for r in group.roots}
    made = {int(r) for each in roots for r in each}
    if all(map(channels.is_fixed, read & made)):
        raise ValueError(
            "Argument `model` must have a channel that could go: one that one layer "
            "with a kernel makes and another reads, with no layer between that mixes "
            f"channels. Received: model '{model.name}'"
        )
    batches = _collect(model, data, steps, batch_size)
    outputs = _measure(model, sites, batches)
    gone = select(sites, roots, channels.is_fixed, gamma, similarity, ratio, round_to)
    before = _macs_of(graph)
    for site in sites:
        substitute(site, gone)
    removed = resize(channels, list(gone))
    pruned = graph.make()
    after = _macs_of(Graph(pruned))
    # Not from `removed`: its names need not be unique.
    left = sum(np.sum(~np.isin(each, list(gone))) for each in roots)
    return Pruned(
        pruned,
        removed,
        (sum(map(len, roots)), int(left)),
        (model.count_params(), pruned.count_params()),
        None if before is None or after is None else (before, after),
        *_errors(pruned, batches, outputs),
    )


def _check(gamma, similarity, steps, batch_size, ratio, round_to):
    if gamma is not None:
        arguments.number("gamma", gamma, at_least=0)
    if similarity is not None:
        arguments.number("similarity", similarity, above=0, at_most=1)
    if gamma is None and similarity is None:
        raise ValueError(
            "Arguments `gamma` and `similarity` must not both be None. Received: "
            "gamma=None, similarity=None"
        )
    if steps is not None:
        arguments.integer("steps", steps, at_least=1)
    arguments.integer("batch_size", batch_size, at_least=1)
    arguments.integer("round_to", round_to, at_least=1)
    if ratio is None:
        return
    arguments.number("ratio", ratio, at_least=0, below=1)
    if gamma not in (0, None) or similarity not in (1, None):
        raise ValueError(
            "Argument `ratio` must be None if `gamma` or `similarity` is a tolerance. "
            f"Received: ratio={ratio} with gamma={gamma} and similarity={similarity}"
        )


# Measuring


def _collect(model, data, steps, batch_size):
    """The batches of `data`, inputs only."""
    x = inputs_of(model, data)
    check_end(x, steps)
    try:
        found = _keras.batches_of(x, batch_size)
    except ValueError as e:
        raise wrong_data(data) from e
    batches = list(itertools.islice(found, steps))
    if not batches:
        raise wrong_data(data)
    return batches


def _measure(model, sites, batches):
    """Record what layers read. Returns the outputs of the model, batch by batch."""
    with contextlib.ExitStack() as stack:
        for site in sites:
            stack.enter_context(site.recording())
        outputs = [_outputs(model, x) for x in batches]
    if not all(np.isfinite(y).all() for each in outputs for y in each):
        raise ValueError(
            "Argument `data` must give outputs that are finite. Received: data for "
            f"which model '{model.name}' computes NaN or infinity"
        )
    for site in sites:
        for group in site.groups:
            group.finish()
    return outputs


def _outputs(model, x):
    x = tree.map_structure(keras.ops.convert_to_tensor, x)
    return [to_float64(y) for y in tree.flatten(model(x, training=False))]


def _errors(model, batches, outputs):
    """The root mean square and the largest error, relative to the outputs."""
    changes, sizes, change, size = 0.0, 0.0, 0.0, 0.0
    for x, olds in zip(batches, outputs):
        for new, old in zip(_outputs(model, x), olds):
            changes += np.sum(np.square(new - old))
            sizes += np.sum(np.square(old))
            change = max(change, np.max(np.abs(new - old), initial=0))
            size = max(size, np.max(np.abs(old), initial=0))
    if size == 0:
        return float(np.sqrt(changes)), float(change)
    return float(np.sqrt(changes / sizes)), float(change / size)


def _macs_of(graph):
    """Multiply-accumulates for one sample, or `None` where sizes are not known."""
    macs = []
    for node in graph.nodes:
        unit = node.unit
        if unit.graph is not None:
            macs.append(_macs_of(unit.graph))
        elif issubclass(unit.cls, linear.PLAIN) and unit.cls not in linear.EINSUM:
            value = node.input if unit.cls in linear.TRANSPOSED else node.output
            positions = list(value.shape[1:])
            del positions[linear.channel_axis(unit, value.rank) - 1]
            kernels = [v for v in unit.layer.weights if v.name.endswith("kernel")]
            size = sum(int(np.prod(v.shape)) for v in kernels)
            macs.append(None if None in positions else math.prod(positions) * size)
    return None if None in macs else sum(macs)


def norms_of_one_maker(model: keras.Model) -> list[keras.layers.Layer]:
    """List the norms whose channels can go and are made by one layer alone.

    Not those after a sum, where two layers make each channel.
    """
    channels = Channels(Graph(model))
    makers = [channels.roots(labels.ids) for labels in channels.makers.values()]
    roots, counts = np.unique(np.concatenate(makers), return_counts=True)
    alone = roots[(counts == 1) & ~channels.is_fixed(roots)]
    return [
        unit.layer
        for unit, (labels, _) in channels.passers.items()
        if affine.is_norm(unit) and np.isin(channels.roots(labels.ids), alone).all()
    ]
