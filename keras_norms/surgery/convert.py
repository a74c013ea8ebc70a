"""convert: a copy of a model with another normalisation."""

import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

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
from keras_norms.surgery._convert.report import Report
from keras_norms.surgery._convert.template import Template
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
    norm: str | type[Any] | keras.layers.Layer | Callable[..., Any],
    preserve: bool = True,
    data: Tensor = None,
    skip: str
    | Sequence[str]
    | AbstractSet[str]
    | Callable[[keras.layers.Layer], bool]
    | None = None,
    fused: bool = False,
    inline: bool = True,
) -> keras.Model:
    """Make a copy of a model with another normalisation, or with none.

    * **CBN**: all `BatchNormalization` layers go. A `CBN` comes before each layer with
      a kernel (`Dense`, `EinsumDense`, convolutions) that does not read the raw input
      (docs/choosing.md). Layers that lose the norm after them get a bias.
    * **NoisyBN, LpNorm**, and what a function returns, take the place and the name of
      each `BatchNormalization`.
    * **WS, CWN, WN** wrap each layer with a kernel, under its name, and keep
      `BatchNormalization`. To remove it too: `convert(fold(model), "wn")`.
    * `"group_norm"`, `"layer_norm"`, `"rms_norm"` and `"instance_norm"`, for batches
      too small for batch statistics, replace each BatchNormalization, CBN, NoisyBN and
      LpNorm. `"batch_norm"` replaces all other norms.
    * `"none"` removes all norms.

    **With `preserve=True`** the new model computes at inference what the old one does.
    A warning names the layers where it does not:

    * CBN needs the statistics of its input, or the first training step changes the
      function. They are measured in one pass over `data`. Without `data`, a CBN that
      replaces a BatchNormalization in the same place takes over its statistics, and
      the others start without any.
    * Batch statistics and norms of single samples cannot compute the same. Gamma and
      beta are kept, **the function changes**, and the network needs more training.
      `"batch_norm"` is exact in place of CBN, NoisyBN and LpNorm.
    * WS and CWN remove the mean of each unit's weights, and change the length of units
      unless they have `gain=True` or a BatchNormalization follows. WN is exact.

    A scale and shift that no other layer can take stays, trainable, as the layer
    `<name>_affine`. docs/surgery.md has these and other rules in detail.

    **With `preserve=False`**, for models that are not trained yet, new layers start
    with their initial weights. `data`, if given, sets their moving statistics as
    `recalibrate` does.

    **Blocks** (custom layers with layers inside) and subclassed models are replaced by
    the layers that their `call` calls, with the same weights. The class of a block and
    the methods of a subclassed model are lost, a `train_step` with a warning. A block
    whose `call` cannot be traced with symbolic tensors stays as it is.

    **Frozen** layers (`trainable=False`, or by `freeze`) are replaced by layers frozen
    in the same way. A new CBN has `trainable=False` if no layer that reads it trains,
    unless it replaces a `BatchNormalization` that trained.

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
            `FusedCBN` under its name: the same weights and function, mostly with less
            memory in training. Convolutions take over the zero padding before them, if
            `padding="same"` pads as much. A CBN stays before a layer that `FusedCBN`
            does not take.
        inline: Boolean, whether blocks are entered. If not, their layers stay, and
            subclassed models are refused.

    Returns:
        A new model of the same name, with the names and weights of all layers that
        stay. If `model` is compiled, so is the new one, with the same loss and metrics
        and a new optimizer of the same settings. A custom layer without weights is
        copied; others are rebuilt from their configurations.

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
    if template.cls not in linear.WRAPPERS:
        report.hidden += affine_lib.hidden_norms(units)
    if template.cls is not None and not _has(graph, template.cls):
        report.no_place.append(model.name)
    new = report.new if preserve else {}
    for unit, (affine, statistics) in new.items():
        unit.arrays, met = affine_lib.weights_for(unit, affine, statistics)
        report.changed += [] if met else [unit.name]
    result = graph.make()
    if report.new and report.unknown and hasattr(data, "__next__"):
        data = list(data)  # It is read twice.
    if preserve:
        keep_function(report, units)
    else:
        report.changed.clear()  # Nobody asked for the old function.
    _calibrate(result, report, new, data)
    if data is not None and (report.unknown or (report.new and not preserve)):
        measure_anew(result, [u.made for u in (*report.new, *report.unknown)], data)
    elif preserve:
        report.empty += [u.name for u in report.unknown if u.name not in report.empty]
    warn_of_layers("convert", report.parts(template.cls))
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
    # A layer and a class can be called, but they do not choose layers.
    if callable(skip) and not isinstance(skip, (keras.layers.Layer, type)):
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
    """Give new norms the statistics of their inputs, measured on `data` if given."""
    measured = [None] * len(new)
    if new and data is not None:
        measured = measure(model, [unit.made for unit in new], data)
    for (unit, (affine, statistics)), found in zip(new.items(), measured):
        if found is None:
            if statistics.weight == 0 or affine_lib.norm_is_guessed(unit):
                report.empty.append(unit.name)
            continue
        arrays, met = affine_lib.weights_for(unit, affine, found)
        if not met and unit.name not in report.changed:
            # Without gamma or beta, the statistics of the old norm keep the function.
            if statistics.weight and not affine_lib.norm_is_guessed(unit):
                continue
            report.changed.append(unit.name)
        assign_all(unit.made, arrays)
