"""CBN layers before the linear layers, in the place of BatchNormalization."""

import functools

from keras_norms.surgery._convert.keras_norms import give_bias_before
from keras_norms.surgery._convert.placement import insertions
from keras_norms.surgery._graph import affine as affine_lib
from keras_norms.surgery._graph import linear, moves
from keras_norms.surgery._graph.units import Unit


def insert_cbn(graph, graphs, units, template, preserve):
    """Insert CBN layers and take BatchNormalization out.

    Args:
        graph: The graph of the whole model.
        graphs: Those of its graphs that are changed.
        units: The units that may be changed.
        template: `Template`.
        preserve: Whether the new layers take the maps of the old ones over.

    Returns:
        Dictionary from the new units to their map and to the statistics of their
        inputs; and the names of BatchNormalization layers that stay.
    """
    norms = {
        unit: affine_lib.is_called_plainly(unit)
        and not affine_lib.is_on_another_axis(graph, unit)
        for unit in units
        if affine_lib.is_batch_norm(unit)
    }
    kept = [unit.name for unit, goes in norms.items() if not goes]
    norms = [unit for unit, goes in norms.items() if goes]
    maps, statistics = {}, {}
    for place in insertions(graph, graphs, filter(linear.is_linear, units)):
        reader, shape = place.units[0], place.values[0].shape
        config = template.config(
            place.graph.free_name(f"{reader.name}_cbn"),
            linear.plain_dtype(reader),
            axis=-1 if place.axis == len(shape) - 1 else place.axis,
        )
        unit = Unit(cls=template.cls, config=config)
        for value, nodes in zip(place.values, place.readers):
            place.graph.insert(unit, value, nodes)
        maps[unit] = affine_lib.identity(shape[place.axis])
        statistics[unit] = affine_lib.unknown(shape[place.axis])
    cbns = list(maps)
    if preserve:
        _fold(norms, maps, statistics)
    else:
        for unit in norms:
            give_bias_before(unit)
            for node in list(unit.nodes):
                node.graph.remove(node)
    return {unit: (maps[unit], statistics[unit]) for unit in cbns}, kept


def _fold(norms, maps, statistics):
    """Fold each norm into the layer before it, or into the CBN after it."""
    cbns = list(maps)

    def can_take(target, affine):
        return target in cbns and affine_lib.can_be(target, affine)

    for unit in norms:
        maps[unit] = affine_lib.affine_of(unit)
    for unit in norms:
        if moves.fold_backward(unit, maps, accept=linear.is_unconstrained):
            continue
        heirs, affine = _heirs_of_statistics(unit, cbns), maps[unit]
        accept = functools.partial(can_take, affine=affine)
        if moves.fold_forward(unit, maps, accept):
            known = unit.weight("moving_mean"), unit.weight("moving_variance")
            statistics.update(dict.fromkeys(heirs, affine_lib.Statistics(*known)))
        else:
            affine_lib.become_channel_affine(unit, affine)
            del maps[unit]


def _heirs_of_statistics(unit, cbns):
    """The CBN layers that read what a BatchNormalization makes, and nothing else."""
    readers = unit.readers
    if not readers <= set(cbns):
        return set()
    if any(call.input.node.unit is not unit for r in readers for call in r.nodes):
        return set()
    return readers
