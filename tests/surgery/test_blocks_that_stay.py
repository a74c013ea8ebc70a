"""Blocks that cannot be entered stay, and a warning says why."""

import re

import keras
import pytest
from keras import layers, ops

from keras_norms import convert, fold
from tests.support import surgery_models as m
from tests.support.backend import thorough_on
from tests.support.surgery_models import model_of

pytestmark = thorough_on("jax")
X = m.images(5, 6, 6, 3)


class Stays(layers.Layer):
    """A convolution and a norm, and something that a graph cannot hold."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(4, 1, name="inner_conv")
        self.norm = layers.BatchNormalization(name="inner_norm")
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")
        for layer in self.conv, self.norm:
            layer.build((None, 6, 6, 4))

    def compute_output_shape(self, shape):
        return shape

    def inside(self, x, **kwargs):
        return self.norm(self.conv(x), **kwargs)


def also(action):
    """A call that does something else besides."""

    def call(self, x):
        action(self, x)
        return self.inside(x)

    return call


def asks_training(self, x, training=None):
    return self.inside(x) * 2 if training else self.inside(x, training=False)


def passes_mode(self, x, training=None):
    return self.inside(x, training=training)


class CallsAnother(Stays):
    """A block that is entered too, but in training only."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = m.of_call(passes_mode, Stays)

    def call(self, x, training=None):
        return self.block(x, training=True) if training else self.inside(x)


class Unknown(layers.Layer):
    def call(self, x):
        return x

    def get_config(self):
        raise NotImplementedError


def fills_batch(self, x):
    return ops.reshape(self.inside(x), (ops.shape(x)[0], 6, 6, 4))


@pytest.mark.parametrize(
    "call, reason",
    [
        (lambda self, x: self.inside(x) * ops.abs(self.scale), "reads .*scale"),
        (lambda self, x: ops.multiply(self.inside(x), self.scale), "reads .*scale"),
        (also(lambda self, x: self.scale.assign_add(1)), "changes .*scale"),
        (also(lambda self, x: setattr(self, "last", x.shape)), "sets .*last"),
        (lambda self, x: x if ops.max(x) > 9 else self.inside(x), "symbolic|KerasT"),
        (
            lambda self, x: ops.cond(ops.max(x) > 9, lambda: 2 * x, lambda: x),
            "it passes a function to 'cond.*'|__jax_array__",
        ),
        (asks_training, "other calls in training"),
        (
            lambda self, x: self.inside(x, training=False),
            "always calls 'inner_norm' with training=False",
        ),
        (also(lambda self, x: self.add_loss(ops.ones(()))), "adds losses"),
        (lambda self, x: Unknown()(self.inside(x)), "which has no configuration"),
        (fills_batch, ""),
    ],
)
def test_what_cannot_be_entered_is_named(call, reason):
    model = m.with_block(m.of_call(call, Stays, "stays"))
    says = rf"with all layers inside.* 'stays' \(Own\): .*({reason})"
    with pytest.warns(UserWarning, match=says):
        folded = fold(model)
    assert isinstance(folded.get_layer("stays"), Stays)
    assert m.norms_in(folded) == ["inner_norm"]
    m.assert_same_outputs(folded, model, X)


def test_blocks_of_which_more_is_needed_than_their_calls_are_named():
    names = "penalised", "trained", "sized"
    penalised, trained, sized = (m.of_call(passes_mode, Stays, name) for name in names)
    penalised.activity_regularizer = keras.regularizers.L2(0.1)
    sized.compute_output_shape = lambda shape: (shape[0], None, None, 4)
    steps = penalised, lambda x: trained(x, training=True), CallsAnother(name="other")
    model = m.with_block(*steps, sized)
    with pytest.warns(UserWarning, match="cannot be traced") as caught:
        folded = fold(model)
    said = " ".join(str(warning.message) for warning in caught)
    for name, reason in (
        ("penalised", "it has an activity regularizer"),
        ("trained", "it is called with training=True"),
        ("other", "it makes other calls in training"),
        ("sized", "Keras computes other output shapes"),
    ):
        assert isinstance(folded.get_layer(name), Stays)
        assert re.search(rf"'{name}' \(\w+\): {reason}", said)
    m.assert_same_outputs(folded, model, X)


def test_the_inner_block_is_named():
    def call(self, x):
        for part in self.parts:
            x = part(self.norm(self.conv(x)))
        return x

    calls = {"one": fills_batch, "two": asks_training}
    parts = [m.of_call(call, Stays, name) for name, call in calls.items()]
    conv = layers.Conv2D(4, 1, use_bias=False, name="outer_conv")
    norm = layers.BatchNormalization(name="outer_norm")
    model = m.with_block(m.of_call(call, conv=conv, norm=norm, parts=parts))
    with pytest.warns(UserWarning, match=r"'one' \(Own\).*'two' \(Own\)"):
        folded = fold(model)
    m.assert_same_outputs(folded, model, X)
    assert {*m.norms_in(folded)} == {"inner_norm"}


def test_a_mask_that_only_the_block_passes_on():
    """Its functions lose a mask, which it gives back."""
    own = m.of_call(lambda self, x: ops.relu(self.inside(x)), Stays, "stays")
    own.supports_masking = True
    steps = layers.Embedding(6, 4, mask_zero=True), own, layers.Reshape((36, 4))
    with pytest.warns(UserWarning, match="'stays' .*: it gives its output a mask"):
        fold(model_of((6, 6), *steps, dtype="int32"))


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
