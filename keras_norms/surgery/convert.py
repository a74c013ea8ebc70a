"""convert: the same network with another normalisation."""

import functools
import warnings

import keras
import numpy as np

from keras_norms._checks import arguments
from keras_norms.layers.cbn import CBN
from keras_norms.layers.cwn import CWN
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.layers.wn import WN
from keras_norms.layers.ws import WS
from keras_norms.surgery import affine as affine_lib
from keras_norms.surgery import fuse, linear, weights
from keras_norms.surgery.again import config_of, from_config
from keras_norms.surgery.fused import fuse_model
from keras_norms.surgery.graph import Unit
from keras_norms.surgery.inline import graph_of
from keras_norms.surgery.inputs import inputs_of
from keras_norms.surgery.placement import insertions
from keras_norms.surgery.recalibrate import measure, recalibrate

NAMES = {
    "cbn": CBN,
    "noisy_bn": NoisyBN,
    "lp_norm": LpNorm,
    "ws": WS,
    "cwn": CWN,
    "wn": WN,
}
# What NoisyBN and LpNorm have in common with the layer whose place they take.
_SHARED_WITH_BATCH_NORM = (
    "momentum",
    "center",
    "beta_initializer",
    "gamma_initializer",
    "beta_regularizer",
    "gamma_regularizer",
    "beta_constraint",
    "gamma_constraint",
)


def convert(model, norm, preserve=True, data=None, skip=None, fused=False, inline=True):
    """Make a copy of a model that normalises in another way.

    **CBN moves.** Every `BatchNormalization` goes, and a `CBN` stands before every
    layer with a kernel (`Dense`, `EinsumDense`, convolutions of all kinds), one where
    several of them read the same tensor, shared where they are. The layers that read
    the raw input get none, also where the input was only padded, rescaled, resized,
    standardised, reshaped, augmented or concatenated before. Where zero padding or
    Dropout stands before the layer, CBN stands before that: its statistics are then
    those of the activations alone, and padding is zero after the normalisation, as it
    is with `padding="same"`. Layers that lost the `BatchNormalization` after them get a
    bias. A new CBN is called after the first layer that reads it: `conv1_cbn`. A
    `BatchNormalization` of another axis than that of the channels, or that is called
    with a mask or with `training=True`, stays, and a warning names it.

    **NoisyBN, LpNorm** and what a callable returns take the place and the name of each
    `BatchNormalization`. **WS, CWN, WN** wrap every layer with a kernel, under its
    name, and leave `BatchNormalization` where it is; `convert(fold(model), "wn")` is
    without.

    With `preserve=True` the new model computes what the old one does, at inference:

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
    * NoisyBN takes all weights over. LpNorm gets a gamma that makes up for its norm.
    * WN is exact. WS and CWN cannot hold a kernel whose units have a mean, so they
      change the function, and a warning names them. That units have other lengths is
      made up for, by the gain with `gain=True`, or by the statistics of the
      BatchNormalization that follows.

    Blocks, which are layers of one's own with layers inside, and subclassed models are
    entered: what their `call` calls stands in their place, with the same weights. The
    class of a block is lost with that, and of a model that is not plainly Functional
    also its methods and presets; layers inside that share a name get that of the block
    before theirs. A block stays as it is, and a warning names it, if its `call` cannot
    be traced with symbolic tensors: if it asks for their values, reads or changes
    variables or attributes itself, adds losses, or does other things in training than
    at inference but by passing `training` on. Layers that Keras itself has made of
    others, such as `MultiHeadAttention` or `Bidirectional`, are not entered.

    With `preserve=False` the new layers start as they are made, and `data`, if there
    is any, sets their moving statistics as `recalibrate` does.

    Args:
        model: A built Functional, Sequential or subclassed model, nested or with shared
            layers. It is not changed. A subclassed one is taken as what it computes of
            the inputs that it was built for.
        norm: `"cbn"`, `"noisy_bn"`, `"lp_norm"`, `"ws"`, `"cwn"` or `"wn"`; a class of
            these; or a layer, such as `CBN(rho=2)`, whose configuration all new layers
            have, but for axis, name and dtype. A function from each
            `BatchNormalization` to the layer in its place (`None` or the same layer:
            it stays). `functools.partial(WS, gain=True)` gives arguments to a wrapper.
        preserve: Boolean, see above.
        data: Inputs to measure statistics on: an array, a `tf.data.Dataset`, a
            `keras.utils.PyDataset`, or an iterable of batches, see `recalibrate`.
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
        optimizer starts anew. Layers are made again from their configurations, with the
        functions that they have; a layer of one's own without weights is copied as it
        is.

    Raises:
        ValueError: If the model is not built, if it is subclassed and cannot be traced,
            if `norm` is none of the above, if a layer with weights cannot be made again
            from its configuration, or if `data` is of another kind.

    Example:

    >>> model = keras.applications.ResNet50()
    >>> model = convert(model, CBN(rho=2), data=images)
    >>> model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    >>> model.fit(images, labels, callbacks=[AMAT()])
    """
    arguments.boolean("preserve", preserve)
    template = _Template(norm)
    if not isinstance(fused, bool) or (fused and template.cls is not CBN):
        raise ValueError(
            "Argument `fused` must be True or False, and False unless `norm` is CBN. "
            f"Received: fused={arguments.shown(fused)} with norm={norm!r}"
        )
    graph = graph_of(model, "convert", inline, skip=skip)
    if data is not None:
        inputs_of(model, data)
    skipped = _skipped(graph, skip)
    graphs = [g for g in graph.walk() if id(g) not in skipped]
    units = _units(graphs, skipped)
    report = _Report()
    if template.cls is CBN:
        new = _to_cbn(graph, graphs, units, template, preserve, report)
        report.hidden = affine_lib.hidden_norms(graph)
    elif template.cls in linear.WRAPPERS:
        wrapper = functools.partial(template.cls, **template.keywords)
        report.unwrapped = weights.wrap(units, wrapper)
        new = {}
    else:
        new = _replace(units, template, preserve, report)
        report.hidden = affine_lib.hidden_norms(graph)
    for unit, (affine, statistics) in new.items():
        if affine is not None:
            unit.arrays, met = affine_lib.weights_for(
                unit.cls, unit.config, affine, statistics
            )
            if not met:
                report.changed.append(unit.name)
    result = graph.make()
    if preserve:
        report.changed += weights.keep_function(units)
    _calibrate(result, new, data, preserve, report)
    report.warn()
    return fuse_model(result) if fused else result


class _Template:
    """What the argument `norm` asks for.

    `cls` is the class of the new layers, or `None` where a function makes them.
    """

    def __init__(self, norm):
        self.cls, self.function, self.keywords = None, None, {}
        self.is_given = False
        if isinstance(norm, str):
            if norm not in NAMES:
                raise _wrong_norm(norm)
            self.cls = NAMES[norm]
        elif isinstance(norm, keras.Model) or (
            isinstance(norm, type) and issubclass(norm, keras.Model)
        ):
            raise _wrong_norm(norm)
        elif isinstance(norm, type) and issubclass(norm, keras.layers.Layer):
            self.cls = norm
        elif isinstance(norm, functools.partial) and isinstance(norm.func, type):
            if norm.args or not issubclass(norm.func, keras.layers.Layer):
                raise _wrong_norm(norm)
            self.cls, self.keywords, self.is_given = norm.func, norm.keywords, True
        elif isinstance(norm, keras.layers.Layer):
            self.cls, self.keywords = type(norm), config_of(norm)
            self.is_given = True
            for name in ("name", "dtype", "layer", "build_config"):
                self.keywords.pop(name, None)
        elif callable(norm) and not isinstance(norm, type):
            self.function = norm
        else:
            raise _wrong_norm(norm)

    def config(self, name, dtype, **changes):
        """A whole configuration of a new layer."""
        given = {**self.keywords, **changes, "name": name, "dtype": dtype}
        # A layer's own view of its arguments, defaults included.
        return config_of(from_config(self.cls, given))


def _wrong_norm(norm):
    names = ", ".join(repr(name) for name in NAMES)
    return ValueError(
        f"Argument `norm` must be one of {names}, a layer or a class of layers, or a "
        "function from a BatchNormalization layer to a layer. "
        f"Received: norm={arguments.shown(norm)}"
    )


class _Report:
    """What the user should know."""

    def __init__(self):
        self.changed, self.unwrapped, self.empty, self.hidden = [], [], [], []
        self.kept = []

    def warn(self):
        parts = []
        if self.changed:
            parts.append(
                "the function could not be preserved, these layers change it: "
                f"{self.changed}"
            )
        if self.unwrapped:
            parts.append(
                "these layers cannot be wrapped (units of one weight, LoRA, "
                "quantization, a class that overrides the kernel) and stay: "
                f"{self.unwrapped}"
            )
        if self.empty:
            parts.append(
                "the moving statistics of these layers are unknown, so that the first "
                "training step changes the function; pass `data` to measure them, or "
                f"preserve=False to train from scratch: {self.empty}"
            )
        if self.kept:
            parts.append(
                "these do not normalise channels as they come (another axis, an "
                f"explicit mask, training=True) and stay as they are: {self.kept}"
            )
        if self.hidden:
            parts.append(
                "these are inside of other layers, or of classes that override "
                f"`call`, and stay as they are: {self.hidden}"
            )
        if parts:
            warnings.warn("convert: " + "; ".join(parts) + ".", stacklevel=3)


def _skipped(graph, skip):
    """The ids of units, and of graphs, that are left alone."""
    units = graph.all_units()
    if skip is None:
        return set()
    if callable(skip):
        chosen = [u for u in units if u.layer is not None and skip(u.layer)]
    else:
        names = [skip] if isinstance(skip, str) else skip
        known = [unit.name for unit in units]
        is_collection = isinstance(names, (list, tuple, set, frozenset))
        if not is_collection or not all(
            isinstance(name, str) and name in known for name in names
        ):
            raise arguments.wrong(
                "skip",
                "a predicate or a collection of names of layers of the model",
                skip,
            )
        chosen = [unit for unit in units if unit.name in names]
    found = set()
    for unit in chosen:
        found.add(id(unit))
        if unit.graph is not None:
            found |= {id(g) for g in unit.graph.walk()}
    return found


def _units(graphs, skipped):
    found = {}
    for graph in graphs:
        for node in graph.nodes:
            if id(node.unit) not in skipped:
                found.setdefault(id(node.unit), node.unit)
    return list(found.values())


# CBN


def _to_cbn(graph, graphs, units, template, preserve, report):
    """Insert CBN layers and take BatchNormalization out."""
    norms = []
    for unit in units:
        if affine_lib.is_batch_norm(unit):
            goes = affine_lib.is_called_plainly(unit) and not affine_lib.elsewhere(
                graph, unit
            )
            (norms.append(unit) if goes else report.kept.append(unit.name))
    eligible = [unit for unit in units if linear.is_linear(unit)]
    maps = {}
    for group in insertions(graph, graphs, eligible):
        reader = group.first
        config = template.config(
            group.graph.free_name(f"{reader.name}_cbn"),
            linear.plain_dtype(reader),
            axis=-1 if group.axis == group.values[0].rank - 1 else group.axis,
        )
        unit = Unit(cls=template.cls, config=config)
        for value, nodes in zip(group.values, group.readers):
            group.graph.insert(unit, value, nodes)
        maps[unit] = affine_lib.identity(group.values[0].shape[group.axis])
    cbns = list(maps)
    statistics = {
        unit: affine_lib.unknown(len(affine.a)) for unit, affine in maps.items()
    }
    if not preserve:
        for unit in norms:
            _give_bias_before(unit)
            for node in list(unit.nodes):
                node.graph.remove(node)
        return {unit: (None, statistics[unit]) for unit in cbns}
    for unit in norms:
        maps[unit] = affine_lib.affine_of(unit)
    maps = fuse.Maps(maps)
    for unit in norms:
        if fuse.fold_backward(unit, maps, accept=linear.is_free):
            continue
        inherited = _inherits_statistics(unit, maps, cbns)
        affine = maps[unit]
        merged = fuse.fold_forward(
            unit,
            maps,
            accept=lambda target, affine=affine: (
                target in cbns and affine_lib.can_be(CBN, target.config, affine)
            ),
        )
        if merged:
            statistics.update(dict.fromkeys(*inherited) if inherited else {})
        else:
            affine_lib.become_layer(unit, maps[unit])
            maps.forget(unit)
    return {unit: (maps[unit], statistics[unit]) for unit in cbns}


def _give_bias_before(unit):
    """The layers that a BatchNormalization followed had no bias, for it has one."""
    for node in unit.nodes:
        before = node.input.node
        if before is not None and linear.is_foldable(before.unit):
            linear.add_missing_bias(before.unit)


def _inherits_statistics(unit, maps, cbns):
    """The CBN layers that read what only this BatchNormalization makes.

    Returns:
        Them, and the statistics of its input, or `None`.
    """
    readers = {reader.unit for node in unit.nodes for reader in node.output.readers}
    if not readers or not readers <= set(cbns):
        return None
    if any(call.input.node.unit is not unit for r in readers for call in r.nodes):
        return None
    known = affine_lib.Statistics(
        unit.weight("moving_mean"), unit.weight("moving_variance")
    )
    return readers, known


# Layers in the place of BatchNormalization


def _replace(units, template, preserve, report):
    """Turn every BatchNormalization into another layer of the same name."""
    new = {}
    for unit in units:
        if not affine_lib.is_batch_norm(unit):
            continue
        cls, config = template.cls, None
        if template.function is not None:
            layer = template.function(unit.layer)
            if layer is None or layer is unit.layer:
                continue
            if not isinstance(layer, keras.layers.Layer):
                raise ValueError(
                    "Argument `norm` must return a Keras layer or None. "
                    f"Received: {layer!r} for layer '{unit.name}'"
                )
            cls, config = type(layer), config_of(layer)
            config["name"] = unit.name
        else:
            changes = {}
            if cls in affine_lib.NORMS:
                changes["axis"] = unit.config["axis"]
                if not template.is_given:
                    names = _SHARED_WITH_BATCH_NORM
                    # The scale of LpNorm makes up for its norm.
                    names += ("epsilon", "scale") if cls is NoisyBN else ()
                    changes.update({name: unit.config[name] for name in names})
            config = template.config(unit.name, unit.config["dtype"], **changes)
        affine = statistics = None
        if preserve:
            if cls in affine_lib.NORMS:
                affine = affine_lib.affine_of(unit)
                statistics = affine_lib.Statistics(
                    unit.weight("moving_mean"), unit.weight("moving_variance")
                )
            else:
                report.changed.append(unit.name)
        unit.become(cls, config, {})
        if cls in affine_lib.NORMS:
            new[unit] = affine, statistics
    return new


# Statistics


def _calibrate(model, new, data, preserve, report):
    if not new:
        return
    layers = [unit.made for unit in new]
    if data is not None and not preserve:
        recalibrate(model, data)
        return
    if not preserve:
        return
    measured = [None] * len(layers)
    if data is not None:
        measured = measure(model, layers, data)
    for (unit, (affine, statistics)), layer, found in zip(
        new.items(), layers, measured
    ):
        if found is None:
            guessed = affine_lib.norm_is_guessed(unit.cls, unit.config)
            if statistics.weight == 0 or guessed:
                report.empty.append(unit.name)
            continue
        arrays, met = affine_lib.weights_for(unit.cls, unit.config, affine, found)
        if not met and unit.name not in report.changed:
            report.changed.append(unit.name)
        for variable in layer.weights:
            if variable.name in arrays:
                variable.assign(
                    keras.ops.cast(np.asarray(arrays[variable.name]), variable.dtype)
                )
