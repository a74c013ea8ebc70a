"""convert and fold where masks go through: what reads them reads the same ones."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, WS, LpNorm, convert, fold
from keras_norms.layers.channel_affine import ChannelAffine
from tests.support import surgery_models as m


def bn():
    return layers.BatchNormalization()


def tanh(units=4):
    return layers.Dense(units, activation="tanh")


def mean(x):
    return layers.GlobalAveragePooling1D()(x)


def chain(*makers):
    def outputs(x):
        for make in makers:
            x = make()(x)
        return x

    return outputs


def sequences(layer):
    return lambda: layer(3, return_sequences=True)


def attention(x):
    x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(bn()(x))
    x = bn()(x)
    return mean(layers.MultiHeadAttention(2, 3)(x, x))


def attention_of_two(x):
    queries, keys = bn()(tanh()(x)), bn()(layers.ReLU()(x))
    return mean(layers.MultiHeadAttention(2, 3)(queries, keys))


def initial_states(x):
    x, *states = layers.LSTM(3, return_sequences=True, return_state=True)(bn()(x))
    return layers.LSTM(3)(bn()(x), initial_state=[bn()(s) for s in states])


def explicit(norm):
    """A mask that is given to the norm."""

    def outputs(x):
        return layers.LSTM(3)(norm()(tanh()(x), mask=x[..., 0] > 0))

    return outputs


def joined(x):
    parts = [bn()(layers.Dense(4)(x)), bn()(tanh(3)(x))]
    return layers.GRU(3)(bn()(layers.Concatenate()(parts)))


def multiplied(x):
    """Multiply reads masks itself."""
    return mean(tanh()(bn()(layers.Multiply()([x, bn()(tanh(5)(x))]))))


def nested(x):
    inputs = keras.Input((7, 5))
    inside = keras.Model(inputs, chain(tanh, bn, layers.ReLU, bn)(inputs))
    return layers.LSTM(3)(inside(x))


def nested_sequential(x):
    inside = keras.Sequential([keras.Input((7, 5)), bn(), layers.ReLU(), bn()])
    return layers.LSTM(3)(inside(x))


def called_twice(x):
    dense, norm, read = tanh(5), bn(), layers.LSTM(3)
    return layers.Add()([read(norm(dense(x))), read(norm(dense(layers.ReLU()(x))))])


MASKED = {
    "LSTM": chain(bn, lambda: layers.LSTM(3)),
    "attention": attention,
    "attention of two": attention_of_two,
    "average": chain(tanh, bn, layers.ReLU, layers.GlobalAveragePooling1D),
    "between activations": chain(layers.ReLU, bn, layers.ReLU, lambda: layers.GRU(3)),
    "initial states": initial_states,
    "an explicit mask": explicit(bn),
    "joined": joined,
    "multiplied": multiplied,
    "nested": nested,
    "nested Sequential": nested_sequential,
    "called twice": called_twice,
    "dropout": chain(
        *(bn, lambda: layers.SpatialDropout1D(0.3), sequences(layers.LSTM)),
        *(bn, lambda: layers.Dropout(0.2), tanh, bn, lambda: layers.GRU(3)),
    ),
    "each step": chain(
        lambda: layers.TimeDistributed(tanh()), bn, lambda: layers.LSTM(3)
    ),
    "other norms": chain(
        bn, layers.LayerNormalization, bn, layers.ReLU, bn, lambda: layers.LSTM(3)
    ),
    "a convolution, which drops masks": chain(
        bn,
        lambda: layers.Conv1D(4, 3, padding="same", activation="tanh"),
        *(bn, lambda: layers.LSTM(3)),
    ),
    "EinsumDense, which drops masks": chain(
        lambda: layers.EinsumDense("abc,c->abc", (7, 5), bias_axes="c"),
        *(bn, lambda: layers.LSTM(3)),
    ),
}
# Of keras_norms, so that there is nothing to convert.
FOLDED = {
    "an explicit mask for CBN": explicit(CBN),
    "an explicit mask for LpNorm": explicit(LpNorm),
    "wrapped": chain(CBN, lambda: WS(tanh()), CBN, lambda: layers.LSTM(3)),
    "a shift before padding": chain(
        lambda: layers.ReLU(),
        *(CBN, lambda: layers.Dense(4, activation="relu"), CBN, layers.ReLU),
        *(CBN, lambda: layers.LSTM(3)),
    ),
}


def model_of(outputs):
    """A model that reads tokens, the later ones of which are masked."""
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(9, 5, mask_zero=True)(inputs)
    return m.randomize(keras.Model(inputs, outputs(x)))


def tokens():
    x = np.random.default_rng(1).integers(1, 9, (6, 7)).astype("int32")
    for i, row in enumerate(x):
        row[1 + i :] = 0
    return x


def quiet(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def check_folded(folded, model):
    m.assert_same_outputs(folded, model, tokens())
    for layer in folded._flatten_layers():
        assert not type(layer).__module__.startswith("keras_norms")


@pytest.mark.parametrize("name", MASKED)
def test_convert_and_fold_that(name):
    model = quiet(model_of, MASKED[name])
    fused = name in ("dropout", "joined")
    converted = quiet(convert, model, "cbn", fused=fused)
    m.assert_same_outputs(converted, model, tokens())
    check_folded(quiet(fold, converted), model)


@pytest.mark.parametrize("name", {**MASKED, **FOLDED})
def test_fold(name):
    model = quiet(model_of, {**MASKED, **FOLDED}[name])
    check_folded(quiet(fold, model), model)


def test_a_map_that_stays_passes_masks_in_training_and_in_files(tmp_path):
    model = model_of(MASKED["LSTM"])
    new = quiet(convert, model, "cbn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of Keras: the mask is destroyed
        new.compile("sgd", "mse")
        new.fit(tokens(), np.ones((6, 3)), verbose=0)
    new.save(tmp_path / "new.keras")
    loaded = keras.models.load_model(tmp_path / "new.keras")
    m.assert_same_outputs(loaded, new, tokens(), 1e-6)


@pytest.mark.parametrize("equation", ["abcd,b->abcd", "abcd,d->abcd"])
def test_a_scale_and_shift_of_each_channel(equation):
    """Where all axes have the same size."""
    letter = equation[5]
    layer = ChannelAffine(equation, (4, 4, 4), bias_axes=letter)
    x = m.images(2, 4, 4, 4)
    layer(x)
    kernel, bias = m.images(4, seed=1), m.images(4, seed=2)
    layer.set_weights([kernel, bias.reshape(layer.bias.shape)])
    own = (4, 1, 1) if letter == "b" else (4,)
    expected = x * kernel.reshape(own) + bias.reshape(own)
    np.testing.assert_allclose(m.numpy(layer(x)), expected, rtol=1e-5, atol=1e-6)
