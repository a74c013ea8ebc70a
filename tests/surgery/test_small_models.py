"""convert, fold, and fold after convert: the outputs stay; what is left is known."""

import functools
import itertools

import numpy as np
import pytest
from keras import Sequential, layers

from keras_norms import CBN, CWN, WN, WS, LpNorm, NoisyBN, convert
from tests.support import surgery_models as m
from tests.support.backend import later, numpy, some, thorough_on
from tests.support.surgery_models import apply, bn, chain, dense, relu

pytestmark = thorough_on("jax")

# Steps of `chain`
cbn = apply(CBN)
first = apply(layers.Conv2D, 4, 3, activation="relu")
first_1x1 = apply(layers.Conv2D, 4, 1, activation="relu")
tanh = dense(4, "tanh")


def einsum(equation, shape, bias=None, **kwargs):
    return apply(layers.EinsumDense, equation, shape, bias_axes=bias, **kwargs)


def conv(*args, padding="same", **kwargs):
    return apply(layers.Conv2D, *args, padding=padding, **kwargs)


def as_it_is(x):
    return x


def branches(join, *steps):
    """What functions make of the same tensor, joined."""
    return lambda x: join([step(x) for step in steps])


def norms_of_one_reader(*norms):
    """A Dense layer before each norm, and one layer that reads all of them."""

    def result(x):
        reader = layers.Dense(3)
        return layers.add([reader(norm(tanh(x))) for norm in norms])

    return result


# Name -> shape of the input, steps, BatchNormalization and Rescaling layers that are
# left by fold, which says so.
CASES = {}


def case(name, shape, *steps, left=0, shifts=0):
    CASES[name] = shape, steps, left, shifts


# Kinds of layers before a norm
case("einsum without bias", (4,), einsum("ab,bc->ac", 5), bn)
case("einsum, bias of steps", (3, 4), einsum("abc,cd->abd", (3, 2), "b"), bn, left=1)
case("einsum over steps", (3, 4), einsum("abc,bd->adc", (2, 4)), bn, left=1)
active = einsum("ab,bc->ac", 5, activation="relu")
case("einsum with activation", (4,), active, bn, left=1)
case("depthwise", (5, 4), apply(layers.DepthwiseConv1D, 3, use_bias=False), bn)
case("norm is an output", (4,), dense(), bn, branches(list, dense(2), as_it_is))
for name, norm in {
    "NoisyBN": apply(NoisyBN),
    "LpNorm of 1.5": apply(LpNorm, p=1.5),
    "CBN": cbn,
}.items():
    case(name, (7, 7, 3), conv(4, 3), norm, relu, conv(4, 3, strides=2), norm)
places = layers.Cropping2D(2), layers.UpSampling2D(2), layers.Dropout(0.5)
pooled = layers.AveragePooling2D(2), layers.Flatten(), layers.Dense(3)
parts = branches(layers.concatenate, conv(4, 3), conv(2, 3))
case("pooled and padded", (8, 8, 3), parts, *places, bn, relu, cbn, *pooled)
case("operators", (6,), dense(), bn, lambda x: x * 2.0 + 1.0)

# Kinds of layers after a norm
summed = branches(layers.add, as_it_is, dense())
case("sum reads it", (4,), tanh, cbn, summed, dense(2), left=1)
case("then no channels", (3, 4), cbn, einsum("abc,b->abc", (3, 4), "b"), left=1)
case("then bias of steps", (3, 4), cbn, einsum("abc,cd->abd", (3, 2), "b"), shifts=1)
case("then einsum over steps", (3, 4), cbn, einsum("abc,bd->adc", (2, 4)), left=1)
pooling = layers.GlobalAveragePooling1D
for name, step, left in (
    ("activation", apply(layers.Activation, "relu"), 1),
    ("pooling", apply(pooling), 0),
    ("pooling of channels", apply(pooling, "channels_first"), 1),
    ("flattening", apply(layers.Flatten), 0),
    ("flattening of channels first", apply(layers.Flatten, "channels_first"), 1),
):
    case(f"before {name}", (5, 4), tanh, cbn, step, dense(2), left=left)
flat = apply(layers.Reshape, (24,))
case("before reshaping of channels", (6, 2), tanh, cbn, flat, dense(2), left=1)

# Shared layers
case("norms of one reader", (4,), norms_of_one_reader(cbn, cbn), left=2)
case("one norm of one reader", (4,), norms_of_one_reader(*[CBN()] * 2))
case("equal norms of one reader", (4,), norms_of_one_reader(cbn, cbn))
case("a norm of one of two calls", (4,), norms_of_one_reader(cbn, relu), left=1)
shared = layers.Dense(4)
twice = branches(layers.concatenate, shared, chain(relu, shared))
case("norm of two calls joined", (4,), twice, bn, left=1)
again = layers.Dense(4)
case("called on its own output", (4,), again, bn, relu, again, bn, left=2)
along_steps = functools.partial(layers.concatenate, axis=1)
parts = branches(along_steps, *[apply(layers.Conv1D, 4, 2)] * 2)
case("joined along steps", (5, 4), parts, bn, left=1)

# Zero padding after a norm: its shift stays
up = functools.partial(apply, layers.Conv2DTranspose, 5)
image = (9, 9, 3)
case("transposed, wide strides", image, first, cbn, up(1, strides=2), shifts=1)
case("transposed, no border", image, first, cbn, up(1))
padded = chain(apply(layers.ZeroPadding2D, 2), conv(4, 3, padding="valid"))
one_padded = branches(list, padded, chain(apply(layers.Dropout, 0.5), conv(4, 1)))
case("padding layer before one of two", image, first, cbn, one_padded, shifts=1)
inner = apply(Sequential, [layers.ZeroPadding2D(2), layers.Conv2D(5, 3)])
case("padding in another model", image, first, cbn, inner, left=1)
read_twice = branches(list, as_it_is, branches(layers.add, as_it_is, conv(4, 3)))
case("norm is read and an output", image, first, cbn, read_twice, left=1)
for (cls, options), padding in itertools.product(
    [
        (layers.Conv2D, {"filters": 8, "groups": 2, "dilation_rate": 2}),
        (layers.DepthwiseConv2D, {"depth_multiplier": 2, "strides": 2}),
        (layers.SeparableConv2D, {"filters": 5, "depth_multiplier": 2, "strides": 3}),
    ],
    ["same", "valid"],
):
    steps = relu, cbn, apply(cls, kernel_size=3, padding=padding, **options), bn
    name = f"{cls.__name__}, {padding}"
    case(name, (9, 10, 4), *steps, shifts=padding == "same")
case("then einsum", image, first, cbn, einsum("abcd,de->abce", (None, None, 5)))


NORMS = layers.BatchNormalization, CBN, LpNorm, NoisyBN


def others(model):
    """All layers but norms: names, classes, and how often each is called."""
    return [
        (layer.name, type(layer), len(layer._inbound_nodes))
        for layer in model._flatten_layers()
        if not isinstance(layer, (*NORMS, layers.Rescaling))
    ]


def assert_folds_and_converts(model, left=0, shifts=0):
    folded = m.check_fold(model, says="fold: " if left + shifts else "")
    assert len(m.norms_in(folded)) == left
    before, after = (len(m.of_class(x, layers.Rescaling)) for x in (model, folded))
    assert after == before + shifts
    assert others(folded) == others(model)
    assert not any(x.trainable for x in m.of_class(folded, layers.BatchNormalization))
    if not m.norms_in(model):
        return None
    x = m.batch_for(model)
    converted = m.check_convert(model, "cbn", m.batch_for(model, seed=4), data=x)
    assert not m.norms_in(converted)
    m.check_fold(converted, x)
    return converted


@pytest.mark.parametrize("name", CASES)
def test_small_models(name):
    shape, steps, left, shifts = CASES[name]
    model = m.model_of(shape, *steps)
    if name == "equal norms of one reader":
        one, other = m.of_class(model, CBN)
        other.set_weights(one.get_weights())
    assert_folds_and_converts(model, left, shifts)


@pytest.mark.parametrize("name", some(m.MODELS, ["kinds", "nested", "shared"]))
def test_networks(name):
    """Converting again finds nothing to do and inserts nothing twice."""
    new = assert_folds_and_converts(m.MODELS[name]())
    assert others(m.check_convert(new, "cbn")) == others(new)


@pytest.mark.parametrize("name", ["einsum without bias", "depthwise"])
def test_a_bias_where_the_norm_had_one(name):
    shape, steps, *_ = CASES[name]
    model = m.model_of(shape, *steps)
    plain = m.quiet(convert, model, "cbn", preserve=False)
    assert model.layers[1].bias is None and plain.layers[1].bias is not None


@pytest.mark.parametrize("wrapper", [WS, WN, *later(CWN)])
@pytest.mark.parametrize(
    "cls, arguments",
    [
        (layers.Conv2D, {"filters": 4, "kernel_size": 3, "use_bias": False}),
        (layers.DepthwiseConv2D, {"kernel_size": 3}),
        (layers.SeparableConv2D, {"filters": 4, "kernel_size": 3}),
        (layers.Conv2DTranspose, {"filters": 4, "kernel_size": 3}),
        (layers.Dense, {"units": 4, "activation": "tanh"}),
    ],
)
def test_weight_normalization(wrapper, cls, arguments):
    model = m.model_of((7, 7, 3), lambda x: wrapper(cls(**arguments))(x), bn)
    folded = m.check_fold(model)
    assert len(m.norms_in(folded)) == ("activation" in arguments)
    assert type(folded.layers[1]) is cls


def test_maximum_pooling_commutes_with_positive_scales():
    norm = layers.BatchNormalization(center=False, name="bn")
    steps = conv(4, 3), layers.MaxPooling2D(2), layers.ZeroPadding2D(0), norm
    model = m.model_of((8, 8, 3), *steps)
    norm.moving_mean.assign(np.zeros(4))
    norm.gamma.assign(np.abs(numpy(norm.gamma)))
    assert not m.norms_in(m.check_fold(model))
    norm.gamma.assign(-numpy(norm.gamma))
    assert m.norms_in(m.check_fold(model)) == ["bn"]


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_a_channel_of_scale_zero(padding):
    norm = apply(CBN, decouple=False, name="norm")
    model = m.model_of((9, 9, 3), first, norm, conv(5, 3, padding=padding))
    gamma = model.get_layer("norm").gamma
    gamma.assign(numpy(gamma) * [1, 0, 1, 0])
    assert len(m.norms_in(m.check_fold(model))) == (padding == "same")


@pytest.mark.parametrize("norm", [layers.BatchNormalization, CBN])
def test_another_axis_than_the_channels(norm):
    """It stays in place, whatever is around it; the rest is folded."""
    model = m.model_of(
        (8, 3),
        *(apply(layers.Conv1D, 4, 1), bn, apply(norm, axis=1, name="wrong")),
        *(apply(layers.ZeroPadding1D, 1), apply(layers.Cropping1D, 2)),
        *(apply(layers.UpSampling1D, 2), apply(norm, axis=1, name="steps"), dense()),
        *(apply(layers.AveragePooling1D, 2), apply(pooling)),
    )
    assert m.norms_in(m.check_fold(model)) == ["wrong", "steps"]


def test_sizes_that_are_not_known():
    model = m.model_of((None, None, 3), first, cbn, conv(5, 3))
    folded = m.check_fold(model, m.images(2, 9, 11, 3))
    m.assert_same_outputs(folded, model, m.images(1, 6, 14, 3))
    # Nothing in front of a flattening can move.
    model = m.model_of((None, 2, 3), first_1x1, cbn, apply(layers.Flatten))
    assert len(m.norms_in(m.check_fold(model, m.images(4, 6, 2, 3)))) == 1
