"""What only FusedCBN has: several layers, LoRA, quantization, and layers it refuses.

That it is CBN and a linear layer: `test_every_layer`.
"""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CBN, FusedCBN
from tests.support.autodiff import FAST, training_step
from tests.support.backend import has_channels_first, jax_only, later, numpy
from tests.support.batch_reference import relative_error
from tests.support.wrapped import Halved

rng = np.random.default_rng(0)


def data(*shape):
    return rng.normal(1, 2, shape).astype("float32")


def pair_and_fused(layer, shape, axis=-1, **norm):
    """CBN before a layer, and both fused, with the same random weights."""
    pair = keras.Sequential([CBN(axis=axis, **norm), layer])
    pair.build(shape)
    fused = FusedCBN(layer.from_config(layer.get_config()), CBN(axis=axis, **norm))
    fused.build(shape)
    for variable in pair.trainable_variables:
        variable.assign(rng.normal(0.3, 0.3, variable.shape))
    fused.set_weights(pair.get_weights())
    return pair, fused


def assert_same(fused, pair, x, mask=None, **call):
    norm, layer = pair.layers
    expected = numpy(layer(norm(x, mask=mask, **call)))
    assert relative_error(fused(x, mask=mask, **call), expected) < 1e-5
    for a, b in zip(fused.get_weights(), pair.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def step_of(layer, x):
    """The output y, and gradients of sum(y * y) by name."""
    y, _, *gradients = training_step(layer, lambda y: ops.sum(y * y), FAST)(x)
    names = [v.name for v in layer.trainable_variables]
    return y, dict(zip(names, gradients, strict=True))


def test_masks_go_on_where_the_layer_lets_them():
    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    inputs = keras.Input((3,), dtype="int32")
    x = layers.Embedding(4, 5, mask_zero=True)(inputs)
    dense, conv = FusedCBN([layers.Dense(2), layers.Conv1D(2, 1)])(x)
    means = [layers.GlobalAveragePooling1D()(each) for each in (dense, conv)]
    model = keras.Model(inputs, [dense, conv, *means])
    dense, conv, *means = map(numpy, model(tokens))
    expected = np.stack([dense[0, :2].mean(0), dense[1, 0]])
    np.testing.assert_allclose(means[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(means[1], conv.mean(1), rtol=1e-5, atol=1e-6)


def test_several_layers_share_the_statistics(tmp_path):
    x = data(4, 6, 6, 3)
    branch = layers.Conv2D(4, 3, padding="same", activation="relu")
    shortcut = layers.Conv2D(2, 1, strides=2)
    fused = FusedCBN([branch, shortcut], CBN(rho=0.5))
    norm = CBN(rho=0.5)
    expected = [layer(norm(x, training=True)) for layer in (branch, shortcut)]
    for actual, wanted in zip(fused(x, training=True), expected, strict=True):
        assert relative_error(actual, numpy(wanted)) < 1e-5
    assert fused.compute_output_shape(x.shape) == [(4, 6, 6, 4), (4, 3, 3, 2)]
    inputs = keras.Input(x.shape[1:])
    keras.Model(inputs, fused(inputs)).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for actual, wanted in zip(loaded(x), fused(x), strict=True):
        np.testing.assert_array_equal(numpy(actual), numpy(wanted))
    assert len(fused.weights) == len(norm.weights) + 4


@has_channels_first
def test_channels_first():
    layer = layers.Conv2D(5, 3, padding="same", data_format="channels_first")
    pair, fused = pair_and_fused(layer, (4, 3, 7, 6), axis=1)
    assert_same(fused, pair, data(4, 3, 7, 6), training=True)
    assert FusedCBN(layer).norm.axis == 1


@jax_only
@pytest.mark.parametrize(("platform", "size"), [("tpu", 3), ("cuda", 3), ("cuda", 1)])
def test_in_half_precision_as_on(platform, size, monkeypatch):
    import jax

    def on_platform(*tensors, default, **others):
        return others.get(platform, default)(*tensors)

    x, g, kernel = data(8, 6, 6, 4), data(8, 6, 6, 5), data(size, size, 4, 5)

    def outputs_and_gradients():
        layer = layers.Conv2D(5, size, padding="same", dtype="mixed_bfloat16")
        fused = FusedCBN(layer)
        fused.build(x.shape)
        layer.kernel.assign(kernel)
        slope = ops.convert_to_tensor(g)

        def loss(y):
            return ops.sum(slope * ops.cast(y, "float32"))

        return training_step(fused, loss, FAST)(x)

    here = outputs_and_gradients()
    monkeypatch.setattr(jax.lax, "platform_dependent", on_platform)
    for there, expected in zip(outputs_and_gradients(), here, strict=True):
        assert relative_error(there, expected) < 2e-2


def test_a_derived_layer_that_computes_the_same():
    """With a kernel of its own."""
    layer = Halved(5)
    fused = FusedCBN(layer)
    x = data(6, 4)
    fused.build(x.shape)
    y, gradients = step_of(fused, x)
    normed = numpy(CBN()(x, training=True))
    assert relative_error(y, numpy(layer(normed))) < 1e-5
    assert relative_error(gradients["kernel"], normed.T @ y) < 1e-4


def test_disagreements_are_refused():
    with pytest.raises(ValueError, match="dtype.*mixed_bfloat16.*float32"):
        FusedCBN(layers.Dense(3, dtype="mixed_bfloat16"), CBN())
    with pytest.raises(ValueError, match="axis 2, the channel axis.*norm.axis=1"):
        FusedCBN(layers.Dense(3), CBN(axis=1)).build((2, 3, 4))


@pytest.mark.parametrize("when", ["argument", "before", "after"])
def test_lora(when):
    """Layers with LoRA, from the start, before they are fused and after."""
    x = data(6, 4)
    layer = layers.Dense(5, lora_rank=2 if when == "argument" else None)
    if when == "before":
        layer.build(x.shape)
        layer.enable_lora(2)
    fused = FusedCBN(layer)
    fused.build(x.shape)
    if when == "after":
        layer.enable_lora(2)
    layer.lora_kernel_b.assign(data(2, 5))
    norm = CBN()
    for training in (True, False):
        y = numpy(layer(norm(x, training=training)))
        assert relative_error(fused(x, training=training), y) < 1e-5
    _, gradients = step_of(fused, x)
    assert "kernel" not in gradients and np.all(gradients["lora_kernel_a"] != 0)


@pytest.mark.parametrize(
    ("mode", "most"), [("int8", 0.03), *later(("int4", 0.2), ("float8", 0.1))]
)
def test_quantized_layers(mode, most, tmp_path):
    layer = layers.Dense(8, activation="relu")
    pair, fused = pair_and_fused(layer, (64, 16), rho=0.5)
    two = keras.Sequential([keras.Input((16,)), fused])
    x = data(64, 16)
    assert_same(fused, pair, x, training=True, mask=rng.random(64) > 0.4)
    exact = numpy(pair(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Norms and inputs cannot be quantized.
        pair.quantize(mode)
        two.quantize(mode)
    # The fused form is called on the same numbers, so that it errs in the same way.
    expected = numpy(pair(x))
    assert relative_error(two(x), expected) < 1e-5
    error = np.sqrt(np.mean((expected - exact) ** 2)) / exact.std()
    assert 1e-4 < error < most
    two.save(tmp_path / "two.keras")
    loaded = keras.models.load_model(tmp_path / "two.keras")
    assert relative_error(loaded(x), expected) < 1e-5
    assert loaded.layers[0].layers[0].quantization_mode == mode
    assert loaded.layers[0].compute_dtype == "float32"
