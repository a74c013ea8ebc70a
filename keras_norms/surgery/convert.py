"""convert: a copy of a model with another normalisation."""

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
    """Make a copy of a model with another normalisation, or with none.

    **CBN** takes other places than `BatchNormalization`. All `BatchNormalization`
    layers are removed, and a `CBN` is put before each layer with a kernel (`Dense`,
    `EinsumDense`, all convolutions). Layers that read the same tensor share one CBN,
    and a shared layer has one for all its calls.

    * Layers that read the raw input get none, even if it was padded, rescaled, resized,
      standardised, reshaped, augmented or concatenated first.
    * Recurrent layers and `MultiHeadAttention` get none. A `BatchNormalization` that
      only these read is lost, and a warning names it.
    * Existing CBN layers keep their place and settings. Layers that read their output,
      pooled or reshaped too, get no other one.
    * Norms of other kinds stay. So does a `BatchNormalization` of another axis than the
      channels, or one called with a mask or with `training=True`.
    * CBN goes before zero padding and Dropout. Its statistics are then those of the
      activations alone, and padded zeros stay zero, as with `padding="same"`.
    * A layer that loses the `BatchNormalization` after it gets a bias.
    * A new CBN is named after the first layer that reads it: `conv1_cbn`.
    * `"relu"` and `"relu6"` become the functions of `keras_norms.activations` where
      they alone read the output of a linear layer or a sum, which takes less memory on
      JAX; with `fused=True`, everywhere. Converting to norms of Keras undoes this.

    **NoisyBN, LpNorm** and what a function returns take the place and the name of each
    `BatchNormalization`. **WS, CWN, WN** wrap each layer with a kernel, under its name,
    and keep `BatchNormalization`. To remove it too: `convert(fold(model), "wn")`.

    **Norms of Keras**, by name or class, suit batches that are too small for batch
    statistics. `"group_norm"`, `"layer_norm"`, `"rms_norm"` (each position, over its
    channels) and `"instance_norm"` (each channel, over its positions) replace each
    BatchNormalization, CBN, NoisyBN and LpNorm. The number of groups is the largest
    that divides the channels, is at most 32 and leaves 4 channels or more in each.
    `"batch_norm"` replaces all other norms, and `"none"` removes all. A norm stays, and
    a warning names it, where the new one would normalise single numbers, as
    `"instance_norm"` after a `Dense` layer does, and where the channels are not the
    last axis and Keras' norm is wrong on others: `"rms_norm"`, on PyTorch also
    `"layer_norm"`.

    **With `preserve=True`** the new model computes at inference what the old one does,
    and a warning names the layers where it does not:

    * `BatchNormalization` is folded into the layer before it or the CBN after it. Where
      neither is possible, as between a sum and an activation, its scale and shift of
      each channel stay, trainable, as the layer `<name>_affine`. This `ChannelAffine`
      is an `EinsumDense` that passes masks on.
    * A new CBN starts as the identity. It needs the statistics of its input for that,
      or the first training step changes the function. They are measured in one pass
      over `data`: with mean mu and mean square q of the input, beta = mu and
      gamma = rho * sqrt(q + epsilon). Without `data`, a CBN that replaces a
      BatchNormalization in the same place takes over its statistics. The others start
      empty, and a warning names them.
    * Norms of single samples cannot compute what batch statistics do, nor the other way
      round: **the function changes**, and the network needs more training. Gamma and
      beta are the deviation and mean that the old norm gave each channel (for
      BatchNormalization, its gamma and beta; RMSNormalization has no beta).
      `"batch_norm"` is exact in place of CBN, NoisyBN and LpNorm. In place of norms of
      samples, it has the statistics of `data`.
    * `"none"` is exact for BatchNormalization, CBN, NoisyBN and LpNorm: their scale and
      shift at inference go into the layers next to them, or stay as `<name>_affine`. Of
      norms of samples only gamma and beta stay.
    * NoisyBN takes over all weights. LpNorm gets a gamma that makes up for its norm.
      Both refuse an epsilon of 0 and a momentum of 1, which become their defaults.
    * WN is exact. WS and CWN remove the mean of each unit's weights. They also change
      the length of units: `gain=True` makes up for it, or else the statistics of a
      BatchNormalization that follows.

    **With `preserve=False`**, for models that are not trained yet, new layers start
    with their initial weights. `data`, if given, sets their moving statistics as
    `recalibrate` does.

    Blocks (custom layers with layers inside) and subclassed models are replaced by the
    layers that their `call` calls, with the same weights. This loses the class of a
    block, and the methods and presets of a model that is not plainly Functional. Inner
    layers that share a name get the name of the block as a prefix. A block stays as it
    is if its `call` cannot be traced with symbolic tensors: if it needs their values,
    reads or changes variables or attributes itself, adds losses, or differs between
    training and inference other than by passing `training` on. Layers that Keras builds
    from others, such as `MultiHeadAttention` or `Bidirectional`, are not entered.

    A layer that replaces one with `trainable=False`, or one frozen by `freeze`, is
    frozen in the same way. A new CBN has `trainable=False` if no layer that reads it
    trains, unless it replaces a `BatchNormalization` that trained.

    Args:
        model: A built Functional, Sequential or subclassed model, nested or with shared
            layers. It is not changed. A subclassed one is read as what it computes from
            the inputs that it was built for.
        norm: `"cbn"`, `"noisy_bn"`, `"lp_norm"`, `"ws"`, `"cwn"`, `"wn"`,
            `"batch_norm"`, `"group_norm"`, `"instance_norm"`, `"layer_norm"`,
            `"rms_norm"` or `"none"`; a class of these, or a `functools.partial` of one:
            `functools.partial(WS, gain=True)`; a layer, such as `CBN(rho=2)`, whose
            settings all new layers get, except axis, name and dtype; or a function that
            takes each `BatchNormalization` and returns its replacement (`None` or the
            same layer: it stays).
        preserve: Boolean, see above.
        data: Inputs to measure statistics on, as in `recalibrate`.
        skip: Layers to leave alone: names, or a function of a layer. A model or block
            is left alone with all its layers.
        fused: Boolean, whether each CBN is fused with the layers that read it, as a
            `FusedCBN` under its name: the same weights and function, with less memory
            and time in training. A CBN stays before a layer that `FusedCBN` does not
            take, such as one after explicit zero padding.
        inline: Boolean, whether blocks are entered, see above. If not, their layers
            stay, and subclassed models are refused.

    Returns:
        A new model of the same name, with the names and weights of all layers that
        stay. If `model` is compiled, so is the new one, with the same loss and metrics
        and a new optimizer of the same settings. Several outputs keep their names; the
        name of a layer that went is kept by an `Identity` layer. Layers are rebuilt
        from their configurations, with the same functions; a custom layer without
        weights is copied.

    Raises:
        ValueError: If the model is not built, if it is subclassed and cannot be traced,
            if `norm` is none of the above, if a layer with weights cannot be rebuilt
            from its configuration, or if `data` is of another kind, endless, or gives
            activations that are not finite.

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
    hidden = [] if template.cls in linear.WRAPPERS else affine_lib.hidden_norms(units)
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
        f"Found no place for {wanted} in model {{}}.": (
            [] if is_there else [model.name]
        ),
        "Existing CBN layers keep their settings: {}.": report.there,
        "Other norms stay beside the new CBN layers: {}.": report.beside,
        "These have seen no batch: {}. If the model is not trained, pass "
        "preserve=False: a CBN that keeps its function hardly normalises at first, "
        "and it may not learn.": report.fresh,
        "No CBN replaces {}, which no layer with a kernel reads. To keep them, name "
        "them in `skip`.": report.lost,
        "The function could not be preserved. These layers change it: {}.": changed,
        "These layers cannot be wrapped and stay: {} (units of one weight, LoRA, "
        "quantization, FusedCBN, or a class that overrides the kernel).": (
            report.unwrapped
        ),
        "The moving statistics of {} are unknown, and the first training step changes "
        "the function. Pass `data` to measure them, or preserve=False to train from "
        "scratch.": [] if report.fresh else empty,
        "These stay as they are: {}. They have another axis than the channels, an "
        "explicit mask or training=True, or the new norm would normalise single "
        "numbers.": report.kept,
        "These stay as they are: {}. They are inside other layers, or of a class "
        "that overrides `call`.": hidden,
    }
    warn_of_layers("convert", parts)
    return fuse_cbn(result) if fused else result


def _has(graph, cls):
    """Whether there is a layer of a class, or of one that does the same."""
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
            some = [unit.name for unit in units if unit.layer is not None][:5]
            wanted = f"a function, or names of layers of the model, such as {some}"
            raise arguments.wrong("skip", wanted, skip)
        chosen = [unit for unit in units if unit.name in names]
    inside = [g for unit in chosen if unit.graph for g in unit.graph.walk()]
    return {id(each) for each in (*chosen, *inside)}


def _calibrate(model, report, new, data):
    """Give new norms the statistics of their inputs, measured on `data` if given.

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
