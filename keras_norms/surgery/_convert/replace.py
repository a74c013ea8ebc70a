"""Replace norms by others of the same name, or remove them."""

import math

import keras
import numpy as np

from keras_norms.layers.cbn import CBN
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.surgery._graph import affine as affine_lib
from keras_norms.surgery._graph import linear, moves
from keras_norms.surgery._graph.affine import OF_SAMPLES, Affine
from keras_norms.surgery._graph.remake import config_of

KERAS_NORMS = (keras.layers.BatchNormalization, *OF_SAMPLES)
# Wu and He, Group Normalization, ECCV 2018, have 32 groups, and 16 channels in some.
_MOST_GROUPS, _LEAST_CHANNELS = 32, 4


def replace_norms(report, units, template):
    """Turn every BatchNormalization into another layer of the same name."""
    for unit in filter(affine_lib.is_batch_norm, units):
        if template.function is not None:
            layer = template.function(unit.layer)
            if layer is None or layer is unit.layer:
                continue
            if not isinstance(layer, keras.layers.Layer):
                raise ValueError(
                    "Argument `norm` must return a Keras layer or None. "
                    f"Received: {layer!r} for layer '{unit.name}'"
                )
            cls, config = type(layer), {**config_of(layer), "name": unit.name}
            if not unit.layer.trainable:
                config["trainable"] = False
        else:
            cls, own = template.cls, {}
            if cls in affine_lib.NORM_CLASSES:
                own = {**_own_settings(unit, template), "axis": unit.config["axis"]}
            dtype, trainable = unit.config["dtype"], unit.layer.trainable
            config = template.config(unit.name, dtype, trainable, **own)
        if cls in affine_lib.NORM_CLASSES:
            report.new[unit] = _map_of(unit)
        else:
            report.changed.append(unit.name)
        unit.become(cls, config, {}, unit.is_frozen)


def place_keras_norms(report, units, template, preserve):
    """Turn norms into those of Keras that a template asks for."""
    to_samples = template.cls in OF_SAMPLES
    for unit in filter(_is_norm, units):
        of_samples = unit.cls in OF_SAMPLES
        is_same = affine_lib.is_batch_norm(unit) and template.is_name
        if (to_samples and of_samples) or (not to_samples and is_same):
            continue
        axis = _axis_of(unit)
        settings = None
        if axis is not None and affine_lib.is_called_plainly(unit):
            settings = _settings_for(unit, template, axis) if to_samples else {}
        if settings is None:
            report.kept.append(unit.name)
            continue
        affine, statistics = _map_of(unit)
        if to_samples or of_samples:
            report.changed.append(unit.name)
        arrays = _carried(unit, affine, statistics, template.cls) if preserve else {}
        own = {**_own_settings(unit, template), **settings, "axis": axis}
        dtype, trainable = linear.plain_dtype(unit), unit.layer.trainable
        config = template.config(unit.name, dtype, trainable, **own)
        for node in unit.nodes:
            node.kwargs.pop("training", None)  # Some take none.
        unit.become(template.cls, config, arrays, unit.is_frozen)
        if of_samples:
            report.unknown.append(unit)
        elif not to_samples:
            report.new[unit] = affine, statistics


def remove_norms(report, units, preserve):
    """Take all norms out, those of samples too.

    With `preserve=True` their scales and shifts stay, in the layers next to them or as
    layers of their own.
    """
    maps = {}
    for unit in filter(_is_norm, units):
        axis = _axis_of(unit)
        if axis is None or not affine_lib.is_called_plainly(unit):
            report.kept.append(unit.name)
            continue
        maps[unit], _ = _map_of(unit)
        if unit.cls in OF_SAMPLES:
            report.changed.append(unit.name)
            # The map of channels that it is after normalising.
            config = {"name": unit.name, "dtype": unit.config["dtype"], "axis": axis}
            config["trainable"] = unit.layer.trainable
            unit.become(keras.layers.BatchNormalization, config, {})
    if not preserve:
        take_out(maps)
        return
    for unit in list(maps):
        for move in (moves.fold_backward, moves.fold_forward):
            if unit in maps:
                move(unit, maps, linear.is_unconstrained, with_bias=True)
    for unit, affine in maps.items():
        affine_lib.become_channel_affine(unit, affine)


def take_out(units):
    """Take norms out. The layers before them get the bias that the norms had."""
    for unit in units:
        for node in unit.nodes:
            if unit.cls is not CBN:
                linear.add_missing_bias(node.input.node.unit)
        moves.take_out(unit)


def _of_last_axis():
    """Norms of Keras (3.12 to 3.15) that fail or are wrong along other axes."""
    norms = [keras.layers.RMSNormalization]
    if keras.backend.backend() == "torch":
        norms.append(keras.layers.LayerNormalization)
    return norms


def _is_norm(unit):
    return affine_lib.has_statistics(unit) or unit.cls in OF_SAMPLES


def _axis_of(unit):
    """The one axis of the channels as the layer has it, or `None`."""
    axis = unit.config["axis"]
    if not isinstance(axis, (list, tuple)):
        return axis
    return axis[0] if len(axis) == 1 else None


def _channels_of(unit):
    value = unit.nodes[0].input
    return value.shape[_axis_of(unit) % value.rank]


def _map_of(unit):
    """The map of a norm at inference, and the statistics of its input."""
    if unit.cls not in OF_SAMPLES:
        return affine_lib.affine_of(unit), affine_lib.statistics_of(unit)
    affine = affine_lib.identity(_channels_of(unit))
    is_rms = unit.cls is keras.layers.RMSNormalization
    gamma, beta = unit.weight("scale" if is_rms else "gamma"), unit.weight("beta")
    gamma = affine.a if gamma is None else gamma
    beta = affine.b if beta is None else beta
    return Affine(gamma, beta), affine_lib.unknown(len(gamma))


def _carried(unit, affine, statistics, cls):
    """Gamma and beta: the deviation and the mean of what the old norm makes."""
    gamma, beta = affine
    if unit.cls not in OF_SAMPLES:
        gamma = affine.a * np.sqrt(statistics.variance + unit.config["epsilon"])
        beta = affine.b + affine.a * statistics.mean
    if cls is keras.layers.RMSNormalization:
        return {"scale": gamma}
    return {"gamma": gamma, "beta": beta}


def _own_settings(unit, template):
    """The settings that a new norm takes from the old one, if none were given."""
    cls, names = template.cls, {"epsilon"}
    if template.is_given:
        return {}
    if cls is not keras.layers.RMSNormalization and unit.cls is not CBN:
        kinds = ("initializer", "regularizer", "constraint")
        names |= {f"{name}_{kind}" for name in ("beta", "gamma") for kind in kinds}
        names |= {"center", "scale"}
        names |= {"momentum"} if cls in affine_lib.NORM_CLASSES else set()
    if cls is LpNorm:
        names -= {"epsilon", "scale"}  # Its scale makes up for its norm.
    own = {name: unit.config[name] for name in names if name in unit.config}
    if cls in (NoisyBN, LpNorm):  # They refuse values that BatchNormalization takes.
        if not 0 <= own.get("momentum", 0) < 1:
            del own["momentum"]
        if own.get("epsilon", 1) <= 0:
            del own["epsilon"]
    return own


def _settings_for(unit, template, axis):
    """The number of groups if the template has none; `None` if the norm cannot be here.

    A single number normalised alone is 0. Some norms of Keras are right on the last
    axis only.
    """
    rank = unit.nodes[0].input.rank
    if template.cls in _of_last_axis() and axis % rank != rank - 1:
        return None
    size, settings = _channels_of(unit), {}
    if template.cls is keras.layers.GroupNormalization:
        groups = template.keywords.get("groups", 0)
        if not groups:
            fits = range(1, min(_MOST_GROUPS, size // _LEAST_CHANNELS) + 1)
            groups = max((g for g in fits if size % g == 0), default=1)
            settings = {"groups": groups}
        size = 1 if groups == -1 else size // groups
    for node in unit.nodes:
        positions = list(node.input.shape[1:])
        del positions[axis % node.input.rank - 1]
        if size * math.prod(n for n in positions if n) == 1 and None not in positions:
            return None
    return settings
