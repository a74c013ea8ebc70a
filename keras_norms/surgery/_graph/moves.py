"""Moving affine maps of channels through a graph, into the kernels that can take them.

A map unit is a unit in a dictionary of maps: at inference it is `a * x + b`. Moves are
planned over all calls of the layers they touch, then done at once or not at all: a
shared layer has one kernel, so all its calls must agree.
"""

import keras
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


def take_out(unit):
    """Take all calls of a unit out of their graphs."""
    for node in list(unit.nodes):
        node.graph.remove(node)


def fold_backward(unit, maps, accept=None, with_bias=False):
    """Move a map into the layers before it, if it fits. Returns whether it did.

    It then goes from `maps`, a dictionary from map units to their `Affine`. `accept` is
    a predicate of the units that take it; by default all that can. `with_bias` gives
    layers that take it a bias, even where the map has no shift.
    """
    plan = _Plan(maps, accept)
    for node in unit.nodes:
        axis = affine_lib.axis_of(unit, node.input.rank)
        if not plan.goes_backward(node.input, maps[unit], axis):
            return False
    if unit in plan.targets or not plan.covers_all_calls():
        return False
    for target, (affine, _) in plan.targets.items():
        if target in maps:
            maps[target] = affine.after(maps[target])
        else:
            linear.absorb_output(target, *affine)
            if with_bias:
                linear.add_missing_bias(target)
    take_out(unit)
    del maps[unit]
    return True


def fold_forward(unit, maps, accept=None, with_bias=False):
    """Move a map into the layers after it, as `fold_backward` does before it."""
    moved = _move_forward([unit], maps, maps, accept, with_bias)
    for source in moved:
        take_out(source)
        del maps[source]
    return bool(moved)


def fold_scale_forward(unit, maps):
    """Move the scale of a map into the layers after it; x + b / a remains.

    That is what a zero-padded convolution allows: its border is 0 after the map, so
    that a shift must be made before the padding. In a channel of scale 0, or so small
    that b / a is too large for the dtype, the map remains. Returns what remains of
    units, which then go from `maps`.
    """
    scales = {}
    for other, affine in maps.items():
        dtype = keras.dtype_policies.get(other.config["dtype"]).compute_dtype
        fits = affine.is_scaled_shift(2.0**15 if dtype == "float16" else 1e30)
        scale = np.where(fits, affine.a, 1.0)
        scales[other] = Affine(scale, np.zeros_like(scale))
    return {
        source: Affine(*(v / scales[source].a for v in maps.pop(source)))
        for source in _move_forward([unit], maps, scales)
    }


def _move_forward(sources, maps, values, accept=None, with_bias=False):
    """Move the `values` of sources forward, and of those that must move with them.

    Returns all that moved, or an empty list.
    """
    while True:
        plan = _Plan(maps, accept)
        for source in sources:
            for node in source.nodes:
                axis = affine_lib.axis_of(source, node.input.rank)
                if not plan.goes_forward(node.output, values[source], axis):
                    return []
        if any(source in plan.targets for source in sources):
            return []
        if plan.covers_all_calls():
            break
        # A layer that is shared: what feeds its other calls must move too.
        feeders = [
            _feeding_map(node.input, maps)
            for target, (_, calls) in plan.targets.items()
            for node in target.nodes
            if node not in calls
        ]
        if any(feeder is None or feeder in sources for feeder in feeders):
            return []
        sources = [*sources, *dict.fromkeys(feeders)]
    for target, (affine, _) in plan.targets.items():
        if target in maps:
            maps[target] = maps[target].after(affine)
        else:
            linear.absorb_input(target, *affine)
            if with_bias:
                linear.add_missing_bias(target)
    return sources


def _feeding_map(value, maps):
    unit = value.node.unit
    if unit in maps:
        return unit
    passes = unit.cls in NOISE + ZERO_PADDING and not value.node.always_trains
    return _feeding_map(value.node.input, maps) if passes else None


class _Plan:
    """`targets`: the map that each unit takes, and the calls that it was reached by."""

    def __init__(self, maps, accept):
        self.maps, self.accept, self.targets = maps, accept, {}

    def covers_all_calls(self):
        return all(
            len(calls) == len(unit.nodes) for unit, (_, calls) in self.targets.items()
        )

    def goes_forward(self, value, affine, axis):
        """Whether everything that reads `value` can take the map instead."""
        if value.is_output or not value.readers:
            return False
        return all(self._takes(node, affine, axis, True) for node in value.readers)

    def goes_backward(self, value, affine, axis):
        """Whether what makes `value`, which nobody else reads, can take the map."""
        node = value.node
        if not value.is_private or node.output is not value:
            return False
        if node.unit.cls is not layers.Concatenate:
            return self._takes(node, affine, axis, False)
        sizes = [x.shape[axis] for x in node.inputs]
        if node.unit.config["axis"] % value.rank != axis or None in sizes:
            return False
        parts = [np.split(v, np.cumsum(sizes)[:-1]) for v in affine]
        return all(
            self.goes_backward(x, Affine(a, b), axis)
            for x, a, b in zip(node.inputs, *parts)
        )

    def _takes(self, node, affine, axis, forward):
        """Whether a call, or what is on the other side of it, can take the map."""
        unit, read, made = node.unit, node.input, node.output
        if read is None or made is None:
            return False
        rank = (read if forward else made).rank
        if unit in self.maps:
            return affine_lib.axis_of(unit, rank) == axis and self._add(node, affine)
        if linear.is_foldable(unit):
            return (
                linear.channel_axis(unit, rank) == axis
                and linear.can_absorb(unit, affine.b, as_input=forward)
                and self._add(node, affine)
            )
        moved = _through(node, affine, axis, forward)
        if moved is None:
            return False
        if forward:
            return self.goes_forward(made, *moved)
        return self.goes_backward(read, *moved)

    def _add(self, node, affine):
        known, calls = self.targets.setdefault(node.unit, (affine, []))
        calls.append(node)
        accepted = self.accept is None or self.accept(node.unit)
        return accepted and np.array_equal(known, affine)


def _through(node, affine, axis, forward):
    """The map and its axis on the other side of a layer, if that commutes with it."""
    unit, read, made = node.unit, node.input, node.output
    # Noise that is always there is no identity.
    if node.options or node.always_trains or unit.layer is None:
        return None
    cls, layer = unit.cls, unit.layer
    if cls in NOISE or (
        cls is layers.Activation and linear.has_linear_activation(unit)
    ):
        return affine, axis
    positive, shifts = np.all(affine.a > 0), np.any(affine.b)
    last = axis == (read if forward else made).rank - 1
    if cls is layers.Reshape and last and read.shape[-1] == made.shape[-1]:
        return affine, (made if forward else read).rank - 1
    if cls is layers.Flatten and last and forward:
        is_moved = layer.data_format == "channels_first" and read.rank > 2
        if is_moved or None in read.shape[1:]:
            return None
        copies = int(np.prod(read.shape[1:-1]))
        return Affine(*(np.tile(v, copies) for v in affine)), made.rank - 1
    # The others treat positions and channels differently.
    channel = linear.channel_axis(unit, read.rank)
    own = channel if made.rank == read.rank else made.rank - 1
    if axis != (channel if forward else own):
        return None
    if cls in GLOBAL_AVERAGE or (cls in GLOBAL_MAX and positive):
        return affine, (own if forward else channel)
    commutes = (
        (cls in ZERO_PADDING and not shifts)
        or cls in CROPPING
        or (
            cls in UPSAMPLING
            and getattr(layer, "interpolation", "nearest") == "nearest"
        )
        or (cls in MAX and positive)
        or (cls in AVERAGE and (layer.padding == "valid" or not shifts))
    )
    return (affine, axis) if commutes else None
