"""Networks with random weights, and how much the outputs of two differ."""

import pathlib
import tempfile

import keras
import numpy as np
from keras import tree

from keras_norms.layers import layers_of


def randomize(model):
    """Draw new random weights for a model, to leave no layer without effect."""
    rng = np.random.default_rng(0)
    for layer in layers_of(model):
        for weight in () if layers_of(layer, include_self=False) else layer.weights:
            value = draw(weight.name, tuple(weight.shape), rng)
            if value is not None:
                weight.assign(value)
        if hasattr(layer, "adapt_mean"):
            layer.adapt_mean.assign(np.full(layer.adapt_mean.shape, 0.5))
            layer.adapt_variance.assign(np.full(layer.adapt_variance.shape, 0.08))
            layer.finalize_state()
    return model


def draw(name, shape, rng):
    """A random value that keeps activations near the size of the layer's input."""
    if name in ("kernel", "pointwise_kernel"):
        # That of DepthwiseConv2D is (height, width, channels, 1).
        fan_in = np.prod(shape[:-1]) if shape[-1] > 1 else np.prod(shape[:-2])
        return rng.normal(0, np.sqrt(1.5 / fan_in), shape)
    if name == "depthwise_kernel":
        return rng.normal(0, np.sqrt(1 / np.prod(shape[:-2])), shape)
    if name in ("moving_variance", "moving_square"):
        return rng.uniform(0.5, 2, shape)
    if name == "gamma":
        return rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)
    if name in ("moving_mean", "beta", "bias"):
        return rng.normal(0, 0.3, shape)
    return None


def difference(actual, expected):
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))


def outputs(model, x):
    """All outputs, one row for each image."""
    # Not compiled: compiling would take longer than running it once.
    made = map(keras.ops.convert_to_numpy, tree.flatten(model(x, training=False)))
    return np.hstack([np.asarray(y, "float64").reshape(len(y), -1) for y in made])


def reloaded(model):
    """A model, saved and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "model.keras"
        model.save(file)
        return keras.models.load_model(file)


def count(model, cls):
    return len(layers_of(model, cls))
