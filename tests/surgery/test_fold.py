"""fold: the same outputs at inference, with layers of Keras only."""

import subprocess
import sys
import textwrap
import warnings

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from keras_norms.layers.cbn import CBN
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.layers.weight_normalization import CWN, WN, WS
from keras_norms.surgery import fold
from tests.support import surgery_models as m

channels_first = pytest.mark.skipif(
    m.BACKEND == "tensorflow", reason="TensorFlow on a CPU has no NCHW convolutions"
)


def quiet_fold(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fold(model)


def norms_in(model):
    return m.of_class(model, layers.BatchNormalization)


def check(model, x=None, tolerance=1e-5):
    """Fold, compare, see that only Keras is left and the model is as it was."""
    x = m.batch_for(model) if x is None else x
    before = m.snapshot(model)
    folded = quiet_fold(model)
    m.assert_unchanged(before, model)
    m.assert_same_outputs(folded, model, x, tolerance)
    for layer in folded._flatten_layers():
        assert not type(layer).__module__.startswith("keras_norms")
    return folded


@pytest.mark.parametrize("name", m.MODELS)
def test_outputs_are_the_same(name):
    check(m.MODELS[name]())


@pytest.mark.parametrize(
    "name", ["residual", "kinds", "nested", "shared", "sequential"]
)
def test_nothing_is_left_of_batch_normalization_after_linear_layers(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        folded = fold(m.MODELS[name]())
    assert not norms_in(folded)


@pytest.mark.skipif(
    m.BACKEND != "tensorflow",
    reason="JAX has no float64 here; Keras's BatchNormalization has none on PyTorch",
)
def test_float64_shows_that_the_algebra_is_exact():
    old = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        for make in (m.residual, m.kinds, m.preactivated, cbn_network):
            model = make()
            x = m.batch_for(model).astype("float64")
            check(model, x, tolerance=1e-12)
    finally:
        keras.config.set_floatx(old[0])
        keras.config.set_dtype_policy(old[1])


def test_what_stays_is_one_frozen_layer_and_is_named():
    model = m.preactivated()
    with pytest.warns(UserWarning, match="'a_bn', 'b_bn', 'last_bn'"):
        folded = fold(model)
    left = norms_in(folded)
    assert [layer.name for layer in left] == ["a_bn", "b_bn", "last_bn"]
    assert not any(layer.trainable for layer in left)
    x = m.batch_for(model)
    m.assert_same_outputs(folded, model, x)
    # Also in training mode, as with every frozen BatchNormalization.
    np.testing.assert_allclose(
        m.numpy(folded(x, training=True)), m.numpy(folded(x, training=False)), rtol=1e-5
    )


def test_names_nesting_and_sharing_stay():
    folded = quiet_fold(m.nested())
    assert m.names(folded) == ["image", "rescaling", "body", "pool", "head"]
    body = folded.get_layer("body")
    assert m.names(body) == ["body_in", "first", "first_act", "block"]
    assert isinstance(body.get_layer("block"), keras.Sequential)
    siamese = quiet_fold(m.shared())
    assert len(siamese.get_layer("second")._inbound_nodes) == 2
    assert isinstance(quiet_fold(m.sequential()), keras.Sequential)


# Before zero padding


def cbn_network(filters=4, size=(9, 9), before=None, after=None, **cbn):
    """activation -> CBN -> layer, with random statistics."""
    inputs = keras.Input((*size, 3))
    x = layers.Conv2D(filters, 3, activation="relu", name="first")(inputs)
    x = x if before is None else before(x)
    x = CBN(name="norm", **cbn)(x)
    x = (after or layers.Conv2D(5, 3, padding="same", name="second"))(x)
    return m.randomize(keras.Model(inputs, x))


@pytest.mark.parametrize(
    "after",
    [
        lambda: layers.Conv2D(5, 3, padding="same"),
        lambda: layers.Conv2D(5, 3, strides=2, padding="same", use_bias=False),
        lambda: layers.Conv2D(4, 5, dilation_rate=2, padding="same", groups=2),
        lambda: layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2),
        lambda: layers.SeparableConv2D(5, 3, padding="same", depth_multiplier=2),
        lambda: layers.Conv2DTranspose(5, 3, strides=2, padding="same"),
        lambda: layers.Conv2DTranspose(5, 1, strides=2),
        lambda: keras.Sequential([layers.ZeroPadding2D(2), layers.Conv2D(5, 3)]),
    ],
)
def test_the_shift_stays_before_zero_padding(after):
    model = cbn_network(after=after())
    if isinstance(model.layers[-1], keras.Sequential):
        # The map must not cross into the other model.
        folded = check(model)
        assert len(norms_in(folded)) == 1
        return
    folded = check(model)
    shifts = m.of_class(folded, layers.Rescaling)
    assert [layer.name for layer in shifts] == ["norm"]
    assert not norms_in(folded)


@pytest.mark.parametrize(
    "after",
    [
        lambda: layers.Conv2D(5, 3, padding="valid", dilation_rate=2),
        lambda: layers.Conv2D(5, 1, padding="same", strides=2),
        lambda: layers.Conv2D(8, 3, groups=2),
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
        lambda: layers.SeparableConv2D(5, 3, depth_multiplier=3),
        lambda: layers.Conv2DTranspose(5, 1),
        lambda: layers.Dense(5, use_bias=False),
        lambda: layers.EinsumDense("abcd,de->abce", (None, None, 5)),
    ],
)
def test_without_a_border_nothing_stays(after):
    model = cbn_network(after=after(), decouple=False, rho=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fold(model)
    folded = check(model)
    assert "norm" not in m.names(folded)


def test_padding_between_the_norm_and_its_layer():
    inputs = keras.Input((9, 9, 3))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    x = CBN(name="norm")(x)
    y = layers.Conv2D(4, 3, padding="valid")(layers.ZeroPadding2D(2)(x))
    z = layers.Conv2D(4, 1)(layers.Dropout(0.5)(x))
    folded = check(m.randomize(keras.Model(inputs, [y, z])))
    assert len(m.of_class(folded, layers.Rescaling)) == 1


def test_sizes_that_are_known_only_at_run_time():
    model = cbn_network(size=(None, None))
    folded = check(model, m.images(2, 9, 11, 3))
    m.assert_same_outputs(folded, model, m.images(1, 6, 14, 3))


def test_a_channel_of_scale_zero():
    for padding in ("same", "valid"):
        model = cbn_network(after=layers.Conv2D(5, 3, padding=padding), decouple=False)
        gamma = m.numpy(model.get_layer("norm").gamma)
        model.get_layer("norm").gamma.assign(gamma * [1, 0, 1, 0])
        folded = check(model)
        assert len(norms_in(folded)) == (padding == "same")


@channels_first
def test_channels_first():
    first = {"data_format": "channels_first"}
    inputs = keras.Input((3, 9, 9))
    x = layers.Conv2D(4, 3, use_bias=False, **first)(inputs)
    x = layers.BatchNormalization(axis=1)(x)
    x = layers.ReLU()(x)
    x = CBN(axis=1, name="norm")(x)
    x = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2, **first)(x)
    x = layers.ReLU()(x)
    x = CBN(axis=1)(x)
    x = layers.SeparableConv2D(4, 3, **first)(x)
    x = layers.ReLU()(x)
    x = layers.BatchNormalization(axis=1)(x)
    x = layers.GlobalAveragePooling2D(**first)(x)
    x = layers.Dense(2)(x)
    folded = check(m.randomize(keras.Model(inputs, x)))
    assert [layer.name for layer in m.of_class(folded, layers.Rescaling)] == ["norm"]
    assert not norms_in(folded)


@settings(max_examples=5, deadline=None)
@given(
    size=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.sampled_from(["same", "valid"]),
    groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 100),
)
def test_any_convolution(size, stride, dilation, padding, groups, seed):
    if stride > 1:
        dilation = 1
    if m.BACKEND == "torch" and padding == "same" and size > 1 and stride > 1:
        stride = 1  # Quicker there.
    conv = layers.Conv2D(
        8, size, stride, padding, dilation_rate=dilation, groups=groups
    )
    model = m.randomize(
        keras.Sequential(
            [keras.Input((9, 10, 4)), layers.ReLU(), CBN(), conv, NoisyBN()]
        ),
        seed,
    )
    check(model, m.images(2, 9, 10, 4, seed=seed))


# Other norms and layers


@pytest.mark.parametrize("norm", [NoisyBN, LpNorm, lambda: LpNorm(p=1.5), CBN])
def test_norms_after_a_linear_layer(norm):
    model = m.randomize(
        keras.Sequential(
            [
                keras.Input((7, 7, 3)),
                layers.Conv2D(4, 3, padding="same"),
                norm(),
                layers.ReLU(),
                layers.Conv2D(4, 3, strides=2),
                norm(),
            ]
        )
    )
    folded = check(model)
    assert len(folded.layers) == 3


@pytest.mark.parametrize("wrapper", [WS, CWN, WN])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Conv2D(4, 3, groups=1, use_bias=False),
        lambda: layers.DepthwiseConv2D(3),
        lambda: layers.SeparableConv2D(4, 3),
        lambda: layers.Conv2DTranspose(4, 3),
        lambda: layers.Dense(4, activation="tanh"),
    ],
)
def test_weight_normalization(wrapper, layer):
    inputs = keras.Input((7, 7, 3))
    x = wrapper(layer(), name="wrapped")(inputs)
    x = layers.BatchNormalization(name="bn")(x)
    folded = check(m.randomize(keras.Model(inputs, x)))
    is_linear = folded.get_layer("wrapped").activation is keras.activations.linear
    assert ("bn" in m.names(folded)) != is_linear


def test_maps_pass_what_they_commute_with():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", name="a")(inputs)
    x = layers.Dropout(0.5)(x)
    x = layers.AveragePooling2D(2)(x)
    y = layers.Conv2D(2, 3, padding="same", name="b")(inputs)
    y = layers.MaxPooling2D(2)(layers.UpSampling2D(2)(layers.Cropping2D(2)(y)))
    y = layers.ZeroPadding2D(0)(y)
    x = layers.Concatenate()([x, y])
    x = layers.BatchNormalization(center=False, name="bn")(x)
    x = layers.ReLU()(x)
    x = CBN(name="norm")(x)
    x = layers.Flatten()(layers.AveragePooling2D(2)(x))
    x = layers.Dense(3)(x)
    model = m.randomize(keras.Model(inputs, x))
    bn = model.get_layer("bn")
    bn.gamma.assign(np.abs(m.numpy(bn.gamma)))
    bn.moving_mean.assign(np.zeros(6))
    folded = check(model)
    assert not norms_in(folded)
    # Maximum pooling does not commute with a negative scale.
    bn.gamma.assign(-m.numpy(bn.gamma))
    folded = check(model)
    assert [layer.name for layer in norms_in(folded)] == ["bn"]


def test_a_norm_whose_output_others_read_stays():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    x = CBN(name="norm")(x)
    y = layers.Conv2D(4, 3, padding="same")(x)
    folded = check(m.randomize(keras.Model(inputs, [x, layers.Add()([x, y])])))
    assert [layer.name for layer in norms_in(folded)] == ["norm"]


def test_calls_of_a_shared_layer_must_agree():
    conv = layers.Conv2D(3, 3, padding="same", name="conv")
    inputs = keras.Input((8, 8, 3))
    x = layers.BatchNormalization(name="one")(conv(inputs))
    x = conv(layers.ReLU()(x))
    x = layers.BatchNormalization(name="two")(x)
    folded = check(m.randomize(keras.Model(inputs, x)))
    assert [layer.name for layer in norms_in(folded)] == ["one", "two"]
    dense = layers.Dense(3)
    norm = CBN(name="norm")
    y = [dense(norm(layers.ReLU()(v))) for v in (inputs, x)]
    folded = check(m.randomize(keras.Model(inputs, y)))
    assert "norm" not in m.names(folded)


def test_masks_and_operators():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(10, 4, mask_zero=True)(tokens)
    x = layers.Dense(4)(x)
    x = layers.BatchNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x * 2.0 + 1.0)
    model = m.randomize(keras.Model(tokens, x))
    ids = np.random.default_rng(0).integers(0, 10, (4, 6))
    folded = check(model, ids)
    assert not norms_in(folded)


def test_inputs_and_outputs_keep_their_structure():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
    x = layers.BatchNormalization()(layers.Dense(4)(inputs["a"]))
    y = layers.Add()([x, inputs["b"]])
    model = m.randomize(keras.Model(inputs, {"sum": y, "pair": [x, y]}))
    folded = quiet_fold(model)
    x = {"a": m.images(2, 4), "b": m.images(2, 4, seed=1)}
    actual, expected = folded(x), model(x)
    assert actual.keys() == expected.keys()
    for a, b in zip(keras.tree.flatten(actual), keras.tree.flatten(expected)):
        np.testing.assert_allclose(m.numpy(a), m.numpy(b), rtol=1e-5, atol=1e-6)


def test_mixed_precision_and_compile_state():
    model = m.sequential()
    for layer in model.layers:
        layer.dtype_policy = "mixed_bfloat16"
    mixed = keras.Sequential.from_config(model.get_config())
    mixed.set_weights(model.get_weights())
    mixed.compile(keras.optimizers.Adam(0.3), "mse", metrics=["mae"])
    folded = check(mixed, tolerance=0.05)
    assert folded.get_layer("one").compute_dtype == "bfloat16"
    assert folded.get_layer("one").kernel.dtype == "float32"
    assert float(m.numpy(folded.optimizer.learning_rate)) == pytest.approx(0.3)
    folded.evaluate(m.batch_for(model), np.zeros((6, 3)), verbose=0)


def test_it_loads_without_the_package(tmp_path):
    model = cbn_network()
    folded = check(model)
    folded.save(tmp_path / "folded.keras")
    x = m.batch_for(model)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", m.numpy(folded(x)))
    script = f"""
    import sys
    sys.modules["keras_norms"] = None
    import keras, numpy as np
    model = keras.models.load_model(r"{tmp_path}/folded.keras")
    y = keras.ops.convert_to_numpy(model(np.load(r"{tmp_path}/x.npy")))
    np.testing.assert_allclose(y, np.load(r"{tmp_path}/y.npy"), rtol=1e-5, atol=1e-5)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


# What cannot be folded


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)


def test_models_that_cannot_be_read():
    with pytest.raises(ValueError, match="'own' of class Subclassed"):
        fold(Subclassed())
    with pytest.raises(ValueError, match="must be built.*'empty'"):
        fold(keras.Sequential([layers.Dense(2)], name="empty"))
    with pytest.raises(ValueError, match="Functional or Sequential"):
        fold(layers.Dense(2))


@pytest.mark.parametrize("norm", [layers.BatchNormalization, CBN])
def test_another_axis_than_the_channels(norm):
    """It stays in place, whatever is around it; the rest is folded."""
    inputs = keras.Input((8, 3))
    x = layers.BatchNormalization()(layers.Conv1D(4, 1)(inputs))
    x = layers.ZeroPadding1D(1)(norm(axis=1, name="wrong")(x))
    x = layers.UpSampling1D(2)(layers.Cropping1D(2)(x))
    x = layers.Dense(4)(norm(axis=1, name="steps")(x))
    x = layers.GlobalAveragePooling1D()(layers.AveragePooling1D(2)(x))
    model = m.randomize(keras.Model(inputs, x))
    folded = check(model)
    assert [layer.name for layer in norms_in(folded)] == ["wrong", "steps"]


def test_a_norm_that_always_trains_stays():
    inputs = keras.Input((3,))
    x = layers.BatchNormalization(name="bn")(layers.Dense(3)(inputs), training=True)
    with pytest.warns(UserWarning, match="'bn'"):
        folded = fold(keras.Model(inputs, x))
    assert "bn" in m.names(folded)


def test_layers_that_are_no_affine_map():
    inputs = keras.Input((3,))
    x = NoisyBN(noise_at_inference=True, name="noisy")(inputs)
    with pytest.raises(ValueError, match="'noisy'.*noise at inference"):
        fold(keras.Model(inputs, x))
    x = CBN(name="training")(inputs, training=True)
    with pytest.raises(ValueError, match="'training'.*training=True"):
        fold(keras.Model(inputs, x))


def test_norms_inside_of_other_layers_are_named():
    inputs = keras.Input((4, 3))
    x = layers.TimeDistributed(layers.BatchNormalization(name="bn"), name="over")(
        layers.Dense(3)(inputs)
    )
    model = keras.Model(inputs, x)
    with pytest.warns(UserWarning, match=r"bn \(in over\)"):
        folded = fold(model)
    m.assert_same_outputs(folded, model, m.batch_for(model))


class Scaled(layers.Dense):
    """A subclass may use its kernel in another way."""

    def call(self, x, training=None):
        return 2 * super().call(x, training=training)


class Unnamed(layers.Layer):
    """Keras counts the names of such weights up."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        return x * self.factor


def test_weights_without_names_are_copied():
    inputs = keras.Input((3,))
    x = Unnamed(name="one")(layers.Dense(3)(inputs))
    x = layers.BatchNormalization()(Unnamed(name="two")(layers.Dense(3)(x)))
    check(m.randomize(keras.Model(inputs, x)))


def test_subclasses_of_linear_layers_are_not_touched():
    inputs = keras.Input((3,))
    x = Scaled(4, name="own")(inputs)
    x = layers.BatchNormalization(name="bn")(x)
    folded = check(m.randomize(keras.Model(inputs, x)))
    assert "bn" in m.names(folded)
