"""convert: another normalisation, the same function, nothing else changed."""

import functools
import warnings

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import AMAT
from keras_norms.layers.cbn import CBN
from keras_norms.layers.channel_affine import ChannelAffine
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.layers.weight_normalization import CWN, WN, WS
from keras_norms.surgery import convert, fold
from tests.support import surgery_models as m


def quiet(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def norms_in(model):
    return m.of_class(model, layers.BatchNormalization)


def readers(model, name):
    """The names of what calls on the output of a layer."""
    return [n.operation.name for n in model.get_layer(name)._outbound_nodes]


# Placement of CBN


def test_cbn_stands_before_every_linear_layer_but_the_first():
    model = convert(m.residual(), "cbn", preserve=False)
    assert not norms_in(model)
    cbns = [layer.name for layer in m.of_class(model, CBN)]
    # The sum reads the tensor before the norm of a1; b0 and b1 share theirs.
    assert sorted(cbns) == ["a1_cbn", "a2_cbn", "b1_cbn", "b2_cbn", "logits_cbn"]
    assert readers(model, "stem_act") == ["a1_cbn", "sum_a"]
    assert sorted(readers(model, "b1_cbn")) == ["b0", "b1_pad"]
    assert readers(model, "b1_pad") == ["b1"]
    # Not after Dropout, whose noise would be in the statistics.
    assert readers(model, "logits_cbn") == ["drop"]
    for name in ("stem", "a1", "a2", "b0", "b1", "b2"):
        assert model.get_layer(name).use_bias


def test_the_raw_input_is_not_normalised():
    inputs = keras.Input((8, 8, 3), name="image")
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.Normalization(name="standard")(x)
    x = layers.RandomFlip()(x)
    x = layers.ZeroPadding2D()((x - 0.5) * 2.0)
    y = layers.Permute((2, 1, 3))(layers.Concatenate()([x, x]))
    x = layers.Conv2D(3, 3, name="one")(x)
    y = layers.DepthwiseConv2D(3, name="two")(y)
    z = layers.Dense(2, name="three")(layers.Flatten()(layers.Add()([x, x])))
    model = keras.Model(inputs, [x, y, z])
    model.get_layer("standard").adapt(m.images(4, 8, 8, 3))
    new = convert(model, "cbn", data=m.images(4, 8, 8, 3))
    assert [layer.name for layer in m.of_class(new, CBN)] == ["three_cbn"]
    m.assert_same_outputs(new, model, m.images(2, 8, 8, 3, seed=5))


def test_a_norm_on_the_raw_input_becomes_a_cbn():
    inputs = keras.Input((8, 8, 3))
    x = layers.BatchNormalization(name="bn")(inputs)
    model = m.randomize(keras.Model(inputs, layers.Conv2D(3, 3, name="conv")(x)))
    new = convert(model, "cbn")
    assert [layer.name for layer in m.of_class(new, CBN)] == ["conv_cbn"]
    m.assert_same_outputs(new, model, m.batch_for(model))


def test_nested_models_know_what_they_read():
    model = m.nested()
    new = quiet(convert, model, "cbn")
    assert m.names(new) == ["image", "rescaling", "body", "pool", "head_cbn", "head"]
    body = new.get_layer("body")
    assert m.names(body) == ["body_in", "first", "first_act", "block"]
    block = body.get_layer("block")
    assert isinstance(block, keras.Sequential)
    assert m.names(block) == ["conv_cbn", "conv", "act"]
    m.assert_same_outputs(new, model, m.batch_for(model))


def test_shared_layers_share_their_norm():
    model = m.shared()
    new = quiet(convert, model, "cbn")
    norms = [layer.name for layer in m.of_class(new, CBN)]
    assert norms == ["second_cbn", "head_cbn"]
    assert len(new.get_layer("second_cbn")._inbound_nodes) == 2
    m.assert_same_outputs(new, model, m.batch_for(model))


def test_padding_that_others_read_stays_before_the_norm():
    inputs = keras.Input((8, 8, 3))
    x = layers.ReLU()(layers.Conv2D(3, 3)(inputs))
    padded = layers.ZeroPadding2D(1, name="pad")(x)
    y = layers.Conv2D(3, 3, name="conv")(padded)
    z = layers.MaxPooling2D(3, 1, name="max")(padded)
    model = keras.Model(inputs, layers.Add()([y, z]))
    new = quiet(convert, model, "cbn")
    assert sorted(readers(new, "pad")) == ["conv_cbn", "max"]
    m.assert_same_outputs(new, model, m.batch_for(model))


def test_a_template_gives_its_configuration():
    template = CBN(axis=1, rho=2.0, omega=3.0, epsilon=1e-3, name="mine")
    model = m.sequential()
    x = m.batch_for(model)
    new = convert(model, template, data=x)
    for layer in m.of_class(new, CBN):
        config = layer.get_config()
        assert (config["rho"], config["omega"], config["epsilon"]) == (2, 3, 1e-3)
        assert config["axis"] == -1
    assert "mine" not in m.names(new)
    m.assert_same_outputs(new, model, x)
    assert len(m.of_class(quiet(convert, model, CBN), CBN)) == 2


# The function is preserved


@pytest.mark.parametrize("name", m.MODELS)
def test_cbn_preserves_the_function(name):
    model = m.MODELS[name]()
    x = m.batch_for(model, 12)
    before = m.snapshot(model)
    new = quiet(convert, model, "cbn", data=[(x, None)])
    m.assert_unchanged(before, model)
    m.assert_same_outputs(new, model, x)
    assert not norms_in(new)
    folded = quiet(fold, new)
    m.assert_same_outputs(folded, model, x, 2e-5)


@pytest.mark.parametrize("decouple", [True, False])
def test_calibrated_statistics_hold_in_training(decouple):
    """The first training step on the same batch sees the function it started from."""
    model = m.sequential()
    x = m.images(64, 8, 8, 3)
    new = convert(model, CBN(decouple=decouple, rho=0.5), data=x)
    for layer in m.of_class(new, CBN):
        assert float(m.numpy(layer.average_weight)) == 1
    # Dropout would change it.
    body = keras.Model(new.inputs[0], new.get_layer("flatten").output)
    expected = keras.Model(model.inputs[0], model.get_layer("flatten").output)
    np.testing.assert_allclose(
        quiet(lambda: m.numpy(body(x, training=True))),
        m.numpy(expected(x, training=False)),
        atol=2e-4,
    )


def test_statistics_are_those_of_the_data():
    model = m.sequential()
    x = m.images(50, 8, 8, 3)
    new = convert(model, "cbn", data=[x[:20], x[20:]])
    activations = m.numpy(
        keras.Model(model.inputs[0], model.get_layer("one_act").output)(
            x, training=False
        )
    )
    layer = new.get_layer("two_cbn")
    mean = activations.mean((0, 1, 2))
    np.testing.assert_allclose(m.numpy(layer.moving_mean), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(m.numpy(layer.beta), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        m.numpy(layer.moving_square), (activations**2).mean((0, 1, 2)), rtol=1e-4
    )


def test_without_data_statistics_are_empty_and_it_says_so():
    model = m.sequential()
    with pytest.warns(UserWarning, match="'two_cbn', 'head_cbn'"):
        new = convert(model, "cbn")
    assert float(m.numpy(new.get_layer("two_cbn").average_weight)) == 0
    m.assert_same_outputs(new, model, m.batch_for(model))


def test_a_norm_before_its_layer_hands_its_statistics_over():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    x = layers.BatchNormalization(name="bn")(x)
    x = layers.Conv2D(4, 3, padding="same", name="conv")(x)
    model = m.randomize(keras.Model(inputs, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        new = convert(model, "cbn")
    cbn, bn = new.get_layer("conv_cbn"), model.get_layer("bn")
    np.testing.assert_array_equal(m.numpy(cbn.moving_mean), m.numpy(bn.moving_mean))
    assert float(m.numpy(cbn.average_weight)) == 1
    m.assert_same_outputs(new, model, m.batch_for(model))


def test_maps_that_no_layer_takes_stay_trainable():
    model = m.preactivated()
    new = quiet(convert, model, "cbn")
    affine = [x for x in new.layers if isinstance(x, layers.EinsumDense)]
    assert [x.name for x in affine] == ["a_bn_affine", "b_bn_affine", "last_bn_affine"]
    assert all(len(x.trainable_weights) == 2 for x in affine)
    m.assert_same_outputs(new, model, m.batch_for(model))
    # Converting again finds nothing to do but insert nothing twice.
    assert not [x.name for x in m.of_class(new, CBN) if "affine" in x.name]
    plain = convert(model, "cbn", preserve=False)
    assert not [x for x in plain.layers if isinstance(x, layers.EinsumDense)]


def test_a_dead_channel_of_a_norm_stays_exact():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    x = layers.BatchNormalization(name="bn")(x)
    x = layers.Conv2D(4, 3, padding="same", name="conv")(x)
    model = m.randomize(keras.Model(inputs, x))
    model.get_layer("bn").gamma.assign([1.0, 0.0, -1.0, 2.0])
    for norm in (CBN(), CBN(decouple=False)):
        new = quiet(convert, model, norm)
        m.assert_same_outputs(new, model, m.batch_for(model))


def test_what_cannot_be_preserved_is_named():
    model = m.sequential()
    x = m.batch_for(model)
    with pytest.warns(UserWarning, match="could not be preserved.*two_cbn"):
        convert(model, CBN(scale=False), data=x)
    with pytest.warns(UserWarning, match="could not be preserved.*'one', 'two'"):
        convert(model, "ws")
    with pytest.warns(UserWarning, match="could not be preserved.*'one_bn', 'two_bn'"):
        convert(model, layers.GroupNormalization(2))


def test_without_preserving():
    model = m.sequential()
    new = convert(model, "cbn", preserve=False)
    kernel = m.numpy(model.get_layer("two").kernel)
    np.testing.assert_array_equal(m.numpy(new.get_layer("two").kernel), kernel)
    np.testing.assert_array_equal(m.numpy(new.get_layer("two").bias), np.zeros(4))
    layer = new.get_layer("two_cbn")
    np.testing.assert_array_equal(m.numpy(layer.gamma), np.ones(4))
    assert float(m.numpy(layer.average_weight)) == 0
    new = convert(model, "cbn", preserve=False, data=m.batch_for(model))
    assert float(m.numpy(new.get_layer("two_cbn").average_weight)) == 1


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
@pytest.mark.parametrize("name", ["shared", "nested"])
def test_norms_in_place_preserve_the_function(name, norm):
    model = m.MODELS[name]()
    before = m.snapshot(model)
    new = quiet(convert, model, norm)
    m.assert_unchanged(before, model)
    m.assert_same_outputs(new, model, m.batch_for(model))
    assert [layer.name for layer in new._flatten_layers()] == [
        layer.name for layer in model._flatten_layers()
    ]
    if isinstance(norm, str):
        assert not norms_in(new)


@pytest.mark.parametrize("norm", ["noisy_bn", "lp_norm"])
def test_norms_without_center_or_scale(norm):
    model = m.kinds()
    new = convert(model, norm)
    m.assert_same_outputs(new, model, m.batch_for(model))


def test_noisy_bn_takes_the_weights_over():
    model = m.sequential()
    new = convert(model, "noisy_bn")
    for old in norms_in(model):
        layer = new.get_layer(old.name)
        assert isinstance(layer, NoisyBN) and layer.epsilon == old.epsilon
        for weight in old.weights:
            np.testing.assert_allclose(
                m.numpy(getattr(layer, weight.name)), m.numpy(weight), rtol=1e-6
            )


def test_lp_norm_measures_its_norm_on_data():
    model = m.sequential()
    x = m.images(40, 8, 8, 3)
    with pytest.warns(UserWarning, match="unknown.*one_bn"):
        convert(model, LpNorm(p=1))
    new = convert(model, LpNorm(p=1), data=x)
    y = m.numpy(
        keras.Model(model.inputs[0], model.get_layer("one").output)(x, training=False)
    )
    np.testing.assert_allclose(
        m.numpy(new.get_layer("one_bn").moving_norm),
        np.abs(y).mean((0, 1, 2)),
        rtol=1e-4,
    )
    m.assert_same_outputs(new, model, x)


# Wrappers


@pytest.mark.parametrize("name", ["kinds", "nested"])
def test_wn_preserves_the_function(name):
    model = m.MODELS[name]()
    new = convert(model, "wn")
    m.assert_same_outputs(new, model, m.batch_for(model))
    assert m.names(new) == m.names(model)
    assert norms_in(new)
    without = convert(quiet(fold, model), "wn")
    m.assert_same_outputs(without, model, m.batch_for(model))
    assert not norms_in(without)


def test_wrappers_take_arguments():
    model = m.sequential()
    new = quiet(convert, model, functools.partial(WS, gain=True))
    wrapped = m.of_class(new, WS)
    assert [layer.name for layer in wrapped] == ["one", "two", "head"]
    kernel = m.numpy(model.get_layer("one").kernel)
    np.testing.assert_array_equal(m.numpy(wrapped[0].layer.kernel), kernel)
    # With a gain, only the mean of each unit's weights is gone.
    np.testing.assert_allclose(
        m.numpy(wrapped[0].normalized_kernels()["kernel"]),
        kernel - kernel.mean((0, 1, 2)),
        rtol=1e-4,
        atol=1e-6,
    )
    assert len(m.of_class(quiet(convert, model, CWN), CWN)) == 3
    template = WN(layers.Dense(2), epsilon=1e-3)
    assert m.of_class(convert(model, template), WN)[0].epsilon == 1e-3


@pytest.mark.parametrize("cls", [WS, CWN])
@pytest.mark.parametrize("gain", [True, False])
def test_kernels_without_a_mean_keep_the_function(cls, gain):
    model = m.sequential()
    # The head has no norm after it, which only a gain can replace.
    for name in ("one", "two"):
        kernel = m.numpy(model.get_layer(name).kernel)
        model.get_layer(name).kernel.assign(kernel - kernel.mean((0, 1, 2)))
    skip = None if gain else "head"
    kernel = m.numpy(model.get_layer("head").kernel)
    model.get_layer("head").kernel.assign(kernel - kernel.mean(0))
    new = quiet(convert, model, functools.partial(cls, gain=gain), skip=skip)
    m.assert_same_outputs(new, model, m.batch_for(model))


def test_units_of_one_weight_stay():
    inputs = keras.Input((4, 4, 3))
    x = layers.DepthwiseConv2D(1, name="thin")(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="wide")(x))
    with pytest.warns(UserWarning, match="cannot be wrapped.*'thin'"):
        new = convert(model, "ws")
    assert isinstance(new.get_layer("thin"), layers.DepthwiseConv2D)
    assert isinstance(new.get_layer("wide"), WS)


# Everything else stays


@pytest.mark.parametrize("norm", ["cbn", "noisy_bn", "wn"])
def test_it_trains_saves_and_loads(norm, tmp_path):
    model = m.sequential()
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        keras.losses.MeanAbsoluteError(),
        metrics=["mse"],
    )
    x = m.batch_for(model)
    new = quiet(convert, model, norm, data=x)
    assert new.optimizer is not model.optimizer
    assert new.optimizer.get_config() == model.optimizer.get_config()
    assert isinstance(new.loss, keras.losses.MeanAbsoluteError)
    callbacks = [AMAT()] if norm == "cbn" else []
    history = new.fit(x, np.ones((6, 3)), epochs=1, verbose=0, callbacks=callbacks)
    assert {"loss", "mse"} <= history.history.keys()
    new.save(tmp_path / "new.keras")
    loaded = keras.models.load_model(tmp_path / "new.keras")
    m.assert_same_outputs(loaded, new, x, 1e-6)


def test_dtype_policies_and_frozen_layers_stay():
    base = m.sequential()
    for layer in base.layers:
        layer.dtype_policy = "mixed_bfloat16"
    base.get_layer("one").trainable = False
    model = keras.Sequential.from_config(base.get_config())
    model.set_weights(base.get_weights())
    new = quiet(convert, model, "cbn")
    assert not new.get_layer("one").trainable
    assert new.get_layer("two").trainable
    cbn = new.get_layer("two_cbn")
    assert cbn.compute_dtype == "bfloat16" and cbn.moving_mean.dtype == "float32"
    m.assert_same_outputs(new, model, m.batch_for(model), 0.05)


def test_skip():
    model = m.residual()
    new = quiet(convert, model, "cbn", skip=["a1", "a2_bn", "logits"])
    assert "a2_bn" in m.names(new) and "a1_bn" not in m.names(new)
    norms = [layer.name for layer in m.of_class(new, CBN)]
    assert norms == ["a2_cbn", "b1_cbn", "b2_cbn"]
    m.assert_same_outputs(new, model, m.batch_for(model))
    new = quiet(convert, m.nested(), "cbn", skip="block")
    assert len(norms_in(new)) == 1
    new = convert(model, "wn", skip=lambda layer: layer.name != "stem")
    assert [layer.name for layer in m.of_class(new, WN)] == ["stem"]
    with pytest.raises(ValueError, match="`skip`.*'nobody'"):
        convert(model, "cbn", skip=["nobody"])


def test_two_conversions_in_a_row():
    model = m.residual()
    x = m.batch_for(model)
    new = quiet(convert, convert(model, "noisy_bn"), "wn")
    m.assert_same_outputs(new, model, x)
    new = quiet(convert, convert(model, "wn"), "cbn", data=x)
    assert not norms_in(new)
    m.assert_same_outputs(new, model, x)
    again = quiet(convert, new, "cbn")
    assert m.names(again) == m.names(new)
    m.assert_same_outputs(again, model, x)


@pytest.mark.skipif(
    m.BACKEND == "tensorflow", reason="TensorFlow on a CPU has no NCHW convolutions"
)
def test_channels_first():
    first = {"data_format": "channels_first"}
    inputs = keras.Input((3, 8, 8))
    x = layers.Conv2D(4, 3, name="one", **first)(inputs)
    x = layers.ReLU()(layers.BatchNormalization(axis=1)(x))
    x = layers.Conv2D(4, 3, name="two", **first)(x)
    x = layers.BatchNormalization(axis=1, name="bn")(layers.ReLU()(x))
    model = m.randomize(keras.Model(inputs, layers.ReLU()(x)))
    new = convert(model, "cbn", data=m.batch_for(model))
    assert new.get_layer("two_cbn").axis == 1
    m.assert_same_outputs(new, model, m.batch_for(model))


# Bad input


@pytest.mark.parametrize(
    "norm", ["bn", None, 3, m.sequential, keras.Sequential([layers.Dense(1)])]
)
def test_wrong_norms(norm):
    if callable(norm) and not isinstance(norm, keras.Model):
        with pytest.raises(TypeError):
            convert(m.sequential(), norm)
        return
    with pytest.raises(ValueError, match="Argument `norm` must be one of 'cbn'"):
        convert(m.sequential(), norm)


def test_wrong_models():
    with pytest.raises(ValueError, match="must be built"):
        convert(keras.Sequential([layers.Dense(2)]), "cbn")


def test_norms_that_stay():
    """Another axis, a mask that is given, always in training: the rest is converted."""
    inputs = keras.Input((8, 3))
    x = layers.BatchNormalization(name="goes")(layers.Conv1D(4, 3)(inputs))
    x = layers.BatchNormalization(axis=1, name="axis")(layers.ReLU()(x))
    x = layers.Conv1D(4, 1, name="second")(x)
    x = layers.BatchNormalization(name="mask")(x, mask=x[..., 0] > 0)
    x = layers.Dense(4)(x)
    x = layers.BatchNormalization(name="training")(x, training=True)
    model = m.randomize(keras.Model(inputs, layers.Dense(2)(x)))
    for preserve in (True, False):
        with pytest.warns(UserWarning, match="stay as they are: .'axis', 'mask', 'tr"):
            new = convert(model, "cbn", preserve=preserve)
        names = [layer.name for layer in norms_in(new)]
        assert names == ["axis", "mask", "training"]
        assert len(m.of_class(new, CBN)) == 3
        if preserve:
            m.assert_same_outputs(new, model, m.batch_for(model))
    # In place, the axis does not matter.
    m.assert_same_outputs(quiet(convert, model, "noisy_bn"), model, m.batch_for(model))


def test_layers_with_constraints_take_no_map():
    """The first step of training would undo it."""
    inputs = keras.Input((6,))
    x = layers.Dense(4, kernel_constraint="non_neg", name="first")(inputs)
    x = layers.BatchNormalization()(x)
    model = m.randomize(keras.Model(inputs, layers.Dense(2)(layers.ReLU()(x))))
    model.layers[1].kernel.assign(keras.ops.abs(model.layers[1].kernel))
    new = quiet(convert, model, "cbn")
    assert m.of_class(new, ChannelAffine)
    old = m.numpy(model.get_layer("first").kernel)
    np.testing.assert_array_equal(m.numpy(new.get_layer("first").kernel), old)
    m.assert_same_outputs(new, model, m.batch_for(model))
    assert not m.of_class(quiet(fold, model), layers.BatchNormalization)


def test_the_map_of_a_frozen_norm_is_frozen():
    inputs = keras.Input((6,))
    x = layers.BatchNormalization(trainable=False)(layers.ReLU()(inputs))
    new = quiet(convert, keras.Model(inputs, layers.ReLU()(x)), "cbn")
    (affine,) = m.of_class(new, ChannelAffine)
    assert not affine.trainable_weights


def test_quantized_layers():
    inputs = keras.Input((6,))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Dense(4)(inputs)))
    x = layers.BatchNormalization()(layers.Dense(4, name="quantized")(x))
    model = m.randomize(keras.Model(inputs, layers.Dense(2)(x)))
    model.get_layer("quantized").quantize("int8")
    new = quiet(convert, model, "cbn", data=m.batch_for(model))
    assert new.get_layer("quantized").quantization_mode == "int8"
    assert new.get_layer("quantized_cbn").compute_dtype == "float32"
    m.assert_same_outputs(new, model, m.batch_for(model))


@pytest.mark.parametrize("data", ["images", 3, object(), []])
def test_wrong_data(data):
    with pytest.raises(ValueError, match="Argument `data` must be"):
        convert(m.sequential(), "cbn", data=data)


def test_functions_must_return_layers():
    with pytest.raises(ValueError, match="must return a Keras layer.*'one_bn'"):
        convert(m.sequential(), lambda layer: "relu")
    with pytest.raises(ValueError, match="`preserve`"):
        convert(m.sequential(), "cbn", preserve="yes")
