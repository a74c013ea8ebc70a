"""What only FusedCBN has: several layers, LoRA, quantization, and layers it refuses.

That it is CBN and a linear layer: `test_every_layer`.
"""

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
    x, mask = data(4, 6, 6, 3), rng.random((4, 6, 6)) > 0.4
    branch = layers.Conv2D(4, 3, padding="same", activation="relu")
    shortcut = layers.Conv2D(2, 1, strides=2)
    fused = FusedCBN([branch, shortcut], CBN(rho=0.5))
    norm = CBN(rho=0.5)
    normed = norm(x, training=True, mask=mask)
    for y, layer in zip(fused(x, training=True, mask=mask), (branch, shortcut)):
        assert relative_error(y, numpy(layer(normed))) < 1e-5
    for a, b in zip(fused.norm.get_weights(), norm.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert fused.compute_output_shape(x.shape) == [(4, 6, 6, 4), (4, 3, 3, 2)]
    inputs = keras.Input(x.shape[1:])
    keras.Model(inputs, fused(inputs)).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_equal([*map(numpy, loaded(x))], [*map(numpy, fused(x))])


def test_not_trainable_from_the_start():
    layer = FusedCBN(layers.Dense(3), trainable=False)
    layer.build((None, 4))
    assert not layer.trainable_variables and not layer.norm.trainable


@has_channels_first
def test_channels_first():
    layer = layers.Conv2D(5, 3, padding="same", data_format="channels_first")
    fused, x = FusedCBN(layer), data(4, 3, 7, 6)
    assert fused.norm.axis == 1
    y = fused(x, training=True)
    assert relative_error(y, numpy(layer(CBN(axis=1)(x, training=True)))) < 1e-5


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


@pytest.mark.parametrize("is_built", [False, True], ids=["with it", "before it"])
def test_inputs_must_fit(is_built):
    inner = layers.Dense(3)
    if is_built:
        inner.build((None, 4))
    layer = FusedCBN(inner)
    with pytest.raises(ValueError, match="incompatible with the layer"):
        layer(data(6)[0])
    layer.build((None, 4))
    with pytest.raises(ValueError, match="incompatible with the layer"):
        layer(data(6, 5))
    assert layer(data(6, 2, 4)).shape == (6, 2, 3)


def test_disagreements_are_refused():
    with pytest.raises(ValueError, match="dtype.*mixed_bfloat16.*float32"):
        FusedCBN(layers.Dense(3, dtype="mixed_bfloat16"), CBN())
    # Which says the same in another way.
    by_path = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    FusedCBN(layers.Dense(3, dtype=by_path), CBN()).build((2, 4))
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


@pytest.mark.filterwarnings("ignore")  # Norms and inputs cannot be quantized.
@pytest.mark.parametrize("mode", ["int8", *later("int4", "float8")])
def test_quantized_layers(mode, tmp_path):
    norm, layer = CBN(rho=0.5), layers.Dense(8, activation="relu")
    pair = keras.Sequential([keras.Input((16,)), norm, layer])
    fused = FusedCBN(layers.Dense(8, activation="relu"), CBN(rho=0.5))
    two = keras.Sequential([keras.Input((16,)), fused])
    x = data(64, 16)
    pair(x, training=True)
    two.set_weights(pair.get_weights())
    exact = numpy(pair(x))
    pair.quantize(mode)
    two.quantize(mode)
    two.save(tmp_path / "two.keras")
    loaded = keras.models.load_model(tmp_path / "two.keras")
    # The fused form is called on the same numbers, so that it errs in the same way.
    expected = numpy(pair(x))
    assert relative_error(exact, expected) > 1e-4
    for each in (two, loaded):
        assert relative_error(each(x), expected) < 1e-5
    assert loaded.layers[0].layers[0].quantization_mode == mode
    assert loaded.layers[0].compute_dtype == "float32"
