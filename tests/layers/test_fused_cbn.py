"""FusedCBN is CBN and its linear layers: same weights, same results."""

import functools
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import AMAT, CBN
from keras_norms.layers.fused_cbn import FusedCBN
from tests.support.autodiff import BACKEND, MODES, second_derivative, training_step
from tests.support.cbn_reference import relative_error

rng = np.random.default_rng(0)

LINEAR = {
    "dense": ((6, 4), lambda: layers.Dense(5, activation="tanh")),
    "dense_of_rank_3": ((6, 3, 4), lambda: layers.Dense(5, use_bias=False)),
    "same": ((4, 7, 6, 4), lambda: layers.Conv2D(6, 3, padding="same")),
    "strided": ((4, 7, 6, 4), lambda: layers.Conv2D(6, 3, strides=2, padding="same")),
    "valid": ((4, 7, 6, 4), lambda: layers.Conv2D(6, (3, 2), activation="relu")),
    "pointwise": ((4, 7, 6, 4), lambda: layers.Conv2D(6, 1, strides=2)),
    "groups": ((4, 7, 6, 4), lambda: layers.Conv2D(6, 3, groups=2, padding="same")),
    "dilated": (
        (4, 7, 6, 4),
        lambda: layers.Conv2D(6, 3, dilation_rate=2, padding="same"),
    ),
    "depthwise": (
        (4, 7, 6, 4),
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same"),
    ),
    "conv1d": ((4, 7, 4), lambda: layers.Conv1D(6, 3, padding="same")),
    "conv3d": ((2, 4, 5, 3, 4), lambda: layers.Conv3D(6, 3, padding="same")),
}
FORMS = {
    "default": {},
    "rho": {"rho": 2.0},
    "ratio": {"mean_gradient": "ratio"},
    "coupled": {"decouple": False},
    "without": {"center": False, "scale": False},
}


def pair_and_fused(make, shape, **norm):
    """CBN before a layer, and both fused, with the same random weights."""
    pair = keras.Sequential([CBN(**norm), make()])
    pair.build(shape)
    fused = FusedCBN(make(), CBN(**norm))
    fused.build(shape)
    for variable in pair.trainable_variables:
        variable.assign(rng.normal(0.3, 0.3, variable.shape))
    fused.set_weights(pair.get_weights())
    for norm in (pair.layers[0], fused.norm):
        norm.set_learning_rate(0.05)
    return pair, fused


def data(shape):
    return rng.normal(1, 2, shape).astype("float32")


def assert_same_training(pair, fused, shape, mode, **call):
    output = pair.compute_output_shape(shape)
    weights = [rng.normal(size=output).astype("float32") for _ in range(2)]

    def loss(y):
        linear, square = map(ops.convert_to_tensor, weights)
        return ops.sum(linear * y + square * y * y)

    steps = [training_step(model, loss, mode, **call) for model in (pair, fused)]
    for _ in range(3):
        x = data(shape)
        for actual, expected in zip(steps[1](x), steps[0](x)):
            assert relative_error(actual, expected) < 2e-5
    for actual, expected in zip(fused.get_weights(), pair.get_weights()):
        assert relative_error(actual, expected) < 1e-5
    x = data(shape)
    assert relative_error(fused(x), ops.convert_to_numpy(pair(x))) < 1e-5
    return loss


@pytest.mark.parametrize("kind", LINEAR)
def test_every_layer(kind):
    shape, make = LINEAR[kind]
    assert_same_training(*pair_and_fused(make, shape), shape, MODES[-1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_cbn(form, mode):
    shape, make = LINEAR["strided"]
    pair, fused = pair_and_fused(make, shape, **FORMS[form])
    assert_same_training(pair, fused, shape, mode)


def test_second_derivatives():
    shape, make = LINEAR["same"]
    pair, fused = pair_and_fused(make, shape)
    loss = assert_same_training(pair, fused, shape, MODES[-1])
    x, direction = data(shape), data(shape)
    expected = second_derivative(pair, x, loss, direction, MODES[-1])
    actual = second_derivative(fused, x, loss, direction, MODES[-1])
    assert relative_error(actual, expected) < 2e-5


def test_a_mask():
    shape = (6, 5, 4)
    pair = keras.Sequential([CBN(), layers.Dense(3)])
    pair.build(shape)
    fused = FusedCBN(layers.Dense(3))
    fused.build(shape)
    fused.set_weights(pair.get_weights())
    x, mask = data(shape), rng.random(shape[:2]) > 0.4
    expected = pair.layers[1](pair.layers[0](x, training=True, mask=mask))
    actual = fused(x, training=True, mask=mask)
    assert relative_error(actual, ops.convert_to_numpy(expected)) < 1e-5
    for a, b in zip(fused.get_weights(), pair.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_masks_go_on_where_the_layer_lets_them():
    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    inputs = keras.Input((3,), dtype="int32")
    x = layers.Embedding(4, 5, mask_zero=True)(inputs)
    dense, conv = FusedCBN([layers.Dense(2), layers.Conv1D(2, 1)])(x)
    means = [layers.GlobalAveragePooling1D()(each) for each in (dense, conv)]
    model = keras.Model(inputs, [dense, conv, *means])
    dense, conv, *means = [ops.convert_to_numpy(y) for y in model(tokens)]
    expected = np.stack([dense[0, :2].mean(0), dense[1, 0]])
    np.testing.assert_allclose(means[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(means[1], conv.mean(1), rtol=1e-5, atol=1e-6)


def test_several_layers_share_the_statistics():
    x = data((4, 6, 6, 3))
    branch = layers.Conv2D(4, 3, padding="same", activation="relu")
    shortcut = layers.Conv2D(2, 1, strides=2)
    fused = FusedCBN([branch, shortcut], CBN(rho=0.5))
    norm = CBN(rho=0.5)
    expected = [layer(norm(x, training=True)) for layer in (branch, shortcut)]
    actual = fused(x, training=True)
    for a, b in zip(actual, expected):
        assert relative_error(a, ops.convert_to_numpy(b)) < 1e-5
    assert fused.compute_output_shape(x.shape) == [(4, 6, 6, 4), (4, 3, 3, 2)]
    assert len(fused.weights) == len(norm.weights) + 4


@pytest.mark.skipif(BACKEND == "tensorflow", reason="a GPU's layout")
def test_channels_first():
    shape = (4, 3, 7, 6)
    config = {"padding": "same", "data_format": "channels_first"}
    pair = keras.Sequential([CBN(axis=1), layers.Conv2D(5, 3, **config)])
    pair.build(shape)
    fused = FusedCBN(layers.Conv2D(5, 3, **config))
    fused.build(shape)
    fused.set_weights(pair.get_weights())
    x = data(shape)
    for training in (True, False):
        expected = ops.convert_to_numpy(pair(x, training=training))
        assert relative_error(fused(x, training=training), expected) < 1e-5


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_float16", 4e-3), ("mixed_bfloat16", 3e-2)]
)
def test_mixed_precision(policy, tolerance):
    shape = (8, 6, 6, 4)
    x = data(shape)
    plain = FusedCBN(layers.Conv2D(5, 3, padding="same"))
    expected = ops.convert_to_numpy(plain(x, training=True))
    fused = FusedCBN(layers.Conv2D(5, 3, padding="same", dtype=policy))
    fused.build(shape)
    fused.layers[0].set_weights(plain.layers[0].get_weights())
    y = fused(x, training=True)
    assert keras.backend.standardize_dtype(y.dtype) == fused.compute_dtype
    assert {v.dtype for v in fused.weights} == {"float32"}
    # The mean is subtracted from rounded outputs, and is half of their deviation.
    assert relative_error(ops.cast(y, "float32"), expected) < tolerance


def half_precision_gradients(policy):
    """Output and gradients of one step from the same numbers, whatever the policy."""
    rng = np.random.default_rng(1)
    x, g = (rng.normal(1, 2, (8, 6, 6, n)).astype("float32") for n in (4, 5))
    fused = FusedCBN(layers.Conv2D(5, 3, padding="same", dtype=policy))
    fused.build(x.shape)
    fused.layers[0].set_weights([rng.normal(size=(3, 3, 4, 5)), np.zeros(5)])
    weights = ops.convert_to_tensor(g)
    step = training_step(
        fused, lambda y: ops.sum(weights * ops.cast(y, "float32")), "eager"
    )
    return step(x)


def test_gradients_in_mixed_precision():
    plain = half_precision_gradients("float32")
    for half, expected in zip(half_precision_gradients("mixed_bfloat16"), plain):
        assert relative_error(half, expected) < 2e-2


@pytest.mark.skipif(BACKEND != "jax", reason="JAX only")
def test_kernel_gradient_as_on_a_tpu(monkeypatch):
    import jax

    def on_tpu(*tensors, tpu, default):
        return tpu(*tensors)

    here = half_precision_gradients("mixed_bfloat16")
    monkeypatch.setattr(jax.lax, "platform_dependent", on_tpu)
    for tpu, expected in zip(half_precision_gradients("mixed_bfloat16"), here):
        assert relative_error(tpu, expected) < 2e-2


def test_dynamic_sizes():
    inputs = keras.Input((None, None, 3))
    fused = FusedCBN(layers.Conv2D(4, 3, padding="same"))
    model = keras.Model(inputs, fused(inputs))
    assert model.output_shape == (None, None, None, 4)
    for size in (5, 8):
        x = data((2, size, size + 1, 3))
        assert (
            relative_error(model.predict(x, verbose=0), ops.convert_to_numpy(fused(x)))
            < 1e-5
        )


def test_fit_save_and_load(tmp_path):
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    a, b = FusedCBN([layers.Conv2D(5, 3), layers.Conv2D(5, 3)], name="two")(x)
    x = layers.GlobalAveragePooling2D()(layers.Add()([a, b]))
    model = keras.Model(inputs, FusedCBN(layers.Dense(2), CBN(rho=2.0))(x))
    model.compile(
        keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(True)
    )
    images, labels = data((16, 6, 6, 3)), np.arange(16) % 2
    before = model.get_weights()
    model.fit(images, labels, batch_size=8, callbacks=[AMAT()], verbose=0)
    changed = [np.any(a != b) for a, b in zip(model.get_weights(), before)]
    assert sum(changed) == len(changed) - 2  # all but rho
    assert float(model.get_layer("two").norm.learning_rate) == pytest.approx(0.05)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(images, verbose=0), model.predict(images, verbose=0)
    )
    old, new = model.get_layer("two"), loaded.get_layer("two")
    for a, b in zip((old.norm, *old.layers), (new.norm, *new.layers)):
        assert a.get_config() == b.get_config()


class Doubled(layers.Dense):
    """Computes something else than a Dense layer does."""

    def call(self, inputs):
        return 2 * super().call(inputs)


class Padded(layers.Conv2D):
    """Computes something else than a Conv2D layer does, without a `call`."""

    def convolution_op(self, inputs, kernel):
        return super().convolution_op(ops.pad(inputs, 1, "reflect"), kernel)


def patched(layer):
    layer.call = lambda inputs: inputs
    return layer


class Halved(layers.Conv2D):
    """Computes what a Conv2D layer does, with a kernel of its own."""

    def build(self, input_shape):
        super().build(input_shape)
        self.factor = self.add_weight(name="factor", shape=(), initializer="ones")
        self.factor.assign(0.5)

    @property
    def kernel(self):
        return self.factor * self._kernel


def test_a_derived_layer_that_computes_the_same():
    layer = Halved(5, 3, padding="same")
    fused = FusedCBN(layer)
    x = data((4, 6, 6, 3))
    y = fused(x, training=True)
    expected = layer(CBN()(x, training=True))
    assert relative_error(y, ops.convert_to_numpy(expected)) < 1e-5
    y, _, *gradients = training_step(fused, lambda y: ops.sum(y * y), MODES[-1])(x)
    names = [v.name for v in fused.trainable_variables]
    expected = 2 * np.sum(y * y) / 0.5
    np.testing.assert_allclose(gradients[names.index("factor")], expected, rtol=1e-4)


REFUSED = {
    "flatten": lambda: layers.Flatten(),
    "transposed": lambda: layers.Conv2DTranspose(3, 3),
    "causal": lambda: layers.Conv1D(3, 3, padding="causal"),
    "activity": lambda: layers.Dense(3, activity_regularizer="l2"),
    "model": lambda: keras.Sequential([layers.Dense(3)]),
    "call": lambda: Doubled(3),
    "operation": lambda: Padded(3, 3),
    "patched": lambda: patched(layers.Dense(3)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_layers_are_refused(kind):
    with pytest.raises(ValueError, match="`layer` must be.*Received: layer="):
        FusedCBN(REFUSED[kind]())


def test_lora():
    """Layers with LoRA, from the start, before they are fused and after."""
    x = data((6, 4))
    low_rank = rng.normal(size=(2, 5)).astype("float32")
    for when in ("argument", "before", "after"):
        layer = layers.Dense(5, lora_rank=2 if when == "argument" else None)
        if when == "before":
            layer.build(x.shape)
            layer.enable_lora(2)
        fused = FusedCBN(layer)
        fused.build(x.shape)
        if when == "after":
            layer.enable_lora(2)
        layer.lora_kernel_b.assign(low_rank)
        pair = keras.Sequential([CBN(), layer])
        pair.build(x.shape)
        for training in (True, False):
            y = ops.convert_to_numpy(pair(x, training=training))
            assert relative_error(fused(x, training=training), y) < 1e-5
    model = keras.Sequential([keras.Input((4,)), fused])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    kernel, low_rank = (
        ops.convert_to_numpy(v) for v in (layer._kernel, layer.lora_kernel_a)
    )
    model.fit(x, data((6, 5)), verbose=0, callbacks=[AMAT()])
    np.testing.assert_array_equal(ops.convert_to_numpy(layer._kernel), kernel)
    assert np.all(ops.convert_to_numpy(layer.lora_kernel_a) != low_rank)


@pytest.mark.parametrize("mode", ["int8", "int4", "float8"])
def test_quantized_layers(mode, tmp_path):
    shape = (64, 16)
    make = functools.partial(layers.Dense, 8, activation="relu")
    pair, fused = pair_and_fused(make, shape, rho=0.5)
    two = keras.Sequential([keras.Input((16,)), fused])
    x = data(shape)
    pair(x, training=True), fused(x, training=True)
    exact = ops.convert_to_numpy(pair(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Norms and inputs cannot be quantized.
        pair.quantize(mode)
        two.quantize(mode)
    # The fused form is called on the same numbers, so that it errs in the same way.
    expected = ops.convert_to_numpy(pair(x))
    assert relative_error(two(x), expected) < 1e-5
    error = np.sqrt(np.mean((expected - exact) ** 2)) / exact.std()
    assert 1e-4 < error < {"int8": 0.03, "int4": 0.2, "float8": 0.1}[mode]
    two.save(tmp_path / "two.keras")
    loaded = keras.models.load_model(tmp_path / "two.keras")
    assert relative_error(loaded(x), expected) < 1e-5
    assert loaded.layers[0].layers[0].quantization_mode == mode
    assert loaded.layers[0].compute_dtype == "float32"


def test_a_dtype_of_its_own_is_that_of_inputs_and_outputs():
    x = data((6, 4))
    layer, norm = layers.Dense(3), CBN()
    y = FusedCBN(layer, norm, dtype="mixed_float16")(x)
    assert keras.backend.standardize_dtype(y.dtype) == "float16"
    assert layer.compute_dtype == norm.compute_dtype == "float32"
    expected = ops.convert_to_numpy(layer(norm(x.astype("float16"))))
    assert relative_error(ops.cast(y, "float32"), expected) < 1e-3


def test_disagreements_are_refused():
    with pytest.raises(ValueError, match="`norm` must be a CBN layer"):
        FusedCBN(layers.Dense(3), layers.BatchNormalization())
    with pytest.raises(ValueError, match="dtype.*mixed_bfloat16.*float32"):
        FusedCBN(layers.Dense(3, dtype="mixed_bfloat16"), CBN())
    with pytest.raises(ValueError, match="axis 2, the channel axis.*norm.axis=1"):
        FusedCBN(layers.Dense(3), CBN(axis=1)).build((2, 3, 4))
