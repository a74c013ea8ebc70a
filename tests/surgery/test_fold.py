"""fold, and convert where masks go through: outputs, structures, masks stay."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, NoisyBN, convert, fold
from tests.support import surgery_models as m
from tests.support.backend import (
    has_channels_first,
    precision,
    some,
    tensorflow_only,
    thorough_on,
)
from tests.support.surgery_models import apply, bn, chain, dense, relu

pytestmark = thorough_on("jax")


@tensorflow_only
def test_float64_shows_that_the_algebra_is_exact():
    with precision("float64"):
        model = m.kinds()
        x = m.batch_for(model).astype("float64")
        m.check_fold(model, x, 1e-12)
        m.check_fold(m.check_convert(model, "cbn", x, 1e-12, data=x), x, 1e-12)


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


def explicit(norm):
    """A mask that is given to the norm."""
    return lambda x: lstm(norm()(tanh(x), mask=x[..., 0] > 0))


def nested(x):
    inputs = keras.Input((7, 5))
    inside = keras.Model(inputs, chain(tanh, bn, relu, bn)(inputs))
    return lstm(inside(x))


# Of tokens, the later ones of which are masked.
MASKED = {
    "LSTM": chain(bn, lstm),
    "attention": attention,
    "an explicit mask": explicit(layers.BatchNormalization),
    "joined": chain(
        lambda x: layers.Concatenate()([bn(dense()(x)), bn(tanh(x))]), bn, gru
    ),
    "nested": nested,
    "dropout": chain(bn, layers.SpatialDropout1D(0.3), steps, bn, tanh, bn, gru),
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


def test_layers_that_are_no_affine_map():
    noisy = NoisyBN(noise_at_inference=True, name="own")
    with pytest.raises(ValueError, match="'own'.*noise at inference"):
        fold(m.model_of((3,), noisy))
    with pytest.raises(ValueError, match="'own'.*training=True"):
        fold(m.model_of((3,), lambda x: CBN(name="own")(x, training=True)))
