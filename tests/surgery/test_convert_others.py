"""convert to other norms, to none and to wrappers; fused CBN; what else stays."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from keras_norms.surgery import convert, fold, recalibrate
from tests.support import surgery_models as m
from tests.support.backend import BACKEND, later, later_on_jax, numpy, precision
from tests.support.surgery_models import apply, bn, dense, quiet, relu
from tests.support.wrapped import Damped, Doubled, Halved


@later_on_jax
@pytest.mark.parametrize(
    "norm",
    [
        "noisy_bn",
        "lp_norm",
        "wn",
        NoisyBN(epsilon=1e-5),
        LpNorm(p=1.0, norm_of="centered"),
        LpNorm(p=float("inf")),
        lambda layer: CBN(name="any") if layer.name == "stem_bn" else None,
    ],
)
@pytest.mark.parametrize("name", ["kinds", *later("shared", "nested")])
def test_norms_in_place_preserve_the_function(name, norm):
    model = m.MODELS[name]()
    new = m.check_convert(model, norm)
    assert m.names(new) == m.names(model)
    assert not isinstance(norm, str) or bool(m.norms_in(new)) == (norm == "wn")
    old = m.of_class(model, layers.BatchNormalization) if norm == "noisy_bn" else []
    for one, other in zip(old, m.of_class(new, NoisyBN)):
        for weight in one.weights:
            found = numpy(getattr(other, weight.name))
            np.testing.assert_allclose(found, numpy(weight), rtol=1e-6)


def test_statistics_stay_where_gamma_cannot_make_up_for_new_ones():
    norm = apply(layers.BatchNormalization, scale=False)
    model = m.model_of((5,), dense(4, "relu"), norm, dense(2))
    m.check_convert(model, "noisy_bn", data=m.images(20, 5))


@later_on_jax
def test_lp_norm_measures_its_norm_on_data():
    model, x = m.sequential(), m.images(40, 8, 8, 3)
    m.check_convert(model, LpNorm(p=1), says="one_bn.*unknown")
    new = m.check_convert(model, LpNorm(p=1), x, data=x)
    expected = np.abs(numpy(model.get_layer("one")(x))).mean((0, 1, 2))
    norm = numpy(new.get_layer("one_bn").moving_norm)
    np.testing.assert_allclose(norm, expected, rtol=1e-4)


@later_on_jax
@pytest.mark.parametrize("norm", ["noisy_bn", "lp_norm"])
def test_settings_that_only_batch_normalization_takes(norm):
    kept = apply(layers.BatchNormalization, momentum=1.0, epsilon=0.0)
    model = m.model_of((5,), dense(4, "relu"), kept, dense(2))
    new = m.check_convert(model, norm, data=m.images(20, 5))
    assert new.layers[-2].momentum < 1 and new.layers[-2].epsilon > 0


@later_on_jax
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_norms_that_keras_has_for_the_last_axis_only(norm):
    model = m.model_of((5, 4, 4), apply(layers.BatchNormalization, axis=1, name="bn"))
    if norm == "rms_norm" or BACKEND == "torch":
        with pytest.warns(UserWarning, match="'bn'.*another axis"):
            new = convert(model, norm)
        assert type(new.get_layer("bn")) is layers.BatchNormalization
    else:
        new = quiet(convert, model, norm)
        x, epsilon = m.images(3, 5, 4, 4), new.get_layer("bn").epsilon
        deviation = np.sqrt(x.var(1, keepdims=True) + epsilon)
        expected = (x - x.mean(1, keepdims=True)) / deviation
        # Deviation and mean of what the old norm gave each channel.
        gamma, beta = (
            numpy(w)[:, None, None]
            for w in (new.get_layer("bn").gamma, new.get_layer("bn").beta)
        )
        found = numpy(new(x))
        np.testing.assert_allclose(found, gamma * expected + beta, atol=1e-5)


# Class, and over which axes of (samples, positions, groups, channels of a group).
KINDS = {
    "group_norm": (layers.GroupNormalization, (1, 3)),
    "instance_norm": (layers.GroupNormalization, (1,)),
    "layer_norm": (layers.LayerNormalization, (2, 3)),
    "rms_norm": (layers.RMSNormalization, (2, 3)),
}
CHANGES = r"could not be preserved.*\['norm'\]"


def normalised(x, name, epsilon):
    x, axes = x.astype("float64").reshape(len(x), -1, 2, 4), KINDS[name][1]
    x -= 0 if name == "rms_norm" else x.mean(axes, keepdims=True)
    y = x / np.sqrt(np.square(x).mean(axes, keepdims=True) + epsilon)
    return y.reshape(len(x), -1, 8)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("norm", [layers.BatchNormalization, CBN])
def test_gamma_and_beta_are_carried_over(name, norm):
    """Of CBN, they are the deviation and mean of what it makes."""
    model, x = m.model_of((5, 8), apply(norm, name="norm")), m.images(3, 5, 8)
    old = model.get_layer("norm")
    gamma, beta = (numpy(w).astype("float64") for w in (old.gamma, old.beta))
    if norm is CBN:
        old.moving_square.assign(beta**2 + 1)
        # It makes gamma (x - mean + beta) / root(square + epsilon).
        gamma, beta = gamma / np.sqrt(beta**2 + 1), gamma * beta / np.sqrt(beta**2 + 1)
    with m.saying(CHANGES):
        new = convert(model, name).get_layer("norm")
    assert type(new) is KINDS[name][0] and new.epsilon == old.epsilon
    expected = normalised(x, name, old.epsilon) * gamma
    expected += 0 if name == "rms_norm" else beta
    np.testing.assert_allclose(numpy(new(x)), expected, rtol=1e-3, atol=1e-4)
    plain = convert(model, KINDS[name][0], preserve=False).get_layer("norm")
    assert all(np.ptp(w) == 0 for w in plain.get_weights())


def test_what_a_function_puts_in_the_place_of_a_frozen_norm():
    frozen = apply(layers.BatchNormalization, trainable=False, name="norm")
    with m.saying(CHANGES):
        new = convert(m.model_of((4,), frozen), lambda _: layers.LayerNormalization())
    assert not new.layers[-1].trainable


@pytest.mark.parametrize("norm", ["none", "batch_norm"])
def test_a_norm_of_several_axes_stays(norm):
    both = apply(layers.LayerNormalization, axis=(1, 2), name="both")
    says = "stay as they are: .'both'"
    new = m.check_convert(m.model_of((4, 3), both), norm, says=says)
    assert type(new.get_layer("both")) is layers.LayerNormalization


def test_groups():
    """As many as fit, of 4 channels; those that a layer was given."""
    for channels, groups in ((3, 1), (7, 1), (8, 2), (24, 6), (64, 16), (200, 25)):
        model = m.model_of((2, channels), bn)
        new = quiet(convert, model, "group_norm", preserve=False)
        assert new.layers[-1].groups == groups
    given = quiet(convert, model, layers.GroupNormalization(groups=20, epsilon=0.1))
    assert (given.layers[-1].groups, given.layers[-1].epsilon) == (20, 0.1)
    # One number is not normalised alone.
    model = m.model_of((4, 3), bn, layers.Flatten(), apply(CBN, name="stays"))
    new = m.check(convert, model, norm="instance_norm", tolerance=np.inf, says="stays")
    assert [type(new.layers[i]) for i in (1, 3)] == [layers.GroupNormalization, CBN]


def test_batch_norm_in_the_place_of_others():
    fused = FusedCBN(layers.Dense(4), CBN(rho=2.0, name="inside"))
    noisy = apply(NoisyBN, momentum=0.75, name="noisy")
    norms = apply(CBN, rho=2.0), noisy, apply(LpNorm, p=2), bn
    model = m.model_of((4,), *norms, fused)
    for layer in m.of_class(model, CBN):
        layer.moving_square.assign(numpy(layer.beta) ** 2 + 1)
        layer.average_weight.assign(1.0)
    new = m.check_convert(model, "batch_norm", says="")
    assert len(m.norms_in(new)) == 5 and len(new.layers) == len(model.layers) + 1
    assert new.get_layer("noisy").momentum == 0.75
    given = quiet(convert, model, layers.BatchNormalization(momentum=0.5))
    momenta = [norm.momentum for norm in m.of_class(given, layers.BatchNormalization)]
    assert momenta == [0.5] * 5
    # Statistics of others are those of data.
    group = apply(layers.GroupNormalization, 2, name="norm")
    model, x = m.model_of((5, 8), group), m.images(32, 5, 8)
    with m.saying(CHANGES):
        new = convert(model, "batch_norm", data=x).get_layer("norm")
    np.testing.assert_array_equal(*(numpy(n.gamma) for n in (new, model.layers[-1])))
    np.testing.assert_allclose(numpy(new.moving_mean), x.mean((0, 1)), atol=1e-4)
    with pytest.warns(UserWarning, match=r"statistics of \['norm'\] are unknown"):
        convert(model, "batch_norm")
    # An iterator is read once for each kind.
    model = m.model_of((5, 8), group, apply(CBN))
    ours, theirs = (
        m.quiet(convert, model, "batch_norm", data=data) for data in ([x], iter([x]))
    )
    m.assert_same_outputs(ours, theirs, x)


def test_none():
    norms = (layers.BatchNormalization, CBN, NoisyBN, LpNorm)
    conv = apply(layers.Conv1D, 4, 3, use_bias=False)
    model = m.model_of((6, 4), conv, bn, relu, apply(CBN), conv, bn)
    new = m.check_convert(model, "none", says="")
    plain = convert(model, "none", preserve=False)
    for each in new, plain:
        assert not m.of_class(each, norms) and len(each.layers) == len(model.layers) - 3
    assert all(layer.use_bias for layer in m.of_class(plain, layers.Conv1D))
    nothing = keras.Sequential([keras.Input((4,)), layers.BatchNormalization()])
    x = m.images(2, 4)
    left = convert(nothing, "none", preserve=False)
    np.testing.assert_array_equal(m.outputs(left, x), x.ravel())
    alone = m.model_of((4,), relu, apply(CBN, name="alone"), relu)
    assert m.names(m.check_convert(alone, "none", says=""))[2] == "alone_affine"
    # The scale of a norm of samples goes into the layer before.
    model = m.model_of((4,), dense(), apply(layers.RMSNormalization, name="norm"))
    scale = np.array([1.0, 2.0, 3.0, 4.0])
    model.get_layer("norm").scale.assign(scale)
    with m.saying(CHANGES):
        new = convert(model, "none")
    expected = numpy(model.layers[-2].kernel) * scale
    np.testing.assert_allclose(numpy(new.layers[-1].kernel), expected, rtol=1e-5)


@pytest.mark.parametrize("norm", ["none", *later("cbn", "noisy_bn")])
def test_a_norm_shared_by_images_of_two_sizes(norm, tmp_path):
    shared = layers.BatchNormalization()
    ends = shared, relu, apply(layers.Flatten), dense(2)
    paths = (
        m.chain(apply(layers.Conv2D, 4, 3, strides), lambda x: x + x, *ends)
        for strides in (1, 2)
    )
    model = m.model_of((8, 8, 3), m.branches(list, *paths))
    x = m.images(6, 8, 8, 3)
    new = m.check_convert(model, norm, x, data=x)
    new.save(tmp_path / "new.keras")
    m.assert_same_outputs(keras.saving.load_model(tmp_path / "new.keras"), new, x)


@later_on_jax
def test_wrappers_take_arguments_and_leave_units_of_one_weight():
    thin = apply(layers.DepthwiseConv2D, 1, name="thin")
    model = m.model_of((4, 4, 3), thin, dense(2), dense(2))
    for norm in (functools.partial(WS, gain=True), WS(layers.Dense(2), gain=True)):
        with pytest.warns(UserWarning, match="cannot be wrapped.*'thin'"):
            new = convert(model, norm)
        assert isinstance(new.get_layer("thin"), layers.DepthwiseConv2D)
        assert len(m.of_class(new, WS)) == 2
        assert all(layer.gains for layer in m.of_class(new, WS))


@pytest.mark.parametrize("norm", [WN, functools.partial(WS, gain=True)])
def test_a_frozen_layer_is_frozen_with_its_gain(norm):
    frozen = dense(name="frozen", trainable=False)
    new = quiet(convert, m.model_of((4,), frozen, dense(2)), norm)
    assert not new.get_layer("frozen").trainable_weights
    assert len(new.layers[-1].trainable_weights) == 3


@later_on_jax
@pytest.mark.parametrize("norm", [WS, *later(CWN)])
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_kernels_without_a_mean_keep_the_function(norm, gain, scale):
    """Lengths go into the gain, or into the norm, its gamma or its statistics alone."""
    after = apply(layers.BatchNormalization, scale=scale, epsilon=1e-6)
    conv = apply(layers.Conv2D, 4, 3, use_bias=False)
    transposed = apply(layers.Conv2DTranspose, 5, 3, use_bias=False, name="transposed")
    head = apply(layers.Flatten), dense(3, name="head")
    model = m.model_of(
        (8, 8, 3), conv, after, relu, conv, after, transposed, after, *head
    )
    for weight in model.trainable_weights:
        if weight.name == "kernel":
            kernel, last = numpy(weight), len(weight.shape) - 1
            fan_in = {*range(last + 1)} - {last - ("transposed" in weight.path)}
            weight.assign(kernel - kernel.mean(tuple(fan_in), keepdims=True))
    # The head has no norm after it, which only a gain can replace.
    skip = None if gain else "head"
    tolerance = 1e-5 if scale else 1e-4
    norm = functools.partial(norm, gain=gain)
    m.check_convert(model, norm, tolerance=tolerance, says="", skip=skip)


def test_statistics_that_no_norm_can_have_change_the_function():
    """The kernel of CWN is so much shorter that the variance would be negative."""
    model = m.model_of((8,), dense(6), apply(layers.BatchNormalization, scale=False))
    first, norm = model.layers[-2:]
    kernel = np.random.default_rng(1).normal(size=(8, 6))
    first.kernel.assign(5 * (kernel - kernel.mean(0)))
    norm.moving_variance.assign([2e-2, 6e-3, 1e-3, 8e-3, 4e-3, 2e-3])
    with pytest.warns(UserWarning, match=f"could not be preserved.*{first.name}"):
        new = convert(model, "cwn")
    found = new.layers[-1].moving_variance
    np.testing.assert_array_equal(numpy(found), numpy(norm.moving_variance))


@later_on_jax
def test_fused_ones_are_fused_and_recalibrate_and_fold_like_the_unfused():
    """A residual block with a projected shortcut, padding, and a head."""
    first, second = m.conv(6, "first", strides=2), m.conv(6, "second", activation=None)
    shortcut = m.conv(6, "shortcut", size=1, strides=2, activation=None)
    block = m.branches(layers.add, m.chain(first, second), shortcut)
    padded = layers.ZeroPadding2D(2), layers.Conv2D(5, 3, activation="relu")
    head = layers.GlobalAveragePooling2D(), dense(name="logits")
    model = m.model_of((8, 8, 3), m.conv(4, "stem"), block, relu, *padded, *head)
    model.compile("sgd", "mse")
    x, other = m.images(16, 8, 8, 3), m.images(16, 8, 8, 3, seed=1)
    plain, fused = (
        m.check_convert(model, CBN(rho=2), x, data=x, fused=f) for f in (False, True)
    )
    assert len(m.of_class(fused, CBN)) == len(m.of_class(plain, CBN)) == 4
    # All but the one before the padding; the first of them is read by two.
    made = m.of_class(fused, FusedCBN)
    assert [len(layer.layers) for layer in made] == [2, 1, 1]
    assert fused.compiled and fused.count_params() == plain.count_params()
    assert m.names(m.check_fold(plain)) == m.names(m.check_fold(fused))
    with pytest.warns(UserWarning, match="cannot be wrapped.*first_cbn.*FusedCBN"):
        convert(fused, "wn")
    for new in plain, fused:
        recalibrate(new, other, verbose=0)
    m.assert_same_outputs(fused, plain, x)


PAD_END = ((0, 1), (0, 1))  # what "same" is for an even size, three taps and a stride


@later_on_jax
@pytest.mark.parametrize(
    ("shape", "padding", "convolutions", "is_same"),
    [
        ((8, 8, 3), PAD_END, [layers.DepthwiseConv2D(3, 2)], True),
        ((8, 9, 3), 1, [layers.Conv2D(4, 3), layers.Conv2D(5, 1)], False),
        ((None, None, 3), 1, [layers.Conv2D(4, 3)], False),
        *later(
            ((7, 7, 3), PAD_END, [layers.DepthwiseConv2D(3, 2)], False),
            ((7, 7, 3), 1, [layers.DepthwiseConv2D(3, 2)], True),
            ((8, 8, 3), ((1, 2), (1, 2)), [layers.Conv2D(4, 5, 2)], True),
            ((8, 8, 3), ((2, 1), (2, 1)), [layers.Conv2D(4, 5, 2)], False),
            ((8, 9, 3), ((2, 2), (2, 2)), [layers.Conv2D(4, 3, dilation_rate=2)], True),
            ((8, 9, 3), 1, [layers.Conv2D(4, 3, dilation_rate=2)], False),
            ((8, 9, 3), 1, [layers.Conv2D(4, 3), layers.Conv2D(5, 3)], True),
            ((8, 8, 3), 1, [layers.Conv2D(4, 3, padding="same")], False),
            ((9, 3), 1, [layers.Conv1D(4, 3)], True),
            ((8, 3), (0, 1), [layers.DepthwiseConv1D(3, 2)], True),
            ((4, 5, 6, 2), 1, [layers.Conv3D(4, 3)], True),
        ),
    ],
)
def test_fused_convolutions_pad_by_themselves(shape, padding, convolutions, is_same):
    """If `padding="same"` is as much; else the padding and the CBN stay."""
    rank = len(shape) - 1
    pad = getattr(layers, f"ZeroPadding{rank}D")(padding, name="pad")
    pool = getattr(layers, f"GlobalMaxPooling{rank}D")
    steps = [m.chain(each, pool()) for each in convolutions]
    join = layers.Concatenate() if len(steps) > 1 else lambda made: made[0]
    # A name of its own: Keras named the others at import, and may count anew since.
    stem = getattr(layers, f"Conv{rank}D")(3, 1, name="stem")
    model = m.model_of(shape, stem, bn, relu, pad, m.branches(join, *steps))
    x = m.images(6, *(size or 8 for size in shape))
    fused = m.check_convert(model, CBN(rho=2), x, data=x, fused=True)
    made = m.of_class(fused, FusedCBN)
    assert [len(layer.layers) for layer in made] == [len(steps)] * is_same
    assert ("pad" in m.names(fused)) == (not is_same)
    m.check_fold(fused, x)


@later_on_jax
def test_dtype_policies_and_frozen_layers_stay():
    with precision("mixed_bfloat16"):
        model = m.sequential()
    model.get_layer("one").trainable = False
    new = m.check_convert(model, tolerance=0.05)
    assert not new.get_layer("one").trainable and new.get_layer("two").trainable
    cbn = new.get_layer("two_cbn")
    assert cbn.compute_dtype == "bfloat16" and cbn.moving_mean.dtype == "float32"
    kept = m.check_fold(model, tolerance=0.05).get_layer("one")
    assert kept.compute_dtype == "bfloat16" and kept.kernel.dtype == "float32"


@later_on_jax
@pytest.mark.parametrize("norm", ["cbn", *later("noisy_bn")])
def test_frozen_models_in_a_model_stay_frozen(norm):
    steps = layers.Dense(3), layers.BatchNormalization(), layers.Dense(3)
    inner = keras.Sequential([keras.Input((4,)), *steps], name="inner")
    inner.trainable = False
    model = keras.Sequential([keras.Input((4,)), inner, layers.Dense(2)])
    new = convert(model, norm, preserve=False)
    assert not any("inner" in weight.path for weight in new.trainable_weights)
    assert not any(layer.trainable for layer in new.get_layer("inner").layers)
    # But for layers in them that were told to train after that.
    steps[-1].trainable = True
    new = convert(model, norm, preserve=False).get_layer("inner")
    train = {layer.name for layer in new.layers if layer.trainable}
    last = steps[-1].name
    assert train == {last, *([f"{last}_cbn"] if norm == "cbn" else [])}
    assert new.get_layer(last).kernel.trainable


@later_on_jax
def test_skip():
    model = m.residual()
    new = m.check_convert(model, "cbn", skip=["a1", "a2_bn", "logits"])
    assert "a2_bn" in m.names(new) and "a1_bn" not in m.names(new)
    assert m.norms_in(new, CBN) == ["a2_cbn", "b1_cbn", "b2_cbn"]
    assert len(m.norms_in(quiet(convert, m.nested(), "cbn", skip="block"))) == 1
    new = convert(model, "wn", skip=lambda layer: layer.name != "stem")
    assert m.norms_in(new, WN) == ["stem"]


@later_on_jax
@pytest.mark.parametrize("norm", ["cbn", "fused", "noisy_bn", "wn"])
@pytest.mark.parametrize("cls", [Damped, Doubled, Halved])
def test_layers_that_compute_something_else_stay(cls, norm):
    own = apply(cls, **({} if cls is Damped else {"units": 5}), name="own")
    model = m.model_of((8,), dense(6), own, relu, dense(5), bn, relu, dense(3))
    x, fused = m.batch_for(model), norm == "fused"
    says = {
        Damped: r"own \(of class Damped\).*overrides `call`",
        Halved: "'own'.*overrides the kernel",
    }.get(cls)
    is_said = norm != "wn" if cls is Damped else norm == "wn"
    norm, said = "cbn" if fused else norm, says if is_said else None
    new = m.check_convert(model, norm, x, 1e-4, said, data=x, fused=fused)
    folded = m.check(fold, new, x, 1e-4, says if cls is Damped else None)
    assert type(folded.get_layer("own")) is cls


def test_wrong_arguments():
    with pytest.raises(ValueError, match="must return a Keras layer.*'one_bn'"):
        convert(m.sequential(), lambda layer: "relu")
    with pytest.raises(ValueError, match="`fused`.*Received: fused=True"):
        convert(m.sequential(), "wn", fused=True)
