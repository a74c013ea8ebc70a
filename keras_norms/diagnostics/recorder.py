"""What goes into and comes out of layers when a model is called."""

import contextlib
from typing import NamedTuple

import keras

from keras_norms import _keras
from keras_norms.diagnostics.differentiation import drawing_from, randomness
from keras_norms.diagnostics.model_loss import ModelLoss, as_tensors


class Call(NamedTuple):
    """One call of a layer, with its first input and its output, tensors."""

    layer: keras.layers.Layer
    input: object
    output: object


def record(model, layers, x, training):
    """The calls of layers when the model is called on a batch, in order.

    Nothing of the model changes. A layer that reads the output of another as it is has
    the same tensor as its input.

    Args:
        model: A built `keras.Model`.
        layers: List of layers in it.
        x: A batch of inputs.
        training: Boolean, whether layers run in training mode.

    Returns:
        List of `Call`.
    """
    if keras.backend.backend() == "jax":
        model.jax_state_sync()  # In `fit`, the trainer holds the state.
    x, _ = as_tensors(model, x, None)
    pure = ModelLoss(model, None, None, "input", training)
    calls = []
    with (
        drawing_from(randomness()),
        pure._scope([], []),
        contextlib.ExitStack() as stack,
    ):
        for layer in layers:
            stack.enter_context(_recording(layer, calls))
        pure._forward(x)
    return calls


def _recording(layer, calls):
    call = layer.call

    def recorded(*args, **kwargs):
        output = call(*args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()))
        calls.append(Call(layer, first, output))
        return output

    return _keras.replaced(layer, call=recorded)
