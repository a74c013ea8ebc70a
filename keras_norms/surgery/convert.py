"""convert: the same network with another normalisation."""

import functools
from collections.abc import Callable, Iterable

import keras

from keras_norms._checks import arguments
from keras_norms._types import Tensor
from keras_norms.layers.cbn import CBN
from keras_norms.layers.fused_cbn import FusedCBN
from keras_norms.surgery._convert.insert_cbn import insert_cbn
from keras_norms.surgery._convert.replace import (
    KERAS_NORMS,
    place_keras_norms,
    remove_norms,
    replace_norms,
)
from keras_norms.surgery._convert.template import Report, Template
from keras_norms.surgery._convert.wrap import keep_function, wrap
from keras_norms.surgery._graph import affine as affine_lib
from keras_norms.surgery._graph import linear
from keras_norms.surgery._graph.arrays import assign_all
from keras_norms.surgery._graph.blocks import graph_of, warn_of_layers
from keras_norms.surgery._graph.fused_cbn import fuse_cbn, split_fused_cbn
from keras_norms.surgery._graph.measure import inputs_of, measure
from keras_norms.surgery._graph.relu import take_own_relu, take_relu_of_keras
from keras_norms.surgery.recalibrate import measure_anew


def convert(
    model: keras.Model,
    norm: str | type | keras.layers.Layer | Callable,
    preserve: bool = True,
    data: Tensor = None,
    skip: str | Iterable[str] | Callable[[keras.layers.Layer], bool] | None = None,
    fused: bool = False,
    inline: bool = True,
) -> keras.Model:
    """Make a copy of a model that normalises in another way, or not at all.

    **CBN** changes the place of the norm. Every `BatchNormalization` is removed, and a
    `CBN` is put before every layer with a kernel (`Dense`, `EinsumDense`, convolutions
    of all kinds): one for all layers that read the same tensor, shared where they are.

    * Layers that read the raw input get none, also if it was only padded, rescaled,
      resized, standardised, reshaped, augmented or concatenated before.
    * Recurrent layers and `MultiHeadAttention` get none. A warning names each
      `BatchNormalization` that only these read, and that is lost.
    * Existing CBN layers keep their place and settings. Layers that read their output,
      also pooled or reshaped, get no other one. Norms of other kinds stay, and so does
      a `BatchNormalization` of another axis than the channels, or one called with a
      mask or with `training=True`.
    * CBN stands before zero padding and Dropout, so that its statistics are those of
      the activations alone, and padding is zero after the normalisation, as with
      `padding="same"`.
    * Layers that lost the `BatchNormalization` after them get a bias.
    * A new CBN is named after the first layer that reads it: `conv1_cbn`.
    * `"relu"` and `"relu6"` become the same function of `keras_norms.activations`,
      which takes less memory on JAX, where nothing else reads their input from a linear
      layer or a sum, and with `fused=True` everywhere. Norms of Keras undo this.

    **NoisyBN, LpNorm** and what a callable returns take the place and the name of each
    `BatchNormalization`. **WS, CWN, WN** wrap every layer with a kernel, under its
    name, and keep `BatchNormalization`. To remove it too: `convert(fold(model), "wn")`.

    **Norms of Keras**, by name or class: `"group_norm"`, `"layer_norm"`, `"rms_norm"`
    (each position, over its channels) and `"instance_norm"` (each channel, over its
    positions) take the place of each BatchNormalization, CBN, NoisyBN and LpNorm, for
    batches that are too small for statistics of their own. Groups are as many as divide
    the channels, but at most 32 and of 4 channels or more. `"batch_norm"` takes the
    place of all other norms. `"none"` takes all norms out. A norm stays where a single
    number would be normalised alone, as by `"instance_norm"` after a `Dense` layer,
    or where channels are not the last axis and Keras' norm is wrong along others, as
    that of `"rms_norm"` is, and on PyTorch `"layer_norm"`. A warning names layers that
    stay.

    With `preserve=True` the new model computes what the old one does, at inference, and
    a warning names layers of which that is not so:

    * `BatchNormalization` is folded into the layer before it, or into the CBN after it.
      Where neither is possible, as between a sum and an activation, its map stays: a
      trainable scale and shift for each channel, as the `ChannelAffine` layer
      `<name>_affine`, an `EinsumDense` that passes masks on.
    * A new CBN starts as the identity. For that its statistics must be those of its
      input, or the first training step changes the function. They are measured on
      `data`, in one pass: with mean mu and mean square q of the input, beta = mu and
      gamma = rho * sqrt(q + epsilon). Without `data`, a CBN that takes over from the
      BatchNormalization at its place has that layer's statistics; the others start
      empty, and a warning says so.
    * Norms of single samples cannot compute what statistics of batches did, nor the
      other way round: **the function changes**, and the network has to be trained on.
      Gamma and beta are the deviation and mean that the old norm gave each channel (of
      a BatchNormalization, its gamma and beta; RMSNormalization has no beta).
      `"batch_norm"` is exact in the place of CBN, NoisyBN and LpNorm; in that of norms
      of samples, it has the statistics of `data`.
    * `"none"` folds what BatchNormalization, CBN, NoisyBN and LpNorm are at inference
      into the layers next to them, or leaves `<name>_affine`, and is exact. Of norms of
      samples, gamma and beta stay alone.
    * NoisyBN takes all weights over. LpNorm gets a gamma that makes up for its norm.
      An epsilon of 0 or a momentum of 1, which they refuse, become their defaults.
    * WN is exact. WS and CWN cannot hold a kernel whose units have a mean. That units
      have other lengths is made up for, by the gain with `gain=True`, or by the
      statistics of the BatchNormalization that follows.

    Blocks (custom layers with layers inside) and subclassed models are replaced by the
    layers that their `call` calls, with the same weights. The class of a block is lost,
    and of a model that is not plainly Functional also its methods and presets. Inner
    layers that share a name get that of the block as a prefix. A block stays as it is
    if its `call` cannot be traced with symbolic tensors: if it needs their values,
    reads or changes variables or attributes itself, adds losses, or differs between
    training and inference in other ways than by passing `training` on. Layers that
    Keras itself makes of others, such as `MultiHeadAttention` or `Bidirectional`, are
    not entered.

    A layer in the place of one that has `trainable=False`, or is frozen by `freeze`, is
    so too. CBN, which has other places, has `trainable=False` where no layer that reads
    it trains, unless it takes over from a `BatchNormalization` that trained.

    With `preserve=False`, which is for models that are not trained yet, the new layers
    start as they are made, and `data`, if there is any, sets their moving statistics as
    `recalibrate` does.

    Args:
        model: A built Functional, Sequential or subclassed model, nested or with shared
            layers. It is not changed. A subclassed one is taken as what it computes of
            the inputs that it was built for.
        norm: `"cbn"`, `"noisy_bn"`, `"lp_norm"`, `"ws"`, `"cwn"`, `"wn"`,
            `"batch_norm"`, `"group_norm"`, `"instance_norm"`, `"layer_norm"`,
            `"rms_norm"` or `"none"`; a class of these; a layer, such as `CBN(rho=2)`,
            whose configuration all new layers have, but for axis, name and dtype; or a
            function from each `BatchNormalization` to the layer in its place (`None` or
            the same layer: it stays). `functools.partial(WS, gain=True)` gives
            arguments to a wrapper.
        preserve: Boolean, see above.
        data: Inputs to measure statistics on, as in `recalibrate`.
        skip: Layers to leave alone: names, or a predicate of a layer. A model or block
            that is skipped is left alone with all its layers.
        fused: Boolean, whether each CBN is fused with the layers that read it, as
            `FusedCBN` layers under its name: the same weights and function, with less
            memory and time in training. A CBN stays as it is before a layer that
            `FusedCBN` does not take, such as one behind explicit zero padding.
        inline: Boolean, whether blocks are entered, see above. If not, what is inside
            of them stays, and subclassed models are refused.

    Returns:
        A new model of the same name, with the names and weights of all layers that
        stay, and compiled with the same optimizer, loss and metrics, if `model` is. The
        optimizer starts anew. Several outputs keep their names, of layers that went as
        those of `Identity` layers. Layers are made again from their configurations,
        with the functions that they have; a layer of one's own without weights is
        copied as it is.

    Raises:
        ValueError: If the model is not built, if it is subclassed and cannot be traced,
            if `norm` is none of the above, if a layer with weights cannot be made again
            from its configuration, or if `data` is of another kind, has no end, or
            gives activations that are not finite.

    Example:

    >>> model = keras.applications.ResNet50()
    >>> model = convert(model, CBN(rho=2), data=images)
    >>> model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    >>> model.fit(images, labels, callbacks=[AMAT()])
    >>> segmentation = convert(network, "group_norm")  # for batches of 2
    """
    arguments.boolean("preserve", preserve)
    template = Template(norm)
    if not isinstance(fused, bool) or (fused and template.cls is not CBN):
        raise ValueError(
            "Argument `fused` must be True or False, and False unless `norm` is CBN. "
            f"Received: fused={arguments.shown(fused)} with norm={norm!r}"
        )
    graph = graph_of(model, "convert", inline, skip=skip)
    if data is not None:
        inputs_of(model, data)
    of_keras = template.is_none or template.cls in KERAS_NORMS
    skipped = _skipped(graph, skip)
    if of_keras:
        split_fused_cbn(graph, skipped)
    graphs = [g for g in graph.walk() if id(g) not in skipped]
    called = dict.fromkeys(node.unit for g in graphs for node in g.nodes)
    units = [unit for unit in called if id(unit) not in skipped]
    report = Report()
    if template.is_none:
        remove_norms(report, units, preserve)
    elif of_keras:
        place_keras_norms(report, units, template, preserve)
    elif template.cls in linear.WRAPPERS:
        wrap(report, units, functools.partial(template.cls, **template.keywords))
    elif template.cls is CBN:
        insert_cbn(report, graph, graphs, units, template, preserve)
        take_own_relu(units, everywhere=fused)
    else:
        replace_norms(report, units, template)
    if of_keras:
        take_relu_of_keras(units)
    is_wrapped = template.cls in linear.WRAPPERS
    hidden = [] if is_wrapped else affine_lib.hidden_norms(units)
    new = report.new if preserve else {}
    for unit, (affine, statistics) in new.items():
        unit.arrays, met = affine_lib.weights_for(unit, affine, statistics)
        report.changed += [] if met else [unit.name]
    is_there = template.cls is None or _has(graph, template.cls)
    result = graph.make()
    if preserve:
        keep_function(report, units)
    empty = _calibrate(result, report, new, data)
    changed = report.changed if preserve else []
    if data is not None and (report.unknown or (report.new and not preserve)):
        measure_anew(result, [u.made for u in (*report.new, *report.unknown)], data)
    elif preserve:
        empty += [u.name for u in report.unknown if u.name not in empty]
    wanted = getattr(template.cls, "__name__", None)
    parts = {
        f"there is no place for {wanted} in": [] if is_there else [model.name],
        "these were there and keep the settings that they have": report.there,
        "these normalise too, beside the new CBN layers": report.beside,
        "these have seen no batch: the model is not trained, a CBN that keeps its "
        "function hardly normalises at first, and it may not learn; pass "
        "preserve=False": report.fresh,
        "no layer with a kernel reads what these normalise, so that no CBN takes their "
        "place; name them in `skip` to keep them": report.lost,
        "the function could not be preserved, these layers change it": changed,
        "these layers cannot be wrapped (units of one weight, LoRA, quantization, "
        "FusedCBN, a class that overrides the kernel) and stay": report.unwrapped,
        "the moving statistics of these layers are unknown, so that the first "
        "training step changes the function; pass `data` to measure them, or "
        "preserve=False to train from scratch": [] if report.fresh else empty,
        "these do not normalise channels as they come (another axis, an explicit "
        "mask, training=True), or one number, and stay as they are": report.kept,
        "these are inside of other layers, or of classes that override `call`, "
        "and stay as they are": hidden,
    }
    warn_of_layers("convert", parts)
    return fuse_cbn(result) if fused else result


def _has(graph, cls):
    """Whether a layer of a class, or of one that does the same, is there."""
    alike = linear.WRAPPERS, (CBN, FusedCBN)
    alike = next((classes for classes in alike if cls in classes), cls)
    units = graph.all_units()
    return any(unit.wrapper or issubclass(unit.cls, alike) for unit in units)


def _skipped(graph, skip):
    """The ids of units, and of graphs, that are left alone."""
    units = graph.all_units()
    if callable(skip):
        chosen = [u for u in units if u.layer is not None and skip(u.layer)]
    else:
        names = [skip] if isinstance(skip, str) else () if skip is None else skip
        known = [unit.name for unit in units]
        if not isinstance(names, (list, tuple, set, frozenset)) or not all(
            isinstance(name, str) and name in known for name in names
        ):
            wanted = "a predicate or a collection of names of layers of the model"
            raise arguments.wrong("skip", wanted, skip)
        chosen = [unit for unit in units if unit.name in names]
    inside = [g for unit in chosen if unit.graph for g in unit.graph.walk()]
    return {id(each) for each in (*chosen, *inside)}


def _calibrate(model, report, new, data):
    """Give new norms the statistics of their inputs, measured on data if there are.

    Returns the names of those without any.
    """
    empty, measured = [], [None] * len(new)
    if new and data is not None:
        measured = measure(model, [unit.made for unit in new], data)
    for (unit, (affine, statistics)), found in zip(new.items(), measured):
        if found is None:
            if statistics.weight == 0 or affine_lib.norm_is_guessed(unit):
                empty.append(unit.name)
            continue
        arrays, met = affine_lib.weights_for(unit, affine, found)
        if not met and unit.name not in report.changed:
            # Without gamma or beta, the statistics of the old norm keep the function.
            if statistics.weight and not affine_lib.norm_is_guessed(unit):
                continue
            report.changed.append(unit.name)
        assign_all(unit.made, arrays)
    return empty
