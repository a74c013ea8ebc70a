"""fold: the same outputs at inference, with layers of Keras only."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from keras_norms import CBN, NoisyBN, convert, fold
from tests.support import surgery_models as m
from tests.support.backend import (
    BACKEND,
    has_channels_first,
    later,
    numpy,
    precision,
    tensorflow_only,
    thorough_on,
)
from tests.support.surgery_models import apply, bn, dense, relu

pytestmark = thorough_on("jax")


def with_cbn():
    """activation -> CBN -> padded layer, with random statistics."""
    conv = apply(layers.Conv2D, 4, 3, activation="relu")
    padded = apply(layers.Conv2D, 5, 3, padding="same")
    return m.model_of((9, 9, 3), conv, apply(CBN, name="norm"), padded)


@tensorflow_only
@pytest.mark.parametrize("make", [m.kinds, with_cbn, *later(m.residual)])
def test_float64_shows_that_the_algebra_is_exact(make):
    with precision("float64"):
        model = make()
        x = m.batch_for(model).astype("float64")
        m.check_fold(model, x, tolerance=1e-12)


@has_channels_first
def test_channels_first():
    """convert finds the axis, too."""
    first = {"data_format": "channels_first"}
    model = m.model_of(
        (3, 9, 9),
        apply(layers.Conv2D, 4, 3, use_bias=False, **first),
        *(apply(layers.BatchNormalization, axis=1), relu),
        apply(CBN, axis=1, name="norm"),
        apply(layers.DepthwiseConv2D, 3, 1, "same", depth_multiplier=2, **first),
        *(relu, apply(layers.SeparableConv2D, 4, 3, **first)),
        *(relu, apply(layers.BatchNormalization, axis=1)),
        *(apply(layers.GlobalAveragePooling2D, **first), dense(2)),
    )
    folded = m.check_fold(model)
    assert [layer.name for layer in m.of_class(folded, layers.Rescaling)] == ["norm"]
    assert not m.norms_in(folded)
    new = m.check_convert(model, data=m.batch_for(model))
    assert sorted(layer.axis for layer in m.of_class(new, CBN)) == [-1, 1, 1]


@settings(max_examples=6, deadline=None)
@given(
    kind=st.sampled_from(["Conv2D", "DepthwiseConv2D", "SeparableConv2D"]),
    size=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.sampled_from(["same", "valid"]),
    groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 100),
)
def test_any_convolution(kind, size, stride, dilation, padding, groups, seed):
    """What is left of the norm before it is a shift, where it reads a border."""
    if BACKEND == "torch" and padding == "same" and size > 1:
        stride = 1  # Quicker there.
    options = {
        "Conv2D": {"groups": groups, "filters": 8},
        "DepthwiseConv2D": {"depth_multiplier": groups},
        "SeparableConv2D": {"depth_multiplier": groups, "filters": 5},
    }[kind]
    dilation = dilation if stride == 1 else 1
    options |= {"kernel_size": size, "strides": stride, "dilation_rate": dilation}
    conv = getattr(layers, kind)(padding=padding, **options)
    stack = layers.ReLU(), CBN(), conv, NoisyBN()
    model = m.randomize(keras.Sequential([keras.Input((9, 10, 4)), *stack]), seed)
    folded = m.check_fold(model, m.images(2, 9, 10, 4, seed=seed))
    shifts = m.of_class(folded, layers.Rescaling)
    assert len(shifts) == (padding == "same" and size > 1) and not m.norms_in(folded)


def test_inputs_and_outputs_keep_their_structure():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
    x = bn(dense()(inputs["a"]))
    y = layers.Add()([x, inputs["b"]])
    model = m.randomize(keras.Model(inputs, {"sum": y, "pair": [x, y]}))
    x = {"a": m.images(2, 4), "b": m.images(2, 4, seed=1)}
    actual, expected = m.check_fold(model, x)(x), model(x)
    assert actual.keys() == expected.keys()
    for a, b in zip(keras.tree.flatten(actual), keras.tree.flatten(expected)):
        np.testing.assert_allclose(numpy(a), numpy(b), rtol=1e-5, atol=1e-6)


@tensorflow_only
@pytest.mark.thorough
def test_saved_model(tmp_path):
    """The residual network with a CBN before each layer, off the identity, folded."""
    import tensorflow as tf

    x = m.images(2, 12, 12, 3)
    model = m.randomize(m.quiet(convert, m.residual(), "cbn", data=x), seed=4)
    folded, expected = m.check_fold(model, x), numpy(model(x, training=False))
    assert m.of_class(folded, layers.Rescaling)  # a shift before zero padding
    folded.export(str(tmp_path), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path))
    actual = loaded.serve(x).numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.max(np.abs(expected)))


# What cannot be folded


def test_norms_that_stay_are_named():
    trains, inner = (layers.BatchNormalization(name=x) for x in ("trains", "inner"))
    over = layers.TimeDistributed(inner, name="over")
    model = m.model_of((4, 3), dense(), over, lambda x: trains(x, training=True))
    with pytest.warns(UserWarning, match=r"'trains'.*inner \(in over\)"):
        folded = fold(model)
    assert sorted(m.norms_in(folded)) == ["inner", "trains"]


@pytest.mark.parametrize(
    "norm, training, message",
    [
        (NoisyBN(noise_at_inference=True, name="own"), None, "noise at inference"),
        (CBN(name="own"), True, "training=True"),
    ],
)
def test_layers_that_are_no_affine_map(norm, training, message):
    with pytest.raises(ValueError, match=f"'own'.*{message}"):
        fold(m.model_of((3,), lambda x: norm(x, training=training)))
