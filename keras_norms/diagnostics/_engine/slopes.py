"""The gradient at a layer's input of the loss and of terms in the layer's output."""

import numpy as np
from keras import ops

from keras_norms._checks.models import check_model
from keras_norms.diagnostics._engine import differentiation
from keras_norms.diagnostics._engine.calls import record
from keras_norms.diagnostics._engine.model_loss import replacing_call
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.reading import find_layer, float64


class Slopes(Objective):
    """The loss as a function of `X`, with terms added that are functions of `Y`.

    `X` is the input of `source`, which is `layer` if `None`, and `Y` the output of
    `layer`. For the batch they are the arrays `inputs` and `outputs`; `mask` is that of
    the outputs, or `None`.
    """

    def __init__(self, model, x, y, loss, layer, source, training):
        check_model(model)
        self._layer = layer = find_layer(model, layer)
        source = layer if source is None else find_layer(model, source, "source")
        super().__init__(
            model, x, y, loss, layer=source, side="input", training=training
        )
        self._after = Objective(model, x, y, loss, layer=layer, training=training)
        self.inputs = self.unflatten(self.start)
        self.outputs = self._after.unflatten(self._after.start)
        self.mask = record(model, [layer], x, training)[0].mask
        self._slope = differentiation.compiler(model)(self._slope_of_sum)
        if source is not layer:
            random = np.random.default_rng(0).normal(size=self.outputs.shape)
            if not np.any(self.at_input(random, loss=0.0)):
                raise ValueError(
                    "Argument `source` must be a layer on whose input the output of "
                    f"layer '{layer.name}' depends. Received: source='{source.name}'"
                )

    def at_input(self, disturbance=0.0, loss=1.0):
        """Compute `d(loss * L + <disturbance, Y>) / dX`, float64.

        With `loss=0`, that of any term whose gradient at `Y` is `disturbance`.
        """
        dtype = self.outputs.dtype
        disturbance = np.broadcast_to(disturbance, self.outputs.shape).astype(dtype)
        weights = np.asarray(loss, dtype), disturbance
        loss, disturbance = map(ops.convert_to_tensor, weights)
        start = self._tensors("point", self.start)
        return float64(self._scaled(self._slope, start, loss, disturbance)[0])

    def at_output(self):
        """Compute `dL/dY`, float64."""
        gradient = self._after.value_and_grad()[1]
        return self._after.unflatten(gradient).astype("float64")

    def hessian_at(self, output):
        """Compute the mean Hessian over samples which all have one output."""
        after, tile = self._after, np.ones((len(self.outputs), 1))
        point, columns = after.flatten(tile * output), []
        for direction in np.eye(len(output)):
            vector = after.flatten(tile * direction)
            product = after.hessian_vector_product(vector, point)
            columns.append(after.unflatten(product).sum(0))
        return np.array(columns, "float64").T

    def _slope_of_sum(self, values, weight, disturbance, state, x, y, scale):
        def weighted(values):
            seen = []
            with replacing_call(self._layer, lambda x, f: seen.append(f(x)) or seen[0]):
                loss = self._loss(values, state, x, y)
            term = ops.sum(disturbance * ops.cast(seen[0], disturbance.dtype))
            total = weight * ops.cast(loss, weight.dtype) + term
            return total * ops.cast(scale, total.dtype)

        _, (gradient,) = differentiation.differentiate(weighted, values)
        dtype = self.start.dtype.name
        return ops.cast(gradient, dtype) / ops.cast(scale, dtype)
