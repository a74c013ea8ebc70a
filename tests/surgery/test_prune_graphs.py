"""prune on random small graphs: what is planted goes, and the function stays."""

import keras
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from keras_norms import prune
from tests.support import planted
from tests.support import surgery_models as m

ACTIVATIONS = ("relu", "tanh", "sigmoid", "swish", "leaky_relu", None)


def graph(draw):
    """A model of convolutions, sums, concatenations, depthwise ones and pooling."""
    width = draw(st.integers(2, 4))
    inputs = keras.Input((8, 8, 2), name="image")
    known = [conv(draw, inputs, width, 0)]
    for i in range(1, draw(st.integers(2, 4))):
        x = draw(st.sampled_from(known))
        kind = draw(st.sampled_from(["conv", "sum", "concat", "deep", "gate", "pool"]))
        if kind == "conv":
            x = conv(draw, x, width, i)
        elif kind == "sum":
            y = conv(draw, x, x.shape[-1], i)
            x = draw(st.sampled_from([layers.Add, layers.Maximum]))()([x, y])
        elif kind == "concat":
            x = layers.Concatenate()([x, draw(st.sampled_from(known))])
        elif kind == "deep":
            x = layers.DepthwiseConv2D(3, padding="same", activation="relu")(x)
        elif kind == "gate":
            gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
            gate = layers.Dense(x.shape[-1], activation="sigmoid")(gate)
            x = layers.Multiply()([x, gate])
        else:
            x = layers.AveragePooling2D(3, 1, padding="same")(x)
        known.append(x)
    flatten = draw(st.sampled_from([layers.Flatten, layers.GlobalMaxPooling2D]))
    outputs = [layers.Dense(2)(flatten()(known[-1]))]
    if draw(st.booleans()):
        outputs.append(layers.Dense(2)(layers.Flatten()(draw(st.sampled_from(known)))))
    seed = draw(st.integers(0, 99))
    model = m.randomize(keras.Model(inputs, outputs), seed)
    planted.draw_kernels(model, seed)
    for layer in m.of_class(model, layers.BatchNormalization):
        beta = draw(st.sampled_from([-0.6, 0.0, 0.9]))
        planted.kill(layer, [0], beta)
        producer = model.get_layer(layer.name.removesuffix("_bn"))
        if draw(st.booleans()):
            planted.twin([producer, layer], source=1, copy=width - 1)
    return model


def conv(draw, x, filters, i):
    activation = draw(st.sampled_from(ACTIVATIONS))
    size, padding = draw(st.sampled_from([(1, "valid"), (3, "same")]))
    return m.conv(x, filters, f"conv{i}", size, activation=activation, padding=padding)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_the_function_stays(data):
    """Also at the border, and on data that were not seen where nothing depends on it.

    A ReLU that is dead on `data` need not be elsewhere, so `data` are compared.
    """
    model, x = graph(data.draw), m.images(16, 8, 8, 2)
    before = m.snapshot(model)
    pruned = prune(model, x)
    m.assert_unchanged(before, model)
    m.assert_same_outputs(pruned.model, model, x)
    kernels = [v.shape for v in pruned.model.weights if v.name == "kernel"]
    assert all(size > 0 for shape in kernels for size in shape)
    # Nothing is left of what could go exactly, but for carriers of constants.
    assert prune(pruned.model, x).share <= 0.5


@settings(max_examples=4, deadline=None)
@given(st.data(), st.floats(0, 1), st.floats(0.5, 1), st.booleans())
def test_more_tolerance_removes_more(data, gamma, similarity, alone):
    model, x = graph(data.draw), m.images(16, 8, 8, 2)
    exact = prune(model, x, similarity=None)
    loose = prune(model, x, gamma, similarity=None if alone else similarity)
    for name, gone in exact.removed.items():
        if alone:
            assert set(gone) <= set(loose.removed[name])
    assert loose.channels[1] <= exact.channels[1]
    old, new = (m.outputs(net, x).astype("float64") for net in (model, loose.model))
    expected = np.linalg.norm(new - old) / np.linalg.norm(old)
    np.testing.assert_allclose(loose.error, expected, rtol=1e-3, atol=1e-7)
