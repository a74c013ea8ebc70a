"""Moving affine maps of channels through a graph, into the kernels that can take them.

A map unit is a unit in a dictionary of maps: at inference it is `a * x + b`. Moves are
planned over all calls of the layers they touch, then done at once or not at all: a
shared layer has one kernel, so all its calls must agree.
"""

import numpy as np
from keras import layers

from keras_norms.surgery._graph import affine as affine_lib
from keras_norms.surgery._graph import linear
from keras_norms.surgery._graph.affine import Affine


def of_any_dimension(name):
    """The classes of layers of this name in one, two and three dimensions."""
    return tuple(getattr(layers, f"{name}{n}D") for n in (1, 2, 3))


# Identities at inference.
NOISE = (
    *(layers.Dropout, *of_any_dimension("SpatialDropout"), layers.AlphaDropout),
    *(layers.GaussianNoise, layers.GaussianDropout),
    *(layers.ActivityRegularization, layers.Identity),
)
ZERO_PADDING = of_any_dimension("ZeroPadding")
CROPPING = of_any_dimension("Cropping")
UPSAMPLING = of_any_dimension("UpSampling")
MAX = of_any_dimension("MaxPooling")
AVERAGE = of_any_dimension("AveragePooling")
GLOBAL_MAX = of_any_dimension("GlobalMaxPooling")
GLOBAL_AVERAGE = of_any_dimension("GlobalAveragePooling")
_COMMUTING = (
    *(*NOISE, *ZERO_PADDING, *CROPPING, *UPSAMPLING, *MAX, *AVERAGE),
    *(*GLOBAL_MAX, *GLOBAL_AVERAGE),
    *(layers.Activation, layers.Reshape, layers.Flatten),
)


def take_out(unit):
    """Take all calls of a unit out of their graphs."""
    for node in list(unit.nodes):
        node.graph.remove(node)


def fold_backward(unit, maps, accept=None):
    """Move a map into the layers before it, if it fits. Returns whether it did.

    It then goes from `maps`, a dictionary from map units to their `Affine`. `accept` is
    a predicate of the units that take it; by default all that can.
    """
    plan = _Plan()
    for node in unit.nodes:
        axis = affine_lib.axis_of(unit, node.input.rank)
        if not _trace_backward(node.input, maps[unit], axis, maps, plan):
            return False
    if unit in plan.maps or not plan.covers_all_calls():
        return False
    if accept is not None and not all(map(accept, plan.maps)):
        return False
    for target, (affine, _) in plan.maps.items():
        if target in maps:
            maps[target] = affine.after(maps[target])
        else:
            linear.absorb_output(target, *affine)
    take_out(unit)
    del maps[unit]
    return True


def fold_forward(unit, maps, accept=None):
    """Move a map into the layers after it, as `fold_backward` does before it."""
    plan = _plan_forward([unit], maps, maps, accept)
    if plan is None:
        return False
    _apply_forward(plan, maps)
    for source in plan.sources:
        take_out(source)
        del maps[source]
    return True


def fold_scale_forward(unit, maps):
    """Move the scale of a map into the layers after it; x + b / a remains.

    That is what a zero-padded convolution allows: its border is 0 after the map, so
    that a shift must be made before the padding. In a channel of scale 0 the map
    remains. Returns the units that remain, with what they remain as, or `None`.
    """
    scales = {
        other: Affine(np.where(a == 0, 1.0, a), np.zeros_like(a))
        for other, (a, _) in maps.items()
    }
    plan = _plan_forward([unit], maps, scales, None)
    if plan is None:
        return None
    _apply_forward(plan, maps)
    return {
        source: Affine(*(v / scales[source].a for v in maps[source]))
        for source in plan.sources
    }


class _Plan:
    """Targets by unit: the map each takes, and the calls it was reached by."""

    def __init__(self, sources=()):
        self.maps, self.sources = {}, sources

    def add(self, node, affine):
        known, calls = self.maps.setdefault(node.unit, (affine, []))
        if not known.equals(affine):
            return False
        calls.append(node)
        return True

    def covers_all_calls(self):
        return all(
            len(calls) == len(unit.nodes) for unit, (_, calls) in self.maps.items()
        )


def _plan_forward(sources, maps, values, accept):
    """A plan that moves the `values` of sources forward, with all sources it needs."""
    while True:
        plan = _Plan(sources)
        for source in sources:
            for node in source.nodes:
                axis = affine_lib.axis_of(source, node.input.rank)
                affine = values[source]
                if not _trace_forward(node.output, affine, axis, maps, plan, accept):
                    return None
        if any(source in plan.maps for source in sources):
            return None
        if plan.covers_all_calls():
            return plan
        # A layer that is shared: what feeds its other calls must move too.
        feeders = [
            _feeding_map(node.input, maps)
            for target, (_, calls) in plan.maps.items()
            for node in target.nodes
            if node not in calls
        ]
        if any(feeder is None or feeder in sources for feeder in feeders):
            return None
        sources = [*sources, *dict.fromkeys(feeders)]


def _apply_forward(plan, maps):
    for target, (affine, _) in plan.maps.items():
        if target in maps:
            maps[target] = maps[target].after(affine)
        else:
            linear.absorb_input(target, *affine)


def _feeding_map(value, maps):
    node = value.node
    while node is not None:
        if node.unit in maps:
            return node.unit
        if node.unit.cls not in NOISE + ZERO_PADDING:
            return None
        node = node.input.node
    return None


def _trace_forward(value, affine, axis, maps, plan, accept):
    """Whether everything that reads `value` can take the map instead."""
    if value.is_output or not value.readers:
        return False
    for node in value.readers:
        if node.input is None or node.output is None:
            return False
        unit = node.unit
        if unit in maps:
            fits = affine_lib.axis_of(unit, value.rank) == axis
        elif linear.is_foldable(unit):
            fits = linear.channel_axis(unit, value.rank) == axis
            fits = fits and linear.can_absorb_input(unit, affine.b)
        else:
            moved = _through(node, affine, axis, forward=True)
            if moved is None or not _trace_forward(
                node.output, *moved, maps, plan, accept
            ):
                return False
            continue
        accepted = accept is None or accept(unit)
        if not (accepted and fits and plan.add(node, affine)):
            return False
    return True


def _trace_backward(value, affine, axis, maps, plan):
    """Whether what makes `value`, which nobody else reads, can take the map."""
    node = value.node
    if not value.is_private or node is None:
        return False
    unit = node.unit
    if unit.cls is layers.Concatenate and node.output is value:
        if unit.config["axis"] % value.rank != axis:
            return False
        sizes = [x.shape[axis] for x in node.inputs]
        if None in sizes:
            return False
        parts = [np.split(v, np.cumsum(sizes)[:-1]) for v in affine]
        return all(
            _trace_backward(x, Affine(a, b), axis, maps, plan)
            for x, a, b in zip(node.inputs, *parts)
        )
    if node.input is None or node.output is not value:
        return False
    if unit in maps:
        return affine_lib.axis_of(unit, value.rank) == axis and plan.add(node, affine)
    if linear.is_foldable(unit):
        return (
            linear.channel_axis(unit, value.rank) == axis
            and linear.can_absorb_output(unit, affine.b)
            and plan.add(node, affine)
        )
    moved = _through(node, affine, axis, forward=False)
    return moved is not None and _trace_backward(node.input, *moved, maps, plan)


def _through(node, affine, axis, forward):
    """The map and its axis on the other side of a layer, if that commutes with it."""
    cls = node.unit.cls
    if cls not in _COMMUTING or node.options:
        return None
    if cls in NOISE:
        return affine, axis
    if cls is layers.Activation:
        return (affine, axis) if linear.has_linear_activation(node.unit) else None
    config = node.unit.config
    read, made = node.input, node.output
    other = made if forward else read
    positive, shifts = np.all(affine.a > 0), np.any(affine.b)
    last = axis == (read if forward else made).rank - 1
    if cls is layers.Reshape and last and read.shape[-1] == made.shape[-1]:
        return affine, other.rank - 1
    if cls is layers.Flatten and last and forward:
        if config["data_format"] == "channels_first" and read.rank > 2:
            return None
        if None in read.shape[1:]:
            return None
        copies = int(np.prod(read.shape[1:-1]))
        return Affine(*(np.tile(v, copies) for v in affine)), made.rank - 1
    # The others treat positions and channels differently.
    channel = linear.channel_axis(node.unit, read.rank)
    own = channel if made.rank == read.rank else made.rank - 1
    if axis != (channel if forward else own):
        return None
    if cls in GLOBAL_AVERAGE or (cls in GLOBAL_MAX and positive):
        return affine, (own if forward else channel)
    commutes = (
        (cls in ZERO_PADDING and not shifts)
        or cls in CROPPING
        or (cls in UPSAMPLING and config.get("interpolation", "nearest") == "nearest")
        or (cls in MAX and positive)
        or (cls in AVERAGE and (config["padding"] == "valid" or not shifts))
    )
    return (affine, axis) if commutes else None
