"""convert, fold, and fold after convert: the outputs stay; what is left is known."""

import functools
import itertools

import keras
import numpy as np
import pytest
from keras import Sequential, layers

from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN, convert, fold
from tests.support import backend
from tests.support import surgery_models as m
from tests.support.backend import later, numpy, precision, some
from tests.support.surgery_models import apply, bn, branches, chain, dense, relu

pytestmark = backend.thorough_on("jax")

# Steps of `chain`
cbn = apply(CBN)
first = apply(layers.Conv2D, 4, 3, activation="relu")
tanh = dense(4, "tanh")
as_it_is = chain()


def einsum(equation, shape, bias=None, **kwargs):
    return apply(layers.EinsumDense, equation, shape, bias_axes=bias, **kwargs)


def conv(*args, padding="same", **kwargs):
    return apply(layers.Conv2D, *args, padding=padding, **kwargs)


def norms_of_one_reader(*norms):
    """A Dense layer before each norm, and one layer that reads all of them."""
    reader = layers.Dense(3)
    return branches(layers.add, *(chain(tanh, norm, reader) for norm in norms))


# Name -> shape of the input, steps, BatchNormalization layers that are left by fold,
# which says so, and Rescaling layers.
CASES = {}


def case(name, shape, *steps, left=0, shifts=0):
    CASES[name] = shape, steps, left, shifts


@keras.saving.register_keras_serializable(package="tests")
class Derived(layers.BatchNormalization):
    pass


derived = apply(Derived)

# Kinds of layers before a norm
case("derived class", (4,), dense(), derived, relu, derived, relu, left=1)
case("einsum without bias", (4,), einsum("ab,bc->ac", 5), bn)
case("einsum, bias of steps", (3, 4), einsum("abc,cd->abd", (3, 2), "b"), bn, left=1)
case("einsum over steps", (3, 4), einsum("abc,bd->adc", (2, 4)), bn, left=1)
active = einsum("ab,bc->ac", 5, activation="relu")
case("einsum with activation", (4,), active, bn, left=1)
case("depthwise", (5, 4), apply(layers.DepthwiseConv1D, 3, use_bias=False), bn)
case("norm is an output", (4,), dense(), bn, branches(list, dense(2), as_it_is))
norms = {"NoisyBN": apply(NoisyBN), "LpNorm": apply(LpNorm, p=1.5), "CBN": cbn}
for name, norm in norms.items():
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
prelu = layers.PReLU("random_uniform")
prelu.build((None, 4))  # Keras would do it in the first call.
no_bias = apply(layers.Dense, 4, use_bias=False, activation=prelu)
case("before no bias and a function with weights", (6,), cbn, no_bias)
flat = apply(layers.Reshape, (24,))
case("before reshaping of channels", (6, 2), tanh, cbn, flat, dense(2), left=1)
split, whole = apply(layers.Reshape, (3, 2, 4)), apply(layers.Reshape, (6, 4))
case("reshaping of steps", (6, 2), tanh, cbn, split, dense(), whole, bn)


# Noise that is there at inference too
def always(x):
    return layers.Dropout(0.5)(x, training=True)


case("noise after a norm", (4,), tanh, bn, always, dense(), left=1)
case("noise before a norm", (4,), dense(), always, bn, left=1)

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
convolutions = {
    layers.Conv2D: {"filters": 8, "groups": 2, "dilation_rate": 2},
    layers.DepthwiseConv2D: {"depth_multiplier": 2, "strides": 2},
    layers.SeparableConv2D: {"filters": 5, "depth_multiplier": 2, "strides": 3},
}
for cls, padding in itertools.product(convolutions, ("same", "valid")):
    step = apply(cls, kernel_size=3, padding=padding, **convolutions[cls])
    name, shifts = f"{cls.__name__}, {padding}", padding == "same"
    case(name, (9, 10, 4), relu, cbn, step, bn, shifts=shifts)
case("then einsum", image, first, cbn, einsum("abcd,de->abce", (None, None, 5)))


def others(model):
    """All layers but norms: names, classes, and how often each is called."""
    norms = layers.BatchNormalization, CBN, LpNorm, NoisyBN, layers.Rescaling
    norms += (layers.Identity,)  # An output has the name of a norm.
    return [
        (layer.name, type(layer), len(layer._inbound_nodes))
        for layer in model._flatten_layers()
        if not isinstance(layer, norms)
    ]


def assert_folds_and_converts(model, left=0, shifts=0):
    folded = m.check_fold(model, says="fold: " if left else "")
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


@pytest.mark.parametrize("wrapper", [WS, WN, *later(CWN)])
def test_weight_normalization(wrapper):
    kinds = convolutions | {layers.Conv2DTranspose: {"filters": 4}}
    for cls, options in kinds.items():
        layer = wrapper(cls(kernel_size=3, **options))
        folded = m.check_fold(m.model_of((7, 7, 4), layer, bn))
        assert not m.norms_in(folded) and type(folded.layers[1]) is cls
    model = m.model_of((4,), wrapper(layers.Dense(4, "tanh")), bn)
    assert len(m.norms_in(m.check_fold(model))) == 1


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


def test_a_channel_of_a_scale_that_is_too_small_for_float16():
    with precision("mixed_float16"):
        norm = apply(layers.BatchNormalization, name="norm")
        model = m.model_of((9, 9, 3), first, norm, conv(5, 3))
    gamma = model.get_layer("norm").gamma
    gamma.assign(numpy(gamma) * [1e-6, 1, 1, 1])
    assert m.norms_in(m.check_fold(model, tolerance=5e-3)) == ["norm"]


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
    model = m.model_of((None, 5, 3), first, cbn, apply(layers.Flatten))
    assert len(m.norms_in(m.check_fold(model, m.images(4, 6, 5, 3)))) == 1


@backend.tensorflow_only
def test_float64_shows_that_the_algebra_is_exact():
    with precision("float64"):
        model = m.kinds()
        x = m.batch_for(model).astype("float64")
        m.check_fold(model, x, 1e-12)
        m.check_fold(m.check_convert(model, "cbn", x, 1e-12, data=x), x, 1e-12)


@backend.has_channels_first
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
    wrapped = m.model_of(
        (3, 9, 9),
        lambda x: WS(layers.Conv2D(4, 3, **first))(x),
        *(apply(layers.BatchNormalization, axis=1), relu),
        lambda x: WS(layers.Conv2D(2, 3, **first))(x),
    )
    new = m.check_convert(wrapped, data=m.batch_for(wrapped))
    assert not m.norms_in(new) and len(m.of_class(new, CBN)) == 1
    new = m.check_convert(model, data=m.batch_for(model))
    assert sorted(layer.axis for layer in m.of_class(new, CBN)) == [-1, 1, 1]


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


# Masks: what reads them reads the same ones
mean = apply(layers.GlobalAveragePooling1D)
lstm, gru = apply(layers.LSTM, 3), apply(layers.GRU, 3)
sequence = apply(layers.LSTM, 3, return_sequences=True)


def attention(x):
    x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(bn(x))
    return mean(layers.MultiHeadAttention(2, 3)(bn(tanh(x)), bn(relu(x))))


def explicit(norm):
    """A mask that is given to the norm."""
    return lambda x: lstm(norm()(tanh(x), mask=x[..., 0] > 0))


joined = branches(layers.concatenate, chain(dense(), bn), chain(tanh, bn))
# Of tokens, the later ones of which are masked.
MASKED = {
    "LSTM": chain(bn, lstm),
    "attention": attention,
    "an explicit mask": explicit(layers.BatchNormalization),
    "joined": chain(joined, bn, gru),
    "nested": lambda x: lstm(m.model_of((7, 5), tanh, bn, relu, bn)(x)),
    "dropout": chain(bn, layers.SpatialDropout1D(0.3), sequence, bn, tanh, bn, gru),
    "EinsumDense without masks": chain(einsum("abc,c->abc", (7, 5), "c"), bn, lstm),
    # Of keras_norms, so that there is nothing to convert
    "an explicit mask for CBN": explicit(CBN),
    "an explicit mask for FusedCBN": explicit(lambda: FusedCBN(layers.Dense(4))),
    "shifts": chain(relu, cbn, dense(4, "relu"), cbn, relu, cbn, lstm),
}
# What reads or makes masks in ways of its own
FEW = {
    "attention",
    "an explicit mask for CBN",
    "an explicit mask for FusedCBN",
    "joined",
    "nested",
}


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
