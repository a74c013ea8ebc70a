"""The calls of layers and operations that a Functional or Sequential model recorded."""

from typing import Any, NamedTuple

import keras

from keras_norms import _keras
from keras_norms._checks import arguments


class Call(NamedTuple):
    """One call of a layer or operation as Keras recorded it, on symbolic tensors."""

    operation: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: Any  # a list of the tensors that it makes, or any structure of them


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


def calls_of(model):
    """The inputs, the calls in an order in which they can be run, and the outputs."""
    inputs, nodes, outputs = _keras.structure_of(functional_of(model))
    return inputs, list(map(call_of, nodes)), outputs


def functional_of(model):
    """The Functional model in `model`, or an error that says why there is none."""
    is_sequential = isinstance(model, keras.Sequential)
    if is_graph(model):
        return _keras.functional_in(model) if is_sequential else model
    if is_sequential:
        raise ValueError(
            "Argument `model` must be built: start it with a `keras.Input`, or call it "
            f"on data. Received: Sequential model '{model.name}' without an input "
            "shape"
        )
    wanted = "a Functional or Sequential Keras model"
    if not isinstance(model, keras.Model):
        raise arguments.wrong("model", wanted, model)
    raise ValueError(
        f"Argument `model` must be {wanted}: the layers of a subclassed model cannot "
        f"be seen from outside. Received: model '{model.name}' of class "
        f"{type(model).__name__}"
    )
