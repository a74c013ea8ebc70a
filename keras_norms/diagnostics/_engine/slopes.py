"""Gradients at the input of a layer, of the loss and of terms in a layer's output."""

import numpy as np
from keras import ops

from keras_norms.diagnostics._engine.differentiation import (
    compiler,
    differentiate,
    drawing_from,
)
from keras_norms.diagnostics._engine.model_loss import intercepting
from keras_norms.diagnostics._engine.objective import Objective


class Slopes(Objective):
    """The loss as a function of `X`, with terms added that are functions of `Y`.

    Args:
        model, x, y, loss, training: See `Objective`.
        layer: The layer whose output is `Y`.
        source: The layer whose input is `X`; `layer` if `None`.

    Attributes:
        inputs, outputs: Arrays, `X` and `Y` for the batch.
    """

    def __init__(self, model, x, y, loss, layer, source, training):
        self._layer = layer
        source = layer if source is None else source
        super().__init__(
            model, x, y, loss, layer=source, side="input", training=training
        )
        self.inputs = self.unflatten(self.start)
        self._after = Objective(model, x, y, loss, layer=layer, training=training)
        self.outputs = self._after.unflatten(self._after.start)
        self._slope = compiler(model)(self._slope_of_sum)

    def at_input(self, disturbance=0.0, loss=1.0):
        """Compute `d(loss * L + <disturbance, Y>) / dX`, float64.

        It is the gradient of any term whose slope at `Y` is `disturbance`.
        """
        dtype = self.outputs.dtype
        disturbance = np.broadcast_to(disturbance, self.outputs.shape).astype(dtype)
        loss, disturbance = map(
            ops.convert_to_tensor, (np.asarray(loss, dtype), disturbance)
        )
        with drawing_from(self._randomness):
            start = self._tensors("point", None)
            gradient = self._slope(start, loss, disturbance, self._state, *self._batch)
        return np.array(ops.convert_to_numpy(gradient)).astype("float64")

    def at_output(self):
        """Compute `dL/dY`, float64."""
        gradient = self._after.value_and_grad()[1]
        return self._after.unflatten(gradient).astype("float64")

    def hessian_at(self, output):
        """Compute the mean Hessian over samples which all have one output."""
        features = len(output)
        tile = np.ones((len(self.outputs), 1))
        point = self._after.flatten(tile * output)
        columns = [
            self._after.hessian_vector_product(
                self._after.flatten(tile * direction), point
            )
            for direction in np.eye(features)
        ]
        columns = [self._after.unflatten(column).sum(0) for column in columns]
        return np.array(columns, "float64").T

    def _slope_of_sum(self, values, weight, disturbance, state, x, y):
        def weighted(values):
            seen = []
            with intercepting(self._layer, on_output=lambda y: seen.append(y) or y):
                loss = self._program.pure(values, state, x, y)
            term = ops.sum(disturbance * ops.cast(seen[0], disturbance.dtype))
            return weight * ops.cast(loss, weight.dtype) + term

        return ops.cast(differentiate(weighted, values)[1][0], self.start.dtype.name)
