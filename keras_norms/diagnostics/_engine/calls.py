"""What layers read and write when a model is called."""

import contextlib
from typing import NamedTuple

import keras

from keras_norms import _keras
from keras_norms._types import Tensor
from keras_norms.diagnostics._engine.differentiation import drawing_from, randomness
from keras_norms.diagnostics._engine.model_loss import (
    ModelLoss,
    as_tensors,
    replacing_call,
)


class Call(NamedTuple):
    """One call of a layer: its first input, its output, the kernel that it used."""

    layer: keras.layers.Layer
    input: Tensor
    output: Tensor
    kernel: Tensor | None

    @property
    def mask(self) -> Tensor | None:
        """The mask of the output: a norm takes it from its input or as an argument."""
        return _keras.get_keras_mask(self.output)


def record(model, layers, x, training):
    """Record the calls of layers, in order, when the model is called on a batch.

    The model does not change. If a layer reads the output of another directly, its
    input is the same tensor, unless Keras casts it to the layer's dtype.
    """
    pure = ModelLoss(model, training=training)
    x, _ = as_tensors(model, x, None)
    calls = []

    def recording(layer):
        def call_with(x, call):
            output = call(x)
            # Here: a wrapper around the layer may have replaced it for this call.
            kernel = getattr(layer, "kernel", None)
            with _keras.without_autocast():
                kernel = getattr(kernel, "value", None)
            calls.append(Call(layer, x, output, kernel))
            return output

        return replacing_call(layer, call_with)

    with drawing_from(randomness()), contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(recording(layer))
        pure.outputs(*pure.values(), x)
    return calls
