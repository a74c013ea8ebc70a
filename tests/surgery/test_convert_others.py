"""convert to other norms and wrappers; fused CBN; what else of a model stays."""

import functools
import itertools

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import AMAT, CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from keras_norms.surgery import convert, fold, recalibrate
from tests.support import surgery_models as m
from tests.support.backend import BACKEND, later, numpy, precision, some, thorough_on
from tests.support.surgery_models import apply, bn, dense, quiet, relu
from tests.support.wrapped import Damped, Doubled, Halved

pytestmark = thorough_on("jax")

# Norms in the place of BatchNormalization


@pytest.mark.parametrize(
    "norm",
    [
        "noisy_bn",
        "lp_norm",
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
    old, made = ([x.name for x in net._flatten_layers()] for net in (model, new))
    assert made == old
    if isinstance(norm, str):
        assert not m.norms_in(new)
    for old in m.of_class(model, layers.BatchNormalization) * (norm == "noisy_bn"):
        for weight in old.weights:
            layer = {x.name: x for x in m.of_class(new, NoisyBN)}[old.name]
            made = numpy(getattr(layer, weight.name))
            np.testing.assert_allclose(made, numpy(weight), rtol=1e-6)


def test_lp_norm_measures_its_norm_on_data():
    model = m.sequential()
    x = m.images(40, 8, 8, 3)
    m.check_convert(model, LpNorm(p=1), says="unknown.*one_bn")
    new = m.check_convert(model, LpNorm(p=1), x, data=x)
    inside = keras.Model(model.inputs[0], model.get_layer("one").output)
    expected = np.abs(numpy(inside(x, training=False))).mean((0, 1, 2))
    norm = numpy(new.get_layer("one_bn").moving_norm)
    np.testing.assert_allclose(norm, expected, rtol=1e-4)


# Wrappers


@pytest.mark.parametrize("name", ["kinds", "nested"])
def test_wn_preserves_the_function(name):
    model = m.MODELS[name]()
    new = m.check_convert(model, "wn")
    assert m.names(new) == m.names(model) and m.norms_in(new)
    without = m.check_convert(quiet(fold, model), "wn")
    m.assert_same_outputs(without, model, m.batch_for(model))
    assert not m.norms_in(without)


def test_wrappers_take_arguments():
    model = m.sequential()
    wrapped = m.of_class(quiet(convert, model, functools.partial(WS, gain=True)), WS)
    assert [layer.name for layer in wrapped] == ["one", "two", "head"]
    assert all(layer.gains for layer in wrapped)
    template = WN(layers.Dense(2), epsilon=1e-3)
    assert m.of_class(convert(model, template), WN)[0].epsilon == 1e-3


@pytest.mark.parametrize("norm", [WS, *later(CWN)])
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_kernels_without_a_mean_keep_the_function(norm, gain, scale):
    """Lengths go into the gain, or into the norm, its gamma or its statistics alone."""
    after = apply(layers.BatchNormalization, scale=scale, epsilon=1e-6)
    conv = apply(layers.Conv2D, 4, 3, use_bias=False)
    steps = conv, after, relu, conv, after, apply(layers.Flatten), dense(3, name="head")
    model = m.model_of((8, 8, 3), *steps)
    for weight in model.trainable_weights:
        if weight.name == "kernel":
            kernel = numpy(weight)
            weight.assign(kernel - kernel.mean(tuple(range(kernel.ndim - 1))))
    # The head has no norm after it, which only a gain can replace.
    skip = None if gain else "head"
    tolerance = 1e-5 if scale else 1e-4
    norm = functools.partial(norm, gain=gain)
    m.check_convert(model, norm, tolerance=tolerance, skip=skip)


def test_units_of_one_weight_stay():
    thin = apply(layers.DepthwiseConv2D, 1, name="thin")
    model = m.model_of((4, 4, 3), thin, dense(2, name="wide"))
    with pytest.warns(UserWarning, match="cannot be wrapped.*'thin'"):
        new = convert(model, "ws")
    assert isinstance(new.get_layer("thin"), layers.DepthwiseConv2D)
    assert isinstance(new.get_layer("wide"), WS)


# FusedCBN


def test_fused_ones_are_fused_and_recalibrate_and_fold_like_the_unfused():
    """A residual block with a projected shortcut, padding, and a head."""
    inputs = keras.Input((8, 8, 3))
    x = m.conv(inputs, 4, "stem")
    branch = m.conv(m.conv(x, 6, "first", strides=2), 6, "second", activation=None)
    shortcut = m.conv(x, 6, "shortcut", size=1, strides=2, activation=None)
    x = layers.ZeroPadding2D()(relu(layers.Add()([branch, shortcut])))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(5, 3, activation="relu")(x))
    model = m.randomize(keras.Model(inputs, layers.Dense(4, name="logits")(x)))
    x, other = m.images(16, 8, 8, 3), m.images(16, 8, 8, 3, seed=1)
    plain, fused = (
        m.check_convert(model, CBN(rho=2), x, data=x, fused=f) for f in (False, True)
    )
    assert len(m.of_class(fused, CBN)) == len(m.of_class(plain, CBN)) == 4
    # All but the one before the padding; the first of them is read by two.
    made = m.of_class(fused, FusedCBN)
    assert [len(layer.layers) for layer in made] == [2, 1, 1]
    assert fused.count_params() == plain.count_params()
    assert m.names(m.check_fold(plain)) == m.names(m.check_fold(fused))
    found = []
    for new in plain, fused:
        recalibrate(new, other, verbose=0)
        norms = sorted(m.of_class(new, CBN), key=lambda layer: layer.name)
        weights = [weight for norm in norms for weight in norm.get_weights()]
        found.append([m.outputs(new, x), *weights])
    for expected, actual in zip(*found, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


# Everything else stays


@pytest.mark.parametrize("norm", ["cbn", *later("fused", "noisy_bn", "wn")])
def test_it_trains_saves_and_loads(norm, tmp_path):
    model = m.sequential()
    eagerly = BACKEND == "tensorflow"
    model.compile("sgd", "mae", metrics=["mse"], run_eagerly=eagerly)
    x, fused = m.batch_for(model), norm == "fused"
    new = quiet(convert, model, "cbn" if fused else norm, data=x, fused=fused)
    assert bool(m.of_class(new, FusedCBN)) == fused
    callbacks = [AMAT()] if m.of_class(new, CBN) else []
    history = new.fit(x, np.ones((6, 3)), epochs=1, verbose=0, callbacks=callbacks)
    assert {"loss", "mse"} <= history.history.keys()
    new.save(tmp_path / "new.keras")
    loaded = keras.models.load_model(tmp_path / "new.keras")
    m.assert_same_outputs(loaded, new, x, 1e-6)


def test_dtype_policies_and_frozen_layers_stay():
    with precision("mixed_bfloat16"):
        model = m.sequential()
    model.get_layer("one").trainable = False
    new = m.check_convert(model, tolerance=0.05)
    assert not new.get_layer("one").trainable
    assert new.get_layer("two").trainable
    cbn = new.get_layer("two_cbn")
    assert cbn.compute_dtype == "bfloat16" and cbn.moving_mean.dtype == "float32"
    kept = m.check_fold(model, tolerance=0.05).get_layer("one")
    assert kept.compute_dtype == "bfloat16" and kept.kernel.dtype == "float32"


def test_skip():
    model = m.residual()
    new = m.check_convert(model, "cbn", skip=["a1", "a2_bn", "logits"])
    assert "a2_bn" in m.names(new) and "a1_bn" not in m.names(new)
    norms = [layer.name for layer in m.of_class(new, CBN)]
    assert norms == ["a2_cbn", "b1_cbn", "b2_cbn"]
    assert len(m.norms_in(quiet(convert, m.nested(), "cbn", skip="block"))) == 1
    new = convert(model, "wn", skip=lambda layer: layer.name != "stem")
    assert [layer.name for layer in m.of_class(new, WN)] == ["stem"]


# Classes derived from those of Keras, which may compute something else


KINDS = [
    *itertools.product([Damped, Doubled, Halved], ["cbn", "fused", "noisy_bn", "wn"])
]


# Of each class the forms that are the most unlike.
@pytest.mark.parametrize(
    "cls, norm", some(KINDS, [KINDS[i] for i in (0, 3, 5, 6, 9, 11)])
)
def test_layers_that_compute_something_else_stay(cls, norm):
    own = apply(cls, **({} if cls is Damped else {"units": 5}), name="own")
    model = m.model_of((8,), dense(6), own, relu, dense(5), bn, relu, dense(3))
    x, name = m.batch_for(model), "cbn" if norm == "fused" else norm
    says = {
        Damped: r"override `call`.*own \(of class Damped\)",
        Halved: "overrides the kernel.*'own'",
    }.get(cls)
    is_said = norm != "wn" if cls is Damped else norm == "wn"
    new = m.check_convert(
        model, name, x, 1e-4, says if is_said else None, data=x, fused=norm == "fused"
    )
    folded = m.check(fold, new, x, 1e-4, says if cls is Damped else None)
    assert type(folded.get_layer("own")) is cls


@pytest.mark.parametrize(
    "norm, arguments, message",
    [
        (keras.Sequential([layers.Dense(1)]), {}, "`norm` must be one of 'cbn'"),
        (lambda layer: "relu", {}, "must return a Keras layer.*'one_bn'"),
        ("cbn", {"skip": ["nobody"]}, "`skip`.*'nobody'"),
        ("wn", {"fused": True}, "`fused`.*Received: fused=True"),
    ],
)
def test_wrong_arguments(norm, arguments, message):
    with pytest.raises(ValueError, match=message):
        convert(m.sequential(), norm, **arguments)
