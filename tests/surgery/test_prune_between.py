"""prune: through layers of all kinds, what is planted goes where it can."""

import numpy as np
import pytest
from keras import layers, ops

from keras_norms import prune
from tests.support import planted
from tests.support import surgery_models as m
from tests.support.backend import some, thorough_on
from tests.support.surgery_models import apply

pytestmark = thorough_on("jax")


def excited(x):
    """Squeeze and excitation: the gate of a channel that goes goes too."""
    gate = layers.Reshape((1, 1, 5))(layers.GlobalAveragePooling2D()(x))
    gate = layers.Conv2D(3, 1, activation="tanh")(gate)
    gate = layers.Conv2D(5, 1, activation="hard_sigmoid", name="up")(gate)
    return layers.Multiply()([x, gate]) * 2.0 + 0.0


# Layers between a convolution with dead channels and a Dense layer. These can go:
GO = {
    "a gate of each": excited,
    "a maximum": lambda x: layers.Maximum()([x, layers.ReLU()(x)]),
    "joined": lambda x: layers.Concatenate()([x, ops.sigmoid(x)]),
    "a function": lambda x: ops.clip(ops.tanh(x), -0.5, 1.0),
    "rescaling": apply(layers.Rescaling, 0.5, 1.0),
    "PReLU": apply(layers.PReLU),
    "depthwise": apply(layers.DepthwiseConv2D, 3, depth_multiplier=2),
    "places": m.chain(
        *(layers.ZeroPadding2D(1), layers.LeakyReLU(), layers.SpatialDropout2D(0.5)),
        *(layers.UpSampling2D(), layers.AveragePooling2D(2), layers.Cropping2D(1)),
    ),
    "PReLU shared by channels": apply(layers.PReLU, shared_axes=[3]),
    "a scale of each": apply(layers.EinsumDense, "abcd,d->abcd", (6, 6, 5), None, "d"),
    "a permutation": apply(layers.Permute, (3, 1, 2)),
    "a reshaping": apply(layers.Reshape, (36, 5)),
    "a mean of each": lambda x: x * layers.GlobalAveragePooling2D(keepdims=True)(x),
    "flattening of other channels": apply(layers.Flatten, "channels_first"),
    "joined with pixels": lambda x: layers.Concatenate(axis=1)([x, layers.ReLU()(x)]),
}
STAY = {
    "a sum with a vector": lambda x: x + np.ones(5, "float32"),
    "bounds of each": lambda x: ops.clip(x, np.zeros(5), np.arange(1.0, 6.0)),
    "a part": lambda x: x[..., :3],
    "a gate for all channels": lambda x: layers.Multiply()([x, layers.Conv2D(1, 1)(x)]),
    "rescaling of each": apply(layers.Rescaling, [0.5] * 5),
    "a function of the user's": apply(layers.Lambda, lambda x: np.pi * x),
    "an activation of the user's": apply(layers.Activation, lambda x: np.pi * x),
    "softmax": apply(layers.Activation, "softmax"),
    "a reshaping of channels": apply(layers.Reshape, (60, 3)),
    "pooling of channels": apply(layers.MaxPooling2D, 2, data_format="channels_first"),
    "depthwise and softmax": apply(layers.DepthwiseConv2D, 1, activation="softmax"),
    "a norm of pixels": apply(layers.LayerNormalization),
    "groups": apply(layers.Conv2D, 5, 1, groups=5),
    "a layer along rows": m.chain(layers.Permute((3, 1, 2)), layers.Dense(3)),
    "a wrapper": lambda x: layers.TimeDistributed(layers.Conv1D(2, 1))(x),
    "always in training": lambda x: layers.Dropout(0.0)(x, training=True),
    "joined along pixels": lambda x: layers.Concatenate(1)([x, m.conv(5, "two")(x)]),
}

FEW = {"a function", "PReLU", "a permutation", "joined with pixels", "a gate of each"}
FEW |= {
    "bounds of each",
    "a part",
    "softmax",
    "pooling of channels",
    "a reshaping of channels",
    "joined",
}


@pytest.mark.parametrize("name", some([*GO, *STAY], FEW))
def test_one_layer_between(name):
    first = m.conv(4, "first", size=1)  # of which channels can always go
    steps = first, m.conv(5, "one"), {**GO, **STAY}[name], layers.Flatten(), m.dense(2)
    model = planted.settle(m.model_of((6, 6, 3), *steps))
    planted.kill(model.get_layer("one_bn"), [1, 4], -0.7)
    planted.kill(model.get_layer("first_bn"), [0], -0.7)
    pruned = planted.check(model, similarity=None)
    gone = {"one": [1, 4]} if name in GO else {}
    gone |= {"up": [1, 4]} if GO.get(name) is excited else {}
    assert planted.removed(pruned) == {"first": [0], **gone}


def test_a_layer_with_softmax_keeps_its_channels():
    steps = m.dense(4, name="first"), m.dense(4, "softmax", name="softmax"), m.dense(2)
    model = m.model_of((3,), *steps)
    for layer in planted.layers_of(model, "first", "softmax"):
        for weight in layer.weights:
            planted.put(weight, (..., 1), 0)
    planted.put(layer.bias, 1, -999)  # the constant 0
    assert planted.removed(planted.check(model, similarity=None)) == {"first": [1]}


def test_residual_sums_lose_a_channel_everywhere_or_nowhere():
    model = planted.settle(m.residual())
    stream = planted.layers_of(model, "stem_bn", "a2_bn")
    planted.kill(stream[0], [1], -0.5)
    x = m.batch_for(model, 16)
    kept = prune(model, x).removed
    assert "stem" not in kept and "a2" not in kept
    planted.kill(stream[1], [1], -0.25)
    pruned = planted.check(model)
    # No nonlinearity follows a2_bn before the sum, which is dead all the same.
    assert 1 in pruned.removed["stem"]
    assert list(pruned.removed["stem"]) == list(pruned.removed["a2"])


def convolved(conv, filters=5, size=2, **kwargs):
    return apply(conv, filters, size, name="up", activation="relu", **kwargs)


@pytest.mark.parametrize(
    "dimensions, conv, up",
    [
        (1, layers.Conv1D, convolved(layers.Conv1D, padding="causal")),
        (2, layers.Conv2D, convolved(layers.SeparableConv2D, depth_multiplier=2)),
        (2, layers.Conv2D, convolved(layers.Conv2DTranspose, strides=2)),
        (3, layers.Conv3D, convolved(layers.Conv3DTranspose)),
    ],
)
def test_convolutions_of_all_kinds(dimensions, conv, up):
    first, norm = conv(5, 2, use_bias=False, name="conv"), layers.BatchNormalization()
    steps = first, norm, up, layers.Flatten(), layers.Dense(3)
    model = planted.settle(m.model_of((5,) * dimensions + (2,), *steps))
    planted.kill(norm, [4], 0)
    planted.kill(norm, [1, 2], 0.7)  # one of them may stay
    planted.twin([first, norm], source=0, copy=3)
    kernel = model.get_layer("up").weights[-2]
    transposed = "Transpose" in type(model.get_layer("up")).__name__
    planted.put(kernel, (..., 0, slice(None)) if transposed else (..., 0), 0)
    pruned = planted.check(model)
    assert len(pruned.removed["conv"]) >= 2 and 4 in pruned.removed["conv"]
    assert 0 in pruned.removed["up"]


def test_shared_nested_and_outer_layers():
    model = planted.settle(m.shared())
    planted.kill(model.get_layer("stem_bn"), [3], -1)
    planted.kill(model.get_layer("second_bn"), [0], -1)
    planted.twin(planted.layers_of(model, "second", "second_bn"), source=1, copy=2)
    assert planted.removed(planted.check(model)) == {"stem": [3], "second": [0, 2]}
    model = m.nested()
    body = model.get_layer("body")
    planted.kill(body.get_layer("first_bn"), [0], -1)
    planted.kill(body.get_layer("block").get_layer("conv_bn"), [2], 0.7)
    gone = planted.removed(planted.check(model))
    assert 0 in gone["body/first"] and 2 in gone["block/conv"]
    # Outputs keep their channels.
    one, *ends = (m.conv(4, name) for name in ("one", "two", "three"))
    model = planted.settle(m.model_of((6, 6, 3), one, m.branches(list, *ends)))
    for layer in m.of_class(model, layers.BatchNormalization):
        planted.kill(layer, [1], -1)
    assert planted.removed(planted.check(model)) == {"one": [1]}
