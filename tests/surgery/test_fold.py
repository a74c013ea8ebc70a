"""fold, and convert where masks go through: outputs, structures, masks stay."""

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
    precision,
    some,
    tensorflow_only,
    thorough_on,
)
from tests.support.surgery_models import apply, bn, chain, dense, relu

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
    outputs = {"sum": layers.Add()([x, inputs["b"]]), "pair": [x, inputs["b"]]}
    model = m.randomize(keras.Model(inputs, outputs))
    x = {"a": m.images(2, 4), "b": m.images(2, 4, seed=1)}
    made = m.check_fold(model, x)(x)
    keras.tree.assert_same_structure(made, outputs)


# Masks: what reads them reads the same ones

tanh = dense(4, "tanh")
mean = apply(layers.GlobalAveragePooling1D)
lstm, gru = apply(layers.LSTM, 3), apply(layers.GRU, 3)
steps = apply(layers.LSTM, 3, return_sequences=True)


def attention(x):
    x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(bn(x))
    return mean(layers.MultiHeadAttention(2, 3)(bn(tanh(x)), bn(relu(x))))


def initial_states(x):
    x, *states = layers.LSTM(3, return_sequences=True, return_state=True)(bn(x))
    return layers.LSTM(3)(bn(x), initial_state=[bn(state) for state in states])


def explicit(norm):
    """A mask that is given to the norm."""
    return lambda x: lstm(norm()(tanh(x), mask=x[..., 0] > 0))


def joined(x):
    return gru(bn(layers.Concatenate()([bn(dense()(x)), bn(dense(3, "tanh")(x))])))


def nested(x):
    inputs = keras.Input((7, 5))
    inside = keras.Model(inputs, chain(tanh, bn, relu, bn)(inputs))
    return lstm(inside(x))


# Of tokens, the later ones of which are masked.
MASKED = {
    "LSTM": chain(bn, lstm),
    "attention": attention,
    "initial states": initial_states,
    "an explicit mask": explicit(layers.BatchNormalization),
    "joined": joined,
    "nested": nested,
    "dropout": chain(
        *(bn, apply(layers.SpatialDropout1D, 0.3), steps),
        *(bn, apply(layers.Dropout, 0.2), tanh, bn, gru),
    ),
    "Conv1D, which drops masks": chain(
        bn, apply(layers.Conv1D, 4, 3, padding="same", activation="tanh"), bn, lstm
    ),
    "EinsumDense, which drops masks": chain(
        apply(layers.EinsumDense, "abc,c->abc", (7, 5), bias_axes="c"), bn, lstm
    ),
    # Of keras_norms, so that there is nothing to convert
    "an explicit mask for CBN": explicit(CBN),
    "shifts": chain(
        relu, apply(CBN), dense(4, "relu"), apply(CBN), relu, apply(CBN), lstm
    ),
}
# What reads or makes masks in ways of its own
FEW = {"attention", "an explicit mask for CBN", "joined", "nested"}


def model_of(name):
    steps = layers.Embedding(9, 5, mask_zero=True), MASKED[name]
    return m.quiet(m.model_of, (7,), *steps, dtype="int32")


def tokens():
    x = np.random.default_rng(1).integers(1, 9, (6, 7)).astype("int32")
    return np.where(np.arange(7) <= np.arange(6)[:, None], x, 0)


@pytest.mark.parametrize("name", some(MASKED, FEW))
def test_masked_models(name):
    model, x = model_of(name), tokens()
    m.check_fold(model, x)
    if m.norms_in(model):
        fused = name in ("dropout", "joined")
        m.check_fold(m.check_convert(model, "cbn", x, fused=fused), x)


def test_a_map_that_stays_passes_masks_in_training_and_in_files(tmp_path):
    new = m.quiet(convert, model_of("LSTM"), "cbn")
    with m.saying(""):  # as Keras does where a mask is destroyed
        new.compile("sgd", "mse", run_eagerly=True)
        new.train_on_batch(tokens(), np.ones((6, 3)))
    new.save(tmp_path / "new.keras")
    loaded = keras.models.load_model(tmp_path / "new.keras")
    m.assert_same_outputs(loaded, new, tokens(), 1e-6)


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
