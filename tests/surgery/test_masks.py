"""convert and fold where masks go through: what reads them reads the same ones."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, convert
from tests.support import surgery_models as m
from tests.support.backend import some, thorough_on
from tests.support.surgery_models import apply, bn, chain, dense, relu

pytestmark = thorough_on("jax")

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
