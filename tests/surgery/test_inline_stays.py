"""Blocks and subclassed models that cannot be entered stay, and are named."""

import re

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import convert, fold
from tests.support import surgery_models as m
from tests.support.backend import thorough_on
from tests.support.surgery_models import apply, model_of

pytestmark = thorough_on("jax")
X = m.images(5, 6, 6, 3)


def with_block(block):
    pooling = apply(layers.GlobalAveragePooling2D)
    return model_of((6, 6, 3), layers.Conv2D(4, 3, padding="same"), block, pooling)


class Stays(layers.Layer):
    """A convolution and a norm, and something that a graph cannot hold."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(4, 1, name="inner_conv")
        self.norm = layers.BatchNormalization(name="inner_norm")
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

    def build(self, shape):
        self.conv.build(shape)
        self.norm.build(shape)

    def compute_output_shape(self, shape):
        return shape

    def inside(self, x, **kwargs):
        return self.norm(self.conv(x), **kwargs)

    def call(self, x, training=None):
        return self.inside(x, training=training)


class PassesMask(Stays):
    """Its functions lose a mask, which it gives back."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x, training=None):
        return ops.relu(self.inside(x, training=training))


def counts(self, x):
    self.scale.assign(self.scale + 1)
    return self.inside(x)


def remembers(self, x):
    self.last = x.shape
    return self.inside(x)


def adds_loss(self, x):
    self.add_loss(ops.sum(ops.ones(())))
    return self.inside(x)


def asks_training(self, x, training=None):
    return self.inside(x) * 2 if training else self.inside(x, training=False)


def fills_batch(self, x):
    return ops.reshape(self.inside(x), (ops.shape(x)[0], 6, 6, 4))


def of_call(call, **kwargs):
    """A layer like `Stays` with another `call`."""
    return type("Own", (Stays,), {"call": call})(**kwargs)


@pytest.mark.parametrize(
    "call, reason",
    [
        (lambda self, x: self.inside(x) * ops.abs(self.scale), "reads .*scale"),
        (lambda self, x: ops.multiply(self.inside(x), self.scale), "reads .*scale"),
        (lambda self, x: self.inside(x) + ops.sum(self.conv.kernel), "reads .*kernel"),
        (counts, "changes its variables .*scale"),
        (remembers, "sets .*last"),
        (lambda self, x: x if ops.max(x) > 9 else self.inside(x), "symbolic|KerasT"),
        (
            lambda self, x: ops.cond(ops.max(x) > 9, lambda: 2 * x, lambda: x),
            "it gives 'cond.*' a function|__jax_array__",
        ),
        (asks_training, "other calls in training"),
        (
            lambda self, x: self.inside(x, training=False),
            "calls 'inner_norm' with training=False",
        ),
        (adds_loss, "adds losses"),
        (fills_batch, ""),
    ],
)
def test_what_cannot_be_entered_is_named(call, reason):
    model = with_block(of_call(call, name="stays"))
    weights = model.get_weights()
    expected = m.outputs(model, X)
    model.set_weights(weights)  # calling it may have changed it
    with pytest.warns(UserWarning) as said:
        folded = fold(model)
    texts = [str(w.message) for w in said if "fold: what is inside" in str(w.message)]
    assert len(texts) == 1
    assert "'stays' (Own): " in texts[0]
    assert re.search(reason, texts[0])
    assert isinstance(folded.get_layer("stays"), Stays)
    assert m.norms_in(folded) == ["inner_norm"]
    np.testing.assert_allclose(m.outputs(folded, X), expected, rtol=1e-4, atol=1e-5)


def test_the_inner_block_is_named():
    class Outer(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.conv = layers.Conv2D(4, 1, use_bias=False, name="outer_conv")
            self.norm = layers.BatchNormalization(name="outer_norm")
            calls = {"one": fills_batch, "two": asks_training}
            self.parts = [of_call(call, name=name) for name, call in calls.items()]

        def call(self, x):
            for part in self.parts:
                x = part(self.norm(self.conv(x)))
            return x

    says = r"'one' \(Own\).*'two' \(Own\)"
    with pytest.warns(UserWarning, match=says):
        folded = fold(model := with_block(Outer(name="outer")))
    m.assert_same_outputs(folded, model, X)
    assert {*m.norms_in(folded)} == {"inner_norm"}


def test_a_mask_that_only_the_block_passes_on():
    steps = layers.Embedding(6, 4, mask_zero=True), PassesMask(name="stays")
    model = model_of((6, 6), *steps, layers.Reshape((36, 4)), dtype="int32")
    with pytest.warns(UserWarning, match="'stays' .*: it gives its output a mask"):
        fold(model)
    # Where there is no mask it can be entered.
    m.check_fold(with_block(PassesMask()), X, says="")


def test_a_block_stays_in_all_of_its_calls_or_in_none():
    """Its second call, with another shape, cannot be traced."""

    class Cuts(Stays):
        def call(self, x):
            return super().call(x) if x.shape[1] == 6 else ops.shape(x)[0] + x

    cuts = Cuts(name="cuts")
    model = model_of((6, 6, 4), cuts, layers.Cropping2D(1), cuts)
    with pytest.warns(UserWarning, match="'cuts' .*"):
        new = convert(model, lambda norm: None)
    assert isinstance(new.get_layer("cuts"), Cuts)
    assert len(new.weights) == len(model.weights)


def test_models_that_cannot_be_entered():
    class Asks(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(3)

        def build(self, shape):
            self.head.build(shape)

        def call(self, x):
            return self.head(x if ops.max(x) > 0 else -x)

    model = Asks()
    with pytest.raises(ValueError, match="subclassed model .* it is not built"):
        fold(model)
    model(m.images(2, 4, 4, 3))
    for arguments, message in (
        ({}, "subclassed model .* cannot be traced: .*Keras"),
        ({"inline": False}, "cannot be seen from outside"),
        ({"inline": 1}, "`inline` must be True or False"),
    ):
        with pytest.raises(ValueError, match=message):
            fold(model, **arguments)
