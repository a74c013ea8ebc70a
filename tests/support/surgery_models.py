"""Small models with random normalisation, and what surgery must keep of a model."""

import functools
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
    x = keras.tree.map_structure(keras.ops.convert_to_tensor, x)
    results = keras.tree.flatten(model(x, training=False))
    return np.concatenate([numpy(y).astype("float64").ravel() for y in results])


def assert_same_outputs(actual, expected, x, tolerance=1e-5):
    """The largest difference is at most `tolerance` of the largest output."""
    actual, expected = outputs(actual, x), outputs(expected, x)
    assert np.max(np.abs(actual - expected)) <= tolerance * np.max(np.abs(expected))


def snapshot(model):
    """Configuration, calls, attributes, weights: equal if nothing changed."""
    inside = model._flatten_layers()
    calls = [(len(x._inbound_nodes), len(x._outbound_nodes)) for x in inside]
    config = keras.saving.serialize_keras_object(model)
    weights = [weight.tobytes() for weight in model.get_weights()]
    return config, calls, [set(vars(x)) for x in inside], weights


def saying(match):
    """Expects a warning that matches; `""` is for none, `None` for any or none."""
    if match:
        return pytest.warns(UserWarning, match=match)
    action = "ignore" if match is None else "error"
    return warnings.catch_warnings(action=action, category=UserWarning)


def quiet(function, *args, **kwargs):
    with saying(None):
        return function(*args, **kwargs)


def check(surgery, model, x=None, tolerance=1e-5, says=None, *args, **kwargs):
    """The same outputs, and the model is as it was. Returns the new one."""
    x = batch_for(model) if x is None else x
    before = snapshot(model)
    with saying(says):
        new = surgery(model, *args, **kwargs)
    assert snapshot(model) == before
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


def norms_in(model, cls=layers.BatchNormalization):
    """The names of the norms of a class that are there, or left."""
    return [layer.name for layer in of_class(model, cls)]


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
            weight.assign(rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape))
        elif weight.name in ("moving_mean", "beta", "bias"):
            weight.assign(rng.normal(0, 0.5, shape))
    return model


def apply(cls, *args, **kwargs):
    """A function of a tensor: what a new layer makes of it."""
    return lambda x: cls(*args, **kwargs)(x)


bn, relu = apply(layers.BatchNormalization), apply(layers.ReLU)


def dense(units=4, activation=None, **kwargs):
    return apply(layers.Dense, units, activation, **kwargs)


def chain(*steps):
    """Applies functions of tensors one after the other."""
    return lambda x: functools.reduce(lambda made, step: step(made), steps, x)


def branches(join, *steps):
    """Applies functions to the same tensor, and joins their results."""
    return lambda x: join([step(x) for step in steps])


def model_of(shape, *steps, name=None, **kwargs):
    """A model of functions of tensors, with random norms."""
    inputs = keras.Input(shape, **kwargs)
    return randomize(keras.Model(inputs, chain(*steps)(inputs), name=name))


def conv_layers(filters, name, size=3, activation="relu", **kwargs):
    """Convolution, BatchNormalization and activation, as in most networks."""
    kwargs = {"padding": "same", "use_bias": False, **kwargs}
    made = layers.Conv2D(filters, size, name=name, **kwargs)
    last = [layers.Activation(activation, name=f"{name}_act")] if activation else []
    return [made, layers.BatchNormalization(name=f"{name}_bn"), *last]


def conv(*args, **kwargs):
    return chain(*conv_layers(*args, **kwargs))


def residual():
    """A residual network with padding layers, a projection and a pooled head."""
    inputs = keras.Input((12, 12, 3), name="image")
    x = conv(4, "stem")(inputs)
    y = conv(4, "a1")(x)
    y = conv(4, "a2", activation=None)(y)
    x = layers.Activation("relu", name="a")(layers.Add(name="sum_a")([x, y]))
    shortcut = conv(8, "b0", size=1, strides=2, activation=None)(x)
    y = layers.ZeroPadding2D(1, name="b1_pad")(x)
    y = conv(8, "b1", strides=2, padding="valid")(y)
    y = conv(8, "b2", activation=None)(y)
    x = layers.Activation("relu", name="b")(layers.Add(name="sum_b")([shortcut, y]))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(5, name="logits")(layers.Dropout(0.5, name="drop")(x))
    return randomize(keras.Model(inputs, x))


def kinds():
    """Every kind of linear layer with a norm after it."""
    return model_of(
        (12, 12, 3),
        conv(4, "stem", activation="tanh", dilation_rate=2),
        layers.ZeroPadding2D(((0, 1), (0, 1))),
        layers.DepthwiseConv2D(3, 2, use_bias=False, depth_multiplier=2),
        *(layers.BatchNormalization(scale=False), layers.ReLU()),
        layers.SeparableConv2D(8, 3, padding="same", use_bias=False),
        *(layers.BatchNormalization(center=False), layers.Activation("swish")),
        conv(8, "grouped", groups=2),
        layers.Conv2DTranspose(4, 3, 2, padding="same"),
        *(layers.BatchNormalization(), layers.LeakyReLU()),
        *(layers.MaxPooling2D(), layers.Flatten()),
        *(layers.EinsumDense("ab,bc->ac", 6), layers.BatchNormalization()),
        layers.Dense(5),
    )


def nested():
    """A Sequential in a Functional in a Functional, with preprocessing outside."""
    block = [keras.Input((8, 8, 4)), *conv_layers(4, "conv")]
    block = keras.Sequential(block, name="block")
    body = model_of((8, 8, 3), conv(4, "first"), block, name="body")
    ends = layers.GlobalAveragePooling2D(), layers.Dense(3, name="head")
    return model_of((8, 8, 3), layers.Rescaling(0.5), body, *ends)


def shared():
    """Two images through the same layers."""
    inputs = [keras.Input((8, 8, 3), name=name) for name in ("left", "right")]
    stack = chain(conv(4, "stem"), conv(4, "second"))
    x = layers.Flatten()(layers.Concatenate()([stack(x) for x in inputs]))
    return randomize(keras.Model(inputs, layers.Dense(3, name="head")(x)))


def sequential():
    stack = *conv_layers(4, "one"), *conv_layers(4, "two"), layers.Flatten()
    head = layers.Dropout(0.3), layers.Dense(3, name="head")
    return randomize(keras.Sequential([keras.Input((8, 8, 3)), *stack, *head]))


MODELS = {make.__name__: make for make in (residual, kinds, nested, shared, sequential)}


def batch_for(model, size=6, seed=3):
    """A batch of inputs for a model."""
    shapes = enumerate(tuple(x.shape[1:]) for x in model.inputs)
    xs = [images(size, *shape, seed=seed + i) for i, shape in shapes]
    return xs if len(xs) > 1 else xs[0]


class Block(layers.Layer):
    """A custom layer: two norms, functions, the names of all other blocks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        same = {"padding": "same", "use_bias": False}
        self.convs = [layers.Conv2D(4, 3, name=f"conv{i}", **same) for i in range(2)]
        self.norms = [layers.BatchNormalization(name=f"norm{i}") for i in range(2)]
        self.drop = layers.Dropout(0.5, name="drop")

    def call(self, x, training=False):
        y = x
        for conv, norm in zip(self.convs, self.norms):
            y = keras.ops.relu(norm(conv(y), training=training))
        return x + self.drop(y, training=training)


def with_block(*blocks):
    """A convolution, blocks, a norm and a Dense layer."""
    stem = layers.Conv2D(4, 3, padding="same", name="stem")
    norm = layers.BatchNormalization(name="last")
    head = layers.GlobalAveragePooling2D(), norm, layers.Dense(2, name="logits")
    return model_of((6, 6, 3), stem, *blocks, *head)


def of_call(call, base=layers.Layer, name=None, **parts):
    """A custom layer with these parts and this `call`."""
    own = type("Own", (base,), {"call": call})(name=name)
    for each, part in parts.items():
        setattr(own, each, part)
    return own
