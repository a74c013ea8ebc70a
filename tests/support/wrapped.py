"""Layers for tests of WS, CWN and WN; derived ones are for tests of models too."""

import keras
import numpy as np
from keras import layers, ops

from tests.support.backend import numpy


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=rtol, atol=atol)


def randomize(layer):
    """Give each weight of a layer random values that are not centered at 0."""
    rng = np.random.default_rng(0)
    for weight in layer.weights:
        weight.assign(rng.normal(0.5, 1.0, weight.shape))


def wrapped(wrapper, layer, shape, **arguments):
    """A wrapper that is built for inputs of that shape."""
    layer = wrapper(layer, **arguments)
    layer.build(shape)
    return layer


@keras.saving.register_keras_serializable(package="tests")
class Noisy(layers.Dense):
    """A Dense layer with everything else that a layer may do in a call."""

    def __init__(self, units, **kwargs):
        super().__init__(units, **kwargs)
        self.seed_generator = keras.random.SeedGenerator(3)

    def build(self, input_shape):
        self.calls = self.add_weight(
            name="calls", shape=(), initializer="zeros", trainable=False, autocast=False
        )
        super().build(input_shape)

    def call(self, inputs, training=False, mask=None):
        outputs = super().call(inputs)
        if mask is not None:
            outputs = outputs * ops.cast(mask, outputs.dtype)[:, None]
        if not training:
            return outputs
        self.calls.assign_add(1.0)
        self.add_loss(ops.mean(outputs))
        noise = keras.random.normal(ops.shape(outputs), seed=self.seed_generator)
        return outputs + ops.cast(noise, outputs.dtype)


# They compute something other than the layers of Keras.


@keras.saving.register_keras_serializable(package="tests")
class Damped(layers.BatchNormalization):
    def call(self, x, training=None, mask=None):
        return 0.5 * super().call(x, training=training, mask=mask)


@keras.saving.register_keras_serializable(package="tests")
class Doubled(layers.Dense):
    def call(self, inputs):
        return 2 * super().call(inputs)


@keras.saving.register_keras_serializable(package="tests")
class Halved(layers.Dense):
    @property
    def kernel(self):
        return self._kernel / 2
