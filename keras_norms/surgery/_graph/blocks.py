"""Layers inside layers: the `call` of a block as the calls that it makes.

A block is a custom layer with layers in it, or a subclassed model. Called with symbolic
tensors, its `call` calls these layers with symbolic tensors too, and Keras records
that. In the graph of a model these calls replace the block, with the same layers.
Nested blocks are entered too.

A block stays if its `call` reads variables itself, changes state, adds losses, or
depends on anything else than its tensors. Random data show that the values are equal.
"""

import collections
import inspect
import warnings

import keras

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms.layers.fused_cbn import FusedCBN
from keras_norms.surgery._graph import linear
from keras_norms.surgery._graph.affine import NORM_CLASSES
from keras_norms.surgery._graph.calls import functional_of, is_graph
from keras_norms.surgery._graph.graph import Graph
from keras_norms.surgery._graph.remake import is_of
from keras_norms.surgery._graph.trace import Tracer

NORMALIZING = (*NORM_CLASSES, *linear.WRAPPERS, FusedCBN)
# Bases that do not say how a layer calls what is in it.
_BASES = (
    *(keras.layers.Layer, keras.layers.Wrapper),
    *(keras.Model, keras.Sequential, _keras.Functional),
)

_SHOWN = 10  # names of layers in a warning


def graph_of(model, caller, inline, holding=NORMALIZING + linear.PLAIN, skip=None):
    """The graph of a model, with the calls inside its blocks.

    In the name of `caller` it warns of blocks that stay and hold a layer of the classes
    `holding`. Blocks that match `skip` are not entered.
    """
    arguments.boolean("inline", inline)
    if not inline or not isinstance(model, keras.Model):
        return Graph(model)
    inside = _keras.layers_of(model)
    blocks = [
        x for x in inside if is_block(x) and (x is model or not _is_skipped(skip, x))
    ]
    left, count = {}, -1
    while len(left) > count:  # A block stays in all of its calls, or in none.
        count = len(left)
        tracer = Tracer(blocks, inside, left)
        with tracer.entering():
            if is_graph(model):
                tracer.read(model)
            elif model in blocks and model.built:
                tracer.read_subclassed(model)
    if not is_graph(model) and id(model) not in tracer.traced:
        try:
            functional_of(model)
        except ValueError as e:
            reason = left.get(id(model), (None, "it is not built"))[1]
            raise ValueError(
                f"{e}. Its `call` cannot be traced: {reason}. Call it on data first, "
                "or pass `keras.Model(inputs, model(inputs))` with symbolic inputs"
            ) from e
    if not is_graph(model) and (names := _more_arguments(model)):
        warnings.warn(
            f"{caller}: `call` is read with the defaults of its arguments {names}. "
            "A new model does not take them.",
            stacklevel=3,
        )
    graph = Graph(model, traced=tracer.traced)
    _make_names_unique(graph, blocks)
    named = [
        f"'{block.name}' ({type(block).__name__}): {reason}"
        for block, reason in left.values()
        if id(block) in graph.units and _keras.layers_of(block, holding)
    ]
    if named:
        warnings.warn(
            f"{caller}: These layers stay, with all layers inside, because their "
            f"`call` cannot be traced: {'; '.join(named)}.",
            stacklevel=3,
        )
    return graph


def _more_arguments(model):
    """Optional arguments of `call` beside the inputs that a model was built for."""
    count = len(_keras.shapes_built_for(model))
    more = list(inspect.signature(model.call).parameters.values())[count:]
    return [
        each.name
        for each in more
        if each.default is not each.empty and each.name not in ("training", "mask")
    ]


def is_block(layer):
    """Whether it is a custom layer with layers inside that surgery knows."""
    if is_graph(layer) or type(layer) is keras.Sequential:
        return False
    for cls in type(layer).__mro__:
        is_known = is_of(cls, "keras", "keras_norms") and cls not in _BASES
        if is_known and issubclass(cls, keras.layers.Layer):
            return False
    kinds = NORMALIZING + linear.PLAIN
    return bool(_keras.layers_of(layer, kinds, include_self=False))


def warn_of_layers(caller, parts):
    """Warn of layers in the name of `caller`. `parts`: texts with `{}`, and names."""
    said = [text.format(_listed(names)) for text, names in parts.items() if names]
    if said:
        warnings.warn(f"{caller}: {' '.join(said)}", stacklevel=3)


def _listed(names):
    more = len(names) - _SHOWN
    return f"{names[:_SHOWN]} and {more} more" if more > 0 else f"{names}"


def _is_skipped(skip, layer):
    if callable(skip):
        return bool(skip(layer))
    # `convert` checks what else it may be.
    is_collection = isinstance(skip, (list, tuple, set, frozenset))
    return layer.name in skip if is_collection else layer.name == skip


def _make_names_unique(graph, blocks):
    """Put the name of the block before names that occur more than once."""
    owners = {
        id(layer): block
        for block in blocks
        for layer in _keras.layers_directly_in(block)
    }
    for one in graph.walk():
        units = list(dict.fromkeys(node.unit for node in one.nodes))
        count = collections.Counter(unit.name for unit in units)
        for unit in units:
            owner = owners.get(id(unit.source))
            while count[unit.name] > 1 and owner is not None:
                unit.rename(f"{owner.name}_{unit.name}")
                count[unit.name] += 1
                owner = owners.get(id(owner))
        seen = set()
        for unit in units:
            if unit.name in seen:
                unit.rename(one.free_name(unit.name))
            seen.add(unit.name)
