"""Small models with random normalisation, and what surgery must keep of a model."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import convert, fold
from tests.support.backend import numpy


def images(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) + 0.3).astype("float32")


def outputs(model, x):
    """The outputs at inference, as one vector."""
    if isinstance(x, (list, tuple)):
        x = [keras.ops.convert_to_tensor(v) for v in x]
    results = keras.tree.flatten(model(x, training=False))
    return np.concatenate([numpy(y).astype("float64").ravel() for y in results])


def assert_same_outputs(actual, expected, x, tolerance=1e-5):
    """The largest difference is at most `tolerance` of the largest output."""
    actual, expected = outputs(actual, x), outputs(expected, x)
    limit = tolerance * np.max(np.abs(expected))
    assert np.max(np.abs(actual - expected)) <= limit


def snapshot(model):
    """Configuration, weights, attributes and calls, to see that nothing changed."""
    inside = model._flatten_layers()
    calls = [(len(x._inbound_nodes), len(x._outbound_nodes)) for x in inside]
    config = keras.saving.serialize_keras_object(model)
    return (config, calls, [set(vars(x)) for x in inside]), model.get_weights()


def assert_unchanged(before, model):
    after = snapshot(model)
    assert after[0] == before[0]
    assert all(map(np.array_equal, after[1], before[1]))
    assert len(after[1]) == len(before[1])


@contextlib.contextmanager
def saying(match):
    """Expects a warning that matches; `""` is for none, `None` for any or none."""
    if match:
        with pytest.warns(UserWarning, match=match):
            yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if match is None else "error", UserWarning)
        yield


def quiet(function, *args, **kwargs):
    with saying(None):
        return function(*args, **kwargs)


def check(surgery, model, x=None, tolerance=1e-5, says=None, *args, **kwargs):
    """The same outputs, and the model is as it was. Returns the new one."""
    x = batch_for(model) if x is None else x
    before = snapshot(model)
    with saying(says):
        new = surgery(model, *args, **kwargs)
    assert_unchanged(before, model)
    assert_same_outputs(new, model, x, tolerance)
    return new


def check_convert(model, norm="cbn", x=None, tolerance=1e-5, says=None, **kwargs):
    return check(convert, model, x, tolerance, says, norm, **kwargs)


def check_fold(model, x=None, tolerance=1e-5, says=None):
    """Also: layers of Keras only."""
    folded = check(fold, model, x, tolerance, says)
    assert "keras_norms" not in str(keras.saving.serialize_keras_object(folded))
    return folded


def of_class(model, cls):
    return [layer for layer in model._flatten_layers() if isinstance(layer, cls)]


def norms_in(model):
    """The names of the BatchNormalization layers that are left."""
    return [layer.name for layer in of_class(model, layers.BatchNormalization)]


def names(model):
    return [layer.name for layer in model.layers]


def randomize(model, seed=0):
    """Random weights, the same on every backend, with scales of both signs."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        shape = tuple(weight.shape)
        if weight.name.endswith("kernel"):
            fan_in = max(np.prod(shape[:-1]), 1)
            weight.assign(rng.normal(0, fan_in**-0.5, shape))
        elif weight.name in ("moving_variance", "moving_square", "moving_norm"):
            weight.assign(rng.uniform(0.5, 2, shape))
        elif weight.name == "gamma":
            value = rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)
            weight.assign(value)
        elif weight.name in ("moving_mean", "beta", "bias"):
            weight.assign(rng.normal(0, 0.5, shape))
    return model


def apply(cls, *args, **kwargs):
    """A function of a tensor: what a new layer makes of it."""
    return lambda x: cls(*args, **kwargs)(x)


def bn(x, **kwargs):
    return layers.BatchNormalization(**kwargs)(x)


def relu(x):
    return layers.ReLU()(x)


def dense(units=4, activation=None, **kwargs):
    return apply(layers.Dense, units, activation, **kwargs)


def chain(*steps):
    """Functions of tensors, one after the other."""

    def outputs(x):
        for step in steps:
            x = step(x)
        return x

    return outputs


def model_of(shape, *steps, seed=0, **kwargs):
    """A model of functions of tensors, with random norms."""
    inputs = keras.Input(shape, **kwargs)
    return randomize(keras.Model(inputs, chain(*steps)(inputs)), seed)


def conv(x, filters, name, size=3, norm=True, activation="relu", **kwargs):
    """Convolution, BatchNormalization and activation, as in most networks."""
    kwargs = {"padding": "same", "use_bias": not norm, **kwargs}
    x = layers.Conv2D(filters, size, name=name, **kwargs)(x)
    if norm:
        x = layers.BatchNormalization(name=f"{name}_bn")(x)
    return layers.Activation(activation, name=f"{name}_act")(x) if activation else x


def residual():
    """A residual network with padding layers, a projection and a pooled head."""
    inputs = keras.Input((12, 12, 3), name="image")
    x = conv(inputs, 4, "stem")
    y = conv(x, 4, "a1")
    y = conv(y, 4, "a2", activation=None)
    x = layers.Activation("relu", name="a")(layers.Add(name="sum_a")([x, y]))
    shortcut = conv(x, 8, "b0", size=1, strides=2, activation=None)
    y = layers.ZeroPadding2D(1, name="b1_pad")(x)
    y = conv(y, 8, "b1", strides=2, padding="valid")
    y = conv(y, 8, "b2", activation=None)
    x = layers.Activation("relu", name="b")(layers.Add(name="sum_b")([shortcut, y]))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(5, name="logits")(layers.Dropout(0.5, name="drop")(x))
    return randomize(keras.Model(inputs, x))


def kinds():
    """Every kind of linear layer with a norm after it."""
    inputs = keras.Input((12, 12, 3), name="image")
    x = conv(inputs, 4, "stem", activation="tanh")
    x = layers.ZeroPadding2D(((0, 1), (0, 1)))(x)
    x = layers.DepthwiseConv2D(3, 2, use_bias=False, depth_multiplier=2)(x)
    x = layers.ReLU()(layers.BatchNormalization(scale=False)(x))
    x = layers.SeparableConv2D(8, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(center=False)(x)
    x = layers.Activation("swish")(x)
    x = conv(x, 8, "grouped", groups=2)
    x = conv(x, 8, "dilated", dilation_rate=2, padding="valid")
    x = layers.Conv2DTranspose(4, 3, 2, padding="same")(x)
    x = layers.LeakyReLU()(layers.BatchNormalization()(x))
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    x = layers.BatchNormalization()(layers.Dense(6, use_bias=False)(x))
    x = layers.Activation("sigmoid")(x)
    x = layers.EinsumDense("ab,bc->ac", 5, bias_axes="c")(x)
    return randomize(keras.Model(inputs, x))


def nested():
    """A Sequential in a Functional in a Functional, with preprocessing outside."""
    block = [
        keras.Input((8, 8, 4)),
        layers.Conv2D(4, 3, padding="same", use_bias=False, name="conv"),
        layers.BatchNormalization(name="bn"),
        layers.ReLU(name="act"),
    ]
    inputs = keras.Input((8, 8, 3), name="body_in")
    x = keras.Sequential(block, name="block")(conv(inputs, 4, "first"))
    body = keras.Model(inputs, x, name="body")
    image = keras.Input((8, 8, 3), name="image")
    x = layers.GlobalAveragePooling2D()(body(layers.Rescaling(0.5)(image)))
    return randomize(keras.Model(image, layers.Dense(3, name="head")(x)))


def shared():
    """Two images through the same layers."""
    inputs = [keras.Input((8, 8, 3), name=name) for name in ("left", "right")]
    features = inputs
    for name in ("stem", "second"):
        layer = layers.Conv2D(4, 3, padding="same", name=name)
        norm = layers.BatchNormalization(name=f"{name}_bn")
        features = [relu(norm(layer(x))) for x in features]
    x = layers.Flatten()(layers.Concatenate()(features))
    return randomize(keras.Model(inputs, layers.Dense(3, name="head")(x)))


def sequential():
    stack = [keras.Input((8, 8, 3))]
    for name in ("one", "two"):
        stack += [
            layers.Conv2D(4, 3, padding="same", use_bias=False, name=name),
            layers.BatchNormalization(name=f"{name}_bn"),
            layers.ReLU(name=f"{name}_act"),
        ]
    stack += [layers.Flatten(name="flatten"), layers.Dropout(0.3)]
    return randomize(keras.Sequential([*stack, layers.Dense(3, name="head")]))


MODELS = {make.__name__: make for make in (residual, kinds, nested, shared, sequential)}


def batch_for(model, size=6, seed=3):
    """A batch of inputs for a model."""
    shapes = [tuple(x.shape[1:]) for x in model.inputs]
    xs = [images(size, *shape, seed=seed + i) for i, shape in enumerate(shapes)]
    return xs if len(xs) > 1 else xs[0]


class Block(layers.Layer):
    """A layer of one's own: two norms, functions, the names of all other blocks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        same = {"padding": "same", "use_bias": False}
        self.convs = [layers.Conv2D(4, 3, name=f"conv{i}", **same) for i in range(2)]
        names = {"0": "norm0", "1": "norm1"}
        self.norms = {i: layers.BatchNormalization(name=x) for i, x in names.items()}
        self.drop = layers.Dropout(0.5, name="drop")

    def call(self, x, training=False):
        y = x
        for i, conv in enumerate(self.convs):
            y = keras.ops.relu(self.norms[str(i)](conv(y), training=training))
        return x + self.drop(y, training=training)
