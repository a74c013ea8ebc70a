"""fold, convert and prune where a map or a channel cannot pass: the function stays."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CBN, convert, fold, prune, recalibrate
from tests.support import planted
from tests.support import surgery_models as m


def bn(**kwargs):
    return layers.BatchNormalization(**kwargs)


def einsum(equation, shape, bias=None):
    return layers.EinsumDense(equation, shape, bias_axes=bias)


def two_readers(x):
    x = bn()(layers.Dense(4)(x))
    return [layers.Dense(2)(x), x]


def sum_of_inputs(x):
    x = CBN()(layers.Dense(4, activation="tanh")(x))
    return layers.Dense(2)(layers.Add()([x, layers.Dense(4)(x)]))


def shared(norms):
    """Dense layers, a norm after each, and one layer that reads both norms."""

    def outputs(x):
        reader = layers.Dense(3)
        read = [norm(layers.Dense(4, activation="tanh")(x)) for norm in norms()]
        return layers.Add()([reader(y) for y in read])

    return outputs


def one_norm_twice():
    norm = CBN()
    return norm, norm


def shared_before_two_norms(x):
    dense = layers.Dense(4)
    x, y = dense(x), dense(layers.ReLU()(x))
    return layers.Add()([bn()(x), bn()(y)])


def joined_calls_of_a_shared_layer(x):
    dense = layers.Dense(4)
    return bn()(layers.Concatenate()([dense(x), dense(layers.ReLU()(x))]))


def read_by_a_function(x):
    x = CBN()(layers.Dense(4, activation="tanh")(x))
    return layers.Dense(2)(ops.square(x))


def norm_of_concatenation_in_place(x):
    """Joined along another axis than the channels."""
    parts = [layers.Conv1D(4, 2, name=f"part{i}")(x) for i in range(2)]
    return bn()(layers.Concatenate(axis=1)(parts))


def between(*others, last=None):
    """CBN, other layers, and a Dense layer or another one that reads them."""

    def outputs(x):
        x = CBN()(layers.Dense(4, activation="tanh")(x))
        for other in others:
            x = other()(x)
        return (last or (lambda: layers.Dense(2)))()(x)

    return outputs


def chain(*makers):
    def outputs(x):
        for make in makers:
            x = make()(x)
        return x

    return outputs


# A shape of inputs, and outputs of them; whether a norm is left where it cannot go.
FOLDED = {
    "einsum without bias": ((4,), chain(lambda: einsum("ab,bc->ac", 5), bn), 0),
    "einsum of steps": ((3, 4), chain(lambda: einsum("abc,bcd->abd", (3, 2)), bn), 0),
    "einsum with bias": (
        (3, 4),
        chain(lambda: einsum("abc,cd->abd", (3, 2), "d"), bn),
        0,
    ),
    "einsum whose bias is of steps": (
        (3, 4),
        chain(lambda: einsum("abc,cd->abd", (3, 2), "b"), bn),
        1,
    ),
    "einsum that has no channels": (
        (3, 4),
        chain(lambda: einsum("abc,b->abc", (3, 4)), bn),
        1,
    ),
    "before einsum that has no channels": (
        (3, 4),
        chain(CBN, lambda: einsum("abc,b->abc", (3, 4), "b")),
        1,
    ),
    "before einsum whose bias is of steps": (
        (3, 4),
        chain(CBN, lambda: einsum("abc,cd->abd", (3, 2), "b")),
        1,
    ),
    "einsum with activation": (
        (4,),
        chain(lambda: layers.EinsumDense("ab,bc->ac", 5, activation="relu"), bn),
        1,
    ),
    "norm is an output": ((4,), two_readers, 0),
    "norm read by a sum": ((4,), sum_of_inputs, 1),
    "norms of a shared layer": ((4,), shared(lambda: (CBN(), CBN())), 2),
    "a shared norm of a shared layer": ((4,), shared(one_norm_twice), 0),
    "equal norms of a shared layer": (
        (4,),
        shared(lambda: (CBN(name="equal"), CBN(name="equal_too"))),
        0,
    ),
    "joined calls of a shared layer": ((4,), joined_calls_of_a_shared_layer, 1),
    "norm read by a function": ((4,), read_by_a_function, 1),
    "norms of inputs": ((4,), chain(bn, bn), 1),
    "einsum over steps": ((3, 4), chain(lambda: einsum("abc,bd->adc", (2, 4)), bn), 1),
    "before einsum over steps": (
        (3, 4),
        chain(CBN, lambda: einsum("abc,bd->adc", (2, 4))),
        1,
    ),
    "depthwise": (
        (5, 4),
        chain(lambda: layers.DepthwiseConv1D(3, use_bias=False), bn),
        0,
    ),
    "a norm of one call of a shared layer": (
        (4,),
        shared(lambda: (CBN(), layers.ReLU())),
        1,
    ),
    "two norms of a shared layer": ((4,), shared_before_two_norms, 2),
    "two norms": ((4,), chain(lambda: layers.Dense(3), bn, CBN), 0),
    "along another axis": ((5, 4), norm_of_concatenation_in_place, 1),
    "before a linear activation": (
        (5, 4),
        between(lambda: layers.Activation("linear")),
        0,
    ),
    "before an activation": ((5, 4), between(lambda: layers.Activation("relu")), 1),
    "before pooling": ((5, 4), between(layers.GlobalAveragePooling1D), 0),
    "before pooling that keeps axes": (
        (5, 4),
        between(lambda: layers.GlobalAveragePooling1D(keepdims=True)),
        0,
    ),
    "before pooling of channels": (
        (5, 4),
        between(lambda: layers.GlobalAveragePooling1D("channels_first")),
        1,
    ),
    "before a flattening of channels first": (
        (5, 4),
        between(lambda: layers.Flatten("channels_first")),
        1,
    ),
    "before a reshaping": ((6, 2), between(lambda: layers.Reshape((3, 2, 4))), 0),
    "before a reshaping of channels": (
        (6, 2),
        between(lambda: layers.Reshape((24,))),
        1,
    ),
}


def model_of(shape, outputs, seed=0):
    inputs = keras.Input(shape)
    model = m.randomize(keras.Model(inputs, outputs(inputs)), seed)
    equal = [layer for layer in model.layers if layer.name.startswith("equal")]
    for layer in equal:
        layer.set_weights(equal[0].get_weights())
    return model


def quietly(function, *arguments, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **kwargs)


@pytest.mark.parametrize("name", FOLDED)
def test_fold(name):
    shape, outputs, left = FOLDED[name]
    model = model_of(shape, outputs)
    folded = quietly(fold, model)
    m.assert_same_outputs(folded, model, m.batch_for(model))
    kept = m.of_class(folded, layers.BatchNormalization)
    assert len(kept) <= left


@pytest.mark.parametrize("name", FOLDED)
def test_convert(name):
    """BatchNormalization goes, or its map stays, where CBN takes over."""
    shape, outputs, _ = FOLDED[name]
    model = model_of(shape, outputs)
    converted = quietly(convert, model, "cbn", data=m.batch_for(model))
    m.assert_same_outputs(converted, model, m.batch_for(model, seed=3))
    assert not m.of_class(converted, layers.BatchNormalization)


@pytest.mark.parametrize(
    "name", [name for name in FOLDED if name.startswith(("einsum", "depthwise"))]
)
def test_convert_gives_a_bias_where_the_norm_had_one(name):
    shape, outputs, _ = FOLDED[name]
    model = model_of(shape, outputs)
    converted = quietly(convert, model, "cbn", preserve=False)
    assert not m.of_class(converted, layers.BatchNormalization)
    before, after = (each.layers[1] for each in (model, converted))
    assert type(before) is type(after)
    if name in ("einsum without bias", "einsum over steps", "depthwise"):
        assert before.bias is None and after.bias is not None


def dense_after(*makers, filters=5):
    """A convolution with dead channels, layers, and what reads them."""

    def outputs(x):
        x = m.conv(x, filters, "one")
        for make in makers:
            x = make(x)
        if len(x.shape) > 2:
            x = layers.Flatten()(x)
        return layers.Dense(2, name="head")(x)

    return outputs


def half(x):
    return x[..., :3]


def gated_by_pixels(x):
    return layers.Multiply()([x, layers.Conv2D(1, 1, name="pixels")(x)])


# Whether the dead channels can go.
PRUNED = {
    "a sum with a number": (dense_after(lambda x: x + 2.0), True),
    "a sum with a vector": (dense_after(lambda x: x + np.ones(5, "float32")), False),
    "a function": (dense_after(lambda x: ops.tanh(x)), True),
    "a function of positions": (dense_after(lambda x: ops.flip(x, -1)), False),
    "a part": (dense_after(half), False),
    "a gate for all channels": (dense_after(gated_by_pixels), False),
    "rescaling": (dense_after(layers.Rescaling(0.5, 1.0)), True),
    "rescaling of each": (dense_after(layers.Rescaling([0.5] * 5)), False),
    "softmax": (dense_after(layers.Activation("softmax")), False),
    "PReLU": (dense_after(layers.PReLU()), True),
    "PReLU shared by pixels": (dense_after(layers.PReLU(shared_axes=[1, 2])), True),
    "PReLU shared by channels": (dense_after(layers.PReLU(shared_axes=[3])), True),
    "a scale of each": (
        dense_after(lambda x: einsum("abcd,d->abcd", x.shape[1:], "d")(x)),
        True,
    ),
    "a permutation": (dense_after(layers.Permute((3, 1, 2))), True),
    "a reshaping": (dense_after(layers.Reshape((36, 5))), True),
    "a reshaping of channels": (dense_after(layers.Reshape((60, 3))), False),
    "pooling of channels": (
        dense_after(layers.MaxPooling2D(2, data_format="channels_first")),
        False,
    ),
    "mean of channels": (
        dense_after(layers.GlobalAveragePooling2D(data_format="channels_first")),
        False,
    ),
    "depthwise with softmax": (
        dense_after(layers.DepthwiseConv2D(1, activation="softmax")),
        False,
    ),
    "a norm of pixels": (dense_after(layers.LayerNormalization()), False),
    "always in training": (
        dense_after(lambda x: layers.Dropout(0.0)(x, training=True)),
        False,
    ),
    "joined along pixels": (
        dense_after(lambda x: layers.Concatenate(axis=1)([x, m.conv(x, 5, "two")])),
        False,
    ),
    "joined with pixels": (
        dense_after(
            lambda x: layers.Concatenate(axis=1)([x, layers.Permute((1, 2, 3))(x)])
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", PRUNED)
def test_prune(name):
    outputs, goes = PRUNED[name]
    inputs = keras.Input((6, 6, 3))
    x = m.conv(inputs, 4, "first", size=1)  # of which channels can always go
    model = planted.settled(inputs, outputs(x))
    planted.kill(model.get_layer("one_bn"), [1, 4], -0.7)
    planted.kill(model.get_layer("first_bn"), [0], -0.7)
    pruned = prune(model, m.batch_for(model, 16), similarity=None)
    planted.assert_exact(pruned, model)
    assert planted.removed(pruned).get("first") == [0]
    assert planted.removed(pruned).get("one", []) == ([1, 4] if goes else [])


def test_sizes_that_are_not_known():
    """Flatten of images of any size: nothing in front of it can move."""
    inputs = keras.Input((None, 2, 3))
    x = m.conv(inputs, 4, "one")
    x = CBN(name="norm")(layers.Conv2D(4, 1, activation="relu", name="two")(x))
    model = m.randomize(keras.Model(inputs, layers.Flatten()(x)))
    x = m.images(4, 6, 2, 3)
    m.assert_same_outputs(quietly(fold, model), model, x)
    assert prune(model, x, gamma=0.0).macs is None


def test_a_layer_that_is_never_called():
    class Idle(keras.Model):
        def __init__(self):
            super().__init__(name="idle")
            self.dense, self.norm = layers.Dense(2), bn(name="unused")

        def call(self, x):
            return self.dense(x)

    model = Idle()
    x = m.images(4, 3)
    model(x)
    model.norm.build((None, 2))
    with pytest.raises(ValueError, match="'unused'.*'idle' were not called"):
        recalibrate(model, x, verbose=0)


class NoConfig(layers.Layer):
    def build(self, shape):
        self.add_weight(shape=(), name="w")

    def get_config(self):
        raise NotImplementedError("no configuration")

    def call(self, x):
        return x


class OtherConfig(NoConfig):
    def __init__(self, factor):
        super().__init__()

    def get_config(self):
        return {"name": self.name}


@pytest.mark.parametrize(
    "layer, message",
    [
        (NoConfig(name="own"), "'own' has no configuration to copy it from: no conf"),
        (OtherConfig(3), "could not be made again from its configuration"),
    ],
)
def test_layers_that_cannot_be_copied(layer, message):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, bn()(layers.Dense(2)(layer(inputs))))
    with pytest.raises(ValueError, match=message):
        fold(model)


def test_wrapped_kernels_before_a_norm_without_gamma():
    """What WS does to lengths is made up for in the statistics alone."""
    inputs = keras.Input((8,))
    x = bn(scale=False, epsilon=1e-6)(layers.Dense(4, use_bias=False)(inputs))
    model = m.randomize(keras.Model(inputs, x))
    kernel = model.layers[1].kernel
    kernel.assign(kernel - ops.mean(kernel, 0))  # a mean would be lost
    for norm in ("ws", "cwn"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            converted = convert(model, norm)
        m.assert_same_outputs(converted, model, m.batch_for(model), 1e-4)


# Classes derived from those of Keras, which may compute something else


@keras.saving.register_keras_serializable(package="tests")
class Damped(layers.BatchNormalization):
    def call(self, x, training=None, mask=None):
        return 0.5 * super().call(x, training=training, mask=mask)


@keras.saving.register_keras_serializable(package="tests")
class Doubled(layers.Dense):
    def call(self, x):
        return 2 * super().call(x)


@keras.saving.register_keras_serializable(package="tests")
class Halved(layers.Dense):
    @property
    def kernel(self):
        return self._kernel / 2


def of_derived_classes(norm, linear):
    inputs = keras.Input((8,))
    x = layers.ReLU()(norm(name="norm")(layers.Dense(6)(inputs)))
    x = layers.ReLU()(bn()(linear(5, name="linear")(x)))
    return m.randomize(keras.Model(inputs, layers.Dense(3)(x)))


@pytest.mark.parametrize("norm", ["cbn", "noisy_bn", "lp_norm"])
def test_a_batch_normalization_that_overrides_call_stays(norm):
    model = of_derived_classes(Damped, layers.Dense)
    x = m.batch_for(model)
    with pytest.warns(UserWarning, match=r"override `call`.*norm \(of class Damped\)"):
        converted = convert(model, norm, data=x)
    m.assert_same_outputs(converted, model, x, 1e-4)
    with pytest.warns(UserWarning, match=r"override `call`.*norm \(of class Damped\)"):
        folded = fold(converted)
    m.assert_same_outputs(folded, converted, x, 1e-4)
    assert type(folded.get_layer("norm")) is Damped


@pytest.mark.parametrize("cls", [Doubled, Halved])
@pytest.mark.parametrize("norm", ["cbn", "fused", "wn"])
def test_linear_layers_that_compute_something_else(cls, norm):
    model = of_derived_classes(layers.BatchNormalization, cls)
    x = m.batch_for(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if norm == "fused":
            converted = convert(model, "cbn", data=x, fused=True)
        else:
            converted = convert(model, norm, data=x)
        folded = fold(converted)
    m.assert_same_outputs(converted, model, x, 1e-4)
    m.assert_same_outputs(folded, model, x, 1e-4)
    assert type(folded.get_layer("linear")) is cls


def test_a_class_that_overrides_the_kernel_is_not_wrapped():
    model = of_derived_classes(layers.BatchNormalization, Halved)
    with pytest.warns(UserWarning, match="overrides the kernel.*'linear'"):
        convert(model, "wn")
