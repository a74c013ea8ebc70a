"""prune: fewer channels, up to an error that is stated, or as many as are asked."""

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
        removed: Dictionary from the name of each convolution and Dense layer that makes
            fewer channels to the numbers of those that are gone, a sorted integer
            vector. A layer of a nested model is called `model/layer`.
        channels: How many channels the convolutions (but depthwise ones) and Dense
            layers make, before and after: two integers. Not counted here and in `macs`
            are EinsumDense and what is in wrappers, as WS.
        parameters: How many weights there are, before and after.
        macs: Multiply-accumulates of convolutions and Dense layers for one sample,
            before and after; `None` where the model takes more than one size.
        error: Root of the mean square of the change of the outputs over that of the
            outputs themselves, over `data` and all outputs.
        largest: Largest change of an output, over the largest output.
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
        """The share of all channels that is gone, from 0 to 1."""
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
    gamma: float | None = 0.0,
    similarity: float | None = 1.0,
    steps: int | None = None,
    batch_size: int = 32,
    inline: bool = True,
    ratio: float | None = None,
    round_to: int = 1,
) -> Pruned:
    """Make a copy with fewer channels, which computes the same up to a stated error.

    At training a normalised channel differs from all others by gamma and beta alone:
    they are its standard deviation and its mean. A channel of small gamma is close to a
    constant; two channels of about the same gamma and beta whose values correlate are
    one channel twice. Both are measured on `data`, at inference, where the next
    convolutions and Dense layers read the channel: after the activation, which may have
    taken all deviation out, and after sums.

    * **Constants**: a channel whose standard deviation is at most `gamma` there goes,
      and its mean times the kernels that read it goes into their biases, or where a
      norm follows, into the mean that this takes away.
    * **Merging**: where x_c is alpha x_d + offset with a correlation of at least
      `similarity` in magnitude, or but for a rest whose standard deviation is at most
      `gamma`, c goes, and d does its work: alpha times the kernel rows of c are added
      to those of d, and the offset goes into the biases.

    The defaults, 0 and 1, remove only what is the same on `data` up to rounding:
    channels that are constant, such as dead ReLUs, and duplicates. What is constant or
    the same on `data` need not be so elsewhere: give data as the network will see.

    With `ratio`, the cheapest channels of the whole network go, that share of all,
    whatever the error is. What a channel costs is the mean square that its substitute,
    constant or multiple, leaves of it, times that of the kernel rows that read it, as a
    share of what all rows of this layer make of the deviations of their channels;
    summed over the layers that read it. Constants and merging compete for each channel.

    A convolution with `padding="same"` reads zeros outside of the image, not the
    constant, so that a constant in its bias is right only where the kernel is inside.
    This error counts as if the channel deviated by its mean, as often as the kernel
    reads padding: with `gamma=0` only channels of mean 0 become constants there, as
    dead ReLUs do. Of several constants that are not 0, one stays and does the work of
    the others, which is exact at the border too.

    Channels pass norms (BatchNormalization, CBN, NoisyBN, LpNorm), activations,
    depthwise convolutions, pooling, padding, cropping, upsampling, Flatten, Reshape and
    Permute. Sums, products and concatenations along another axis bind channels
    together: those go from all or from none. A shared layer has the same channels in
    all calls. Inputs and outputs of the model stay, and what is read or made by layers
    of other kinds: grouped convolutions, softmax, norms of samples, recurrent layers,
    attention, layers in wrappers such as `TimeDistributed` and WS (see `fold`),
    EinsumDense, and subclasses. Each layer keeps one channel at least.

    Blocks and subclassed models are entered as in `convert`.

    Args:
        model: A built Functional, Sequential or subclassed model, nested or with shared
            layers. It is not changed. A `FusedCBN` comes back as a CBN and its layers.
        data: Inputs to measure on, as in `recalibrate`: a few hundred to thousand. They
            are kept in memory.
        gamma: Float >= 0, or `None` for no constants. Standard deviations up to it
            count as none, also of what merging leaves. In units of what is read; after
            BatchNormalization, which makes deviations of gamma, 0.01 is little and 0.3
            is much in networks whose gamma starts at 1.
        similarity: Float from 0 (exclusive) to 1, the smallest magnitude of a
            correlation, or `None` for no merging.
        steps: Optional integer, how many batches of `data` to use. Needed where it is
            endless.
        batch_size: Integer, for arrays.
        inline: Boolean, whether blocks are entered. If not, nothing inside of them
            goes, and subclassed models are refused.
        ratio: Share of all channels to remove, from 0 to 1 (exclusive), counted as
            `Pruned.channels` does; fewer go where that many cannot, or do not fit
            `round_to`. `None`: what `gamma` and `similarity` allow. With it, these are
            0 and 1, or `None` to do without one of both.
        round_to: Positive integer. A layer that loses channels keeps a multiple of it,
            such as 8 for hardware that computes in blocks: the most expensive ones
            stay.

    Returns:
        A `Pruned`: the new model, of the same name, with the names of all layers and
        compiled in the same way; which channels are gone; and the error on `data`. The
        moving statistics and all other weights are those of `model`. The error grows
        with each layer that loses channels that did vary: `recalibrate` the result on
        training data then, or train it on.

    Raises:
        ValueError: If the model is not built, if it is subclassed and cannot be traced,
            if it has no channel that could go, if its outputs are not finite, or if an
            argument is out of its range.

    Example:

    >>> pruned = prune(model, images, gamma=0.05, similarity=0.98)
    >>> print(pruned)
    >>> recalibrate(pruned.model, images).save("smaller.keras")
    >>> half = prune(model, images, ratio=0.5, round_to=8).model  # to be trained on

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
            "Argument `model` must have a channel that could go: one that a layer with "
            "a kernel makes and another one reads, with nothing between that mixes "
            f"channels. Received: model '{model.name}'"
        )
    batches = _collect(model, data, steps, batch_size)
    outputs = _measure(model, sites, batches)
    limits = gamma, similarity, ratio, round_to
    gone = select(sites, roots, channels.is_fixed, *limits)
    before = _macs_of(graph)
    for site in sites:
        substitute(site, gone)
    removed = resize(channels, list(gone))
    pruned = graph.make()
    after = _macs_of(Graph(pruned))
    # Names, by which `removed` goes, need not be unique.
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
            "Argument `ratio` must be None where there are tolerances. Received: "
            f"ratio={ratio} with gamma={gamma} and similarity={similarity}"
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
            "Argument `data` must give outputs that are finite. Received: data of "
            f"which model '{model.name}' makes others"
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
    """List the norms whose channels can go, and that one layer alone makes.

    Not those after a sum, of which two layers make each channel.
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
