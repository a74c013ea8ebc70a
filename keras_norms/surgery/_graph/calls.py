"""The calls of a model as Keras recorded them."""

from typing import Any, NamedTuple

import keras
from keras import tree

from keras_norms import _keras
from keras_norms._checks import arguments


class Call(NamedTuple):
    """One call as Keras recorded it, on symbolic tensors.

    Attributes:
        operation: The layer or operation that is called.
        args, kwargs: What it is called with.
        outputs: A list of the tensors that it makes, or any structure of them.
    """

    operation: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: Any


def calls_of(model):
    """The inputs, the calls in an order in which they can be run, and the outputs."""
    inputs, nodes, outputs = _keras.structure_of(functional_of(model))
    return inputs, list(map(call_of, nodes)), outputs


def call_of(node):
    """What a node of Keras records."""
    given = node.arguments
    return Call(node.operation, given.args, given.kwargs, node.outputs)


def is_graph(layer):
    """Whether `layer` is a model whose calls can be read."""
    if isinstance(layer, keras.Sequential):
        return _keras.functional_in(layer) is not None
    functional = _keras.Functional
    return isinstance(layer, functional) and type(layer).call is functional.call


def functional_of(model):
    """The Functional model in `model`, or an error that says why there is none."""
    if is_graph(model):
        is_sequential = isinstance(model, keras.Sequential)
        return _keras.functional_in(model) if is_sequential else model
    if isinstance(model, keras.Sequential):
        raise ValueError(
            "Argument `model` must be built: give it a `keras.Input`, or call it "
            f"on data. Received: Sequential model '{model.name}' without an input "
            "shape"
        )
    wanted = "Argument `model` must be a Functional or Sequential Keras model"
    if not isinstance(model, keras.Model):
        raise ValueError(f"{wanted}. Received: model={arguments.shown(model)}")
    raise ValueError(
        f"{wanted}: the layers of a subclassed model cannot be seen from outside. "
        f"Received: model '{model.name}' of class {type(model).__name__}"
    )


def without_automatic_masks(call):
    """The keyword arguments of a call, less masks that Keras fills in by itself."""
    kwargs = dict(call.kwargs)
    if "mask" in kwargs:
        first = call.args[0] if call.args else None
        masks = map(_keras.get_keras_mask, tree.flatten(first))
        automatic = {id(None), *map(id, masks)}
        if all(id(leaf) in automatic for leaf in tree.flatten(kwargs["mask"])):
            del kwargs["mask"]
    return {name: value for name, value in kwargs.items() if value is not None}
