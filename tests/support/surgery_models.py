"""Small models with random normalisation, and how outputs are compared."""

import keras
import numpy as np
from keras import layers

BACKEND = keras.backend.backend()


def images(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) + 0.3).astype("float32")


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(x))


def outputs(model, x):
    """The outputs at inference, as one vector."""
    if isinstance(x, (list, tuple)):
        x = [keras.ops.convert_to_tensor(v) for v in x]
    results = keras.tree.flatten(model(x, training=False))
    return np.concatenate([numpy(y).ravel() for y in results])


def assert_same_outputs(actual, expected, x, tolerance=1e-5):
    """The largest difference is at most `tolerance` of the largest output."""
    actual, expected = outputs(actual, x), outputs(expected, x)
    limit = tolerance * np.max(np.abs(expected))
    assert np.max(np.abs(actual - expected)) <= limit


def randomize(model, seed=0):
    """Random weights for every layer, with scales of both signs."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        shape = tuple(weight.shape)
        if weight.name == "moving_mean":
            value = rng.normal(0, 0.5, shape)
        elif weight.name in ("moving_variance", "moving_square", "moving_norm"):
            value = rng.uniform(0.5, 2, shape)
        elif weight.name == "gamma":
            value = rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)
        elif weight.name in ("beta", "bias"):
            value = rng.normal(0, 0.5, shape)
        else:
            continue
        weight.assign(value)
    return model


def snapshot(model):
    """Configuration and weights, to see that nothing changed."""
    nodes = [len(layer._outbound_nodes) for layer in model._flatten_layers()]
    return keras.saving.serialize_keras_object(model), model.get_weights(), nodes


def assert_unchanged(before, model):
    config, weights, nodes = snapshot(model)
    assert config == before[0]
    assert len(weights) == len(before[1])
    assert all(np.array_equal(a, b) for a, b in zip(weights, before[1]))
    assert nodes == before[2]


def of_class(model, cls):
    return [layer for layer in model._flatten_layers() if isinstance(layer, cls)]


def names(model):
    return [layer.name for layer in model.layers]


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
    x = layers.Dropout(0.5, name="drop")(x)
    x = layers.Dense(5, name="logits")(x)
    return randomize(keras.Model(inputs, x, name="residual"))


def kinds():
    """Every kind of linear layer with a norm after it."""
    inputs = keras.Input((12, 12, 3), name="image")
    x = conv(inputs, 4, "stem", activation="tanh")
    x = layers.ZeroPadding2D(((0, 1), (0, 1)), name="dw_pad")(x)
    x = layers.DepthwiseConv2D(3, 2, use_bias=False, depth_multiplier=2, name="dw")(x)
    x = layers.BatchNormalization(scale=False, name="dw_bn")(x)
    x = layers.ReLU(name="dw_act")(x)
    x = layers.SeparableConv2D(8, 3, padding="same", use_bias=False, name="sep")(x)
    x = layers.BatchNormalization(center=False, name="sep_bn")(x)
    x = layers.Activation("swish", name="sep_act")(x)
    x = conv(x, 8, "grouped", groups=2)
    x = conv(x, 8, "dilated", dilation_rate=2, padding="valid")
    x = layers.Conv2DTranspose(4, 3, 2, padding="same", name="up")(x)
    x = layers.BatchNormalization(name="up_bn")(x)
    x = layers.LeakyReLU(name="up_act")(x)
    x = layers.MaxPooling2D(name="pool")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(6, use_bias=False, name="hidden")(x)
    x = layers.BatchNormalization(name="hidden_bn")(x)
    x = layers.Activation("sigmoid", name="hidden_act")(x)
    x = layers.EinsumDense("ab,bc->ac", 5, bias_axes="c", name="logits")(x)
    return randomize(keras.Model(inputs, x, name="kinds"))


def preactivated():
    """Normalisation before the activation, of sums and of concatenations."""
    inputs = keras.Input((10, 10, 3), name="image")
    x = layers.Conv2D(4, 3, padding="same", name="stem")(inputs)
    for i in "ab":
        y = layers.BatchNormalization(name=f"{i}_bn")(x)
        y = layers.ReLU(name=f"{i}_act")(y)
        y = layers.Conv2D(4, 3, padding="same", name=i)(y)
        x = layers.Concatenate(name=f"{i}_concat")([x, y])
    x = layers.BatchNormalization(name="last_bn")(x)
    x = layers.ReLU(name="last_act")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(5, name="logits")(x)
    return randomize(keras.Model(inputs, x, name="preactivated"))


def nested():
    """A Sequential in a Functional in a Functional, with preprocessing outside."""
    block = keras.Sequential(
        [
            keras.Input((8, 8, 4)),
            layers.Conv2D(4, 3, padding="same", use_bias=False, name="conv"),
            layers.BatchNormalization(name="bn"),
            layers.ReLU(name="act"),
        ],
        name="block",
    )
    inputs = keras.Input((8, 8, 3), name="body_in")
    x = conv(inputs, 4, "first")
    x = block(x)
    body = keras.Model(inputs, x, name="body")
    image = keras.Input((8, 8, 3), name="image")
    x = layers.Rescaling(0.5, name="rescaling")(image)
    x = body(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return randomize(keras.Model(image, layers.Dense(3, name="head")(x), name="whole"))


def shared():
    """Two images through the same layers."""
    stem = layers.Conv2D(4, 3, padding="same", use_bias=False, name="stem")
    stem_bn = layers.BatchNormalization(name="stem_bn")
    second = layers.Conv2D(4, 3, padding="same", name="second")
    second_bn = layers.BatchNormalization(name="second_bn")
    inputs = [keras.Input((8, 8, 3), name=name) for name in ("left", "right")]
    features = []
    for x in inputs:
        x = layers.ReLU()(stem_bn(stem(x)))
        features.append(layers.ReLU()(second_bn(second(x))))
    x = layers.Concatenate(name="both")(features)
    x = layers.Flatten(name="flatten")(x)
    return randomize(
        keras.Model(inputs, layers.Dense(3, name="head")(x), name="siamese")
    )


def sequential():
    return randomize(
        keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(4, 3, padding="same", use_bias=False, name="one"),
                layers.BatchNormalization(name="one_bn"),
                layers.ReLU(name="one_act"),
                layers.Conv2D(4, 3, padding="same", use_bias=False, name="two"),
                layers.BatchNormalization(name="two_bn"),
                layers.ReLU(name="two_act"),
                layers.Flatten(name="flatten"),
                layers.Dropout(0.3, name="drop"),
                layers.Dense(3, name="head"),
            ],
            name="chain",
        )
    )


MODELS = {
    "residual": residual,
    "kinds": kinds,
    "preactivated": preactivated,
    "nested": nested,
    "shared": shared,
    "sequential": sequential,
}


def batch_for(model, size=6, seed=3):
    """A batch of inputs for a model."""
    shapes = [tuple(x.shape[1:]) for x in model.inputs]
    xs = [images(size, *shape, seed=seed + i) for i, shape in enumerate(shapes)]
    return xs if len(xs) > 1 else xs[0]
