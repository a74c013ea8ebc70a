"""CBN layers before layers with a kernel, instead of BatchNormalization.

Not on the raw input of the model.
"""

from typing import NamedTuple

from keras import layers, tree

from keras_norms.layers.cbn import CBN
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.surgery._convert.replace import take_out
from keras_norms.surgery._graph import affine as affine_lib
from keras_norms.surgery._graph import linear, moves
from keras_norms.surgery._graph.graph import Graph, Node, Value
from keras_norms.surgery._graph.unit import Unit

_PADDING_OR_NOISE = moves.ZERO_PADDING + moves.NOISE
# What may stand between the input of a model and its first linear layer.
_PREPROCESSING = (
    *(*_PADDING_OR_NOISE, *moves.CROPPING, *moves.UPSAMPLING, layers.InputLayer),
    *(layers.Reshape, layers.Flatten, layers.Permute, layers.RepeatVector),
    *(layers.Concatenate, layers.Masking),
)
# What may stand between a CBN and a linear layer that needs no other one.
_PASSING_ON = (
    *(*_PADDING_OR_NOISE, *moves.CROPPING, *moves.UPSAMPLING, *moves.MAX),
    *(*moves.AVERAGE, *moves.GLOBAL_MAX, *moves.GLOBAL_AVERAGE),
    *(layers.Reshape, layers.Flatten, layers.Permute, layers.RepeatVector),
)
_PREPROCESSING_OPERATIONS = {
    *("Absolute", "Add", "Divide", "Multiply", "Negative", "Subtract", "TrueDivide"),
    *("Cast", "Concatenate", "ExpandDims", "Flip", "GetItem", "Moveaxis", "Pad"),
    *("Reshape", "Resize", "Squeeze", "Stack", "Swapaxes", "Transpose"),
}


def insert_cbn(report, graph, graphs, units, template, preserve):
    """Insert CBN layers in some graphs of a graph, and take BatchNormalization out."""
    norms = list(filter(affine_lib.is_batch_norm, units))
    kept = [
        unit
        for unit in norms
        if not affine_lib.is_called_plainly(unit)
        or affine_lib.is_on_another_axis(graph, unit)
    ]
    report.kept += [unit.name for unit in kept]
    norms = [unit for unit in norms if unit not in kept]
    there = [unit for unit in units if unit.cls is CBN]
    report.there += [unit.name for unit in there if not template.fits(unit)]
    raw, eligible = {}, set(filter(linear.is_linear, units))
    _mark_raw(graph, [True] * len(tree.flatten(graph.inputs)), raw)
    places = [place for one in graphs for place in _places(one, eligible, raw)]
    maps, statistics, of_frozen = {}, {}, set()
    for place in places:
        reader, shape = place.units[0], place.calls[0][0].shape
        config = template.config(
            place.graph.free_name(f"{reader.name}_cbn"),
            linear.plain_dtype(reader),
            axis=-1 if place.axis == len(shape) - 1 else place.axis,
        )
        unit = Unit(cls=template.cls, config=config)
        for value, readers in place.calls:
            place.graph.insert(unit, value, readers)
        maps[unit] = affine_lib.identity(shape[place.axis])
        statistics[unit] = affine_lib.unknown(shape[place.axis])
        if not any(each.layer.trainable for each in place.units):
            of_frozen.add(unit)
    if places:
        others = (NoisyBN, LpNorm, *affine_lib.OF_SAMPLES)
        report.beside += [unit.name for unit in units if unit.cls in others]
    heirs = {unit: _normalising_instead(unit, maps.keys()) for unit in norms}
    report.lost += [unit.name for unit in norms if not heirs[unit]]
    of_frozen -= {u for norm in norms if norm.layer.trainable for u in heirs[norm]}
    for unit in of_frozen:
        unit.configure(trainable=False)
    if preserve:
        if all(map(_is_fresh, norms)):
            report.fresh += [unit.name for unit in norms]
        _fold(norms, maps, statistics)
    else:
        take_out(norms)
    report.new |= {unit: (maps[unit], statistics[unit]) for unit in statistics}


def _normalising_instead(norm, cbns):
    """The CBN layers that normalise what a norm does.

    `None` is among them if its output leaves the model or enters another one, where it
    is not known what normalises it.
    """
    values = [value for node in norm.nodes for value in node.outputs]
    found, met = set(), set()
    while values:
        value = values.pop()
        for node in value.readers:
            unit = node.unit
            if unit in cbns:
                found.add(unit)
            elif unit.graph is not None:
                found.add(None)
            elif node not in met and _is_elementwise(unit, value.shape):
                met.add(node)
                values += node.outputs
        if value.is_output:
            found.add(None)
    return found


def _is_elementwise(unit, shape):
    """Whether a layer has no kernel: only vectors, or weights as large as a sample."""
    shapes = [weight.shape for weight in unit.layer.weights] if unit.layer else []
    return all(
        len(weight) < 2
        or all(size in (1, dim) for size, dim in zip(weight[::-1], shape[:0:-1]))
        for weight in shapes
    )


def _is_fresh(norm):
    """Whether a norm has its first statistics: those of no batch."""
    mean, variance = norm.weight("moving_mean"), norm.weight("moving_variance")
    return not mean.any() and (variance == 1).all()


def _fold(norms, maps, statistics):
    """Fold each norm into the layer before it, or into the CBN after it."""
    cbns = set(maps)
    maps |= {unit: affine_lib.affine_of(unit) for unit in norms}
    for unit in norms:
        if moves.fold_backward(unit, maps, linear.is_unconstrained, with_bias=True):
            continue
        heirs, affine = _heirs_of_statistics(unit, cbns), maps[unit]

        def can_take(target, affine=affine):
            return target in cbns and affine_lib.can_be(target, affine)

        if moves.fold_forward(unit, maps, accept=can_take):
            known = unit.weight("moving_mean"), unit.weight("moving_variance")
            statistics.update(dict.fromkeys(heirs, affine_lib.Statistics(*known)))
        else:
            affine_lib.become_channel_affine(unit, affine)
            del maps[unit]


def _heirs_of_statistics(unit, cbns):
    """The CBN layers that read what a BatchNormalization makes, and nothing else."""
    readers = unit.readers
    calls = [call for reader in readers for call in reader.nodes]
    if readers <= cbns and all(call.input.node.unit is unit for call in calls):
        return readers
    return set()


class _Insertion(NamedTuple):
    """One CBN: the linear layers that read it, named after the first.

    `calls` has the tensors that it is called on, each with the readers of the result.
    """

    graph: Graph
    axis: int
    units: list[Unit]
    calls: list[tuple[Value, list[Node]]]


def _mark_raw(graph, flags, raw):
    """Mark tensors that are the raw input, preprocessed at most, in all calls."""
    inputs = {id(v): flag for v, flag in zip(tree.flatten(graph.inputs), flags)}
    for node in graph.nodes:
        arguments = [raw[id(v)] for v in node.inputs]
        if node.unit.graph is not None:
            results = _mark_raw(node.unit.graph, arguments, raw)
        else:
            clean = all(arguments) and _is_preprocessing(node.unit)
            results = [inputs.get(id(v), clean) for v in node.outputs]
        for value, result in zip(node.outputs, results):
            raw[id(value)] = raw.get(id(value), True) and result
    return [raw[id(v)] for v in tree.flatten(graph.outputs)]


def _is_preprocessing(unit):
    if unit.layer is None:
        return unit.cls.__name__ in _PREPROCESSING_OPERATIONS
    if unit.cls is layers.Activation:
        return linear.has_linear_activation(unit)
    # Rescaling, Normalization, Resizing, random augmentation, encodings.
    return (
        issubclass(unit.cls, _PREPROCESSING)
        or ".layers.preprocessing." in unit.cls.__module__
    )


def _places(graph, eligible, raw):
    places = {}  # By the tensor, and the axis of its channels.
    for node in graph.nodes:
        if node.unit not in eligible or node.input is None or raw[id(node.input)]:
            continue
        value, reader = _before_padding(node.input, eligible, node)
        if _is_normalised(value):
            continue
        axis = linear.channel_axis(node.unit, node.input.rank)
        new = _Insertion(graph, axis, [], [(value, [])])
        place = places.setdefault((id(value), axis), new)
        place.units.append(node.unit)
        ((_, readers),) = place.calls
        if reader not in readers:
            readers.append(reader)
    # A shared layer has one CBN for all its calls. Places that share a layer are one.
    merged = []
    for place in places.values():
        for other in list(merged):
            if other.axis == place.axis and set(other.units) & set(place.units):
                merged.remove(other)
                units, calls = other.units + place.units, other.calls + place.calls
                place = _Insertion(graph, place.axis, units, calls)
        merged.append(place)
    return merged


def _is_normalised(value):
    """Whether a CBN made a tensor, or what it is reshaped or pooled from."""
    while issubclass(value.node.unit.cls, _PASSING_ON) and value.node.input is not None:
        value = value.node.input
    return value.node.unit.cls is CBN


def _before_padding(value, eligible, reader):
    """The tensor before zero padding and Dropout, and the first of these calls."""
    node = value.node
    if _is_padding_or_noise(node) and _only_linear(value, eligible):
        return _before_padding(node.input, eligible, node)
    return value, reader


def _only_linear(value, eligible):
    """Whether all that reads a tensor, past padding and noise, is eligible."""
    return not value.is_output and all(
        node.unit in eligible
        or (_is_padding_or_noise(node) and _only_linear(node.output, eligible))
        for node in value.readers
    )


def _is_padding_or_noise(node):
    is_one = node.input is not None and node.output is not None
    return is_one and node.unit.cls in _PADDING_OR_NOISE
