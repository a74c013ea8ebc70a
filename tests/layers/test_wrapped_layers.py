"""WS, CWN and WN around a layer: its state, losses and masks, and which are refused."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CWN, WN, WS
from tests.support.backend import numpy
from tests.support.wrapped import Noisy, assert_close, data, randomize, wrapped


def test_regularizers_count_once_and_act_on_the_stored_kernel_and_on_outputs():
    x = data(5, 4)
    layer = CWN(
        layers.Dense(
            3,
            kernel_regularizer=keras.regularizers.L2(0.25),
            kernel_constraint=keras.constraints.NonNeg(),
            activity_regularizer=keras.regularizers.L1(0.5),
        )
    )
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    randomize(layer)
    y = numpy(layer(x))
    decay = 0.25 * np.sum(numpy(layer.layer.kernel) ** 2)
    plain = layers.ActivityRegularization(l1=0.5)  # as this version of Keras scales it
    plain(y)
    expected = pytest.approx(decay + float(numpy(plain.losses[0])), rel=1e-5)
    for _ in range(2):
        layer(x)
        assert float(numpy(sum(layer.losses))) == expected
    assert model.evaluate(x, y, verbose=0) == expected
    assert model.train_on_batch(x, y) == expected
    assert np.all(numpy(layer.layer.kernel) >= 0)
    assert np.any(numpy(layer.normalized_kernels()["kernel"]) < 0)


def test_the_state_the_losses_and_the_mask_of_a_derived_layer():
    x = data(5, 4)
    layer = WS(Noisy(3))
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    quiet = numpy(layer(x))
    mask = np.arange(5) < 3
    assert_close(layer(x, mask=mask), quiet * mask[:, None])
    noisy = [numpy(layer(x, training=True)) for _ in range(2)]
    assert np.abs(noisy[0] - noisy[1]).max() > 0.1
    assert len(layer.losses) == 1
    assert_close(layer.losses[0], quiet.mean(), atol=1e-5)
    model.fit(np.concatenate([x, x]), np.zeros((10, 3)), 5, verbose=0)
    assert_close(layer.layer.calls, 4.0)
    loss = model.train_on_batch(x, quiet)
    assert 0.3 < np.ravel(loss)[0] - quiet.mean() < 3.0
    assert_close(layer(x), quiet)


def test_mixed_precision_keeps_the_state_of_a_derived_layer():
    """A counter of 4096 calls would stay as it is in bfloat16."""
    layer = wrapped(WS, Noisy(3, dtype="mixed_bfloat16"), (None, 4))
    layer.layer.calls.assign(4096.0)
    layer(data(5, 4), training=True)
    assert_close(layer.layer.calls, 4097.0, rtol=0)


def test_a_mask_ends_where_the_wrapped_layer_ends_it():
    embedding = layers.Embedding(4, 5, mask_zero=True)
    x = embedding(np.array([[1, 2, 0], [3, 0, 0]]))
    layer = wrapped(WS, layers.Conv1D(2, 2), (None, 3, 5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = layer(x)
    assert getattr(y, "_keras_mask", None) is None
    assert sum("destroy the mask" in str(w.message) for w in caught) == 1


def test_frozen_kernels_stay_and_are_normalized():
    """By the wrapper, by the layer, by an argument, and by the layer before `build`."""
    x, inner = data(5, 4), [layers.Dense(4) for _ in range(4)]
    stack = [CWN(each, gain=True, trainable=i != 2) for i, each in enumerate(inner)]
    inner[3].trainable = False
    model = keras.Sequential([keras.Input((4,)), *stack])
    stack[0].trainable = inner[1].trainable = False
    # Where the layer alone is frozen, the gain is not.
    gains = [stack[i].gains["kernel"] for i in (1, 3)]
    assert model.trainable_weights == gains
    before = [numpy(s(x)) for s in stack]
    plain = [numpy(i(x)) for i in inner]
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, data(5, 4, seed=1), verbose=0)
    for i, expected in enumerate(before):
        np.testing.assert_array_equal(numpy(inner[i](x)), plain[i])
        assert np.abs(expected - plain[i]).max() > 0.01
        assert np.all(numpy(stack[i](x)) == expected) == (i in (0, 2))


# Layers that are refused


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [("enable_lora", 2, "LoRA"), ("quantize", "int8", "quantized")],
)
def test_a_kernel_that_is_no_single_weight_any_more(change, argument, message):
    layer = wrapped(WN, layers.Dense(3), (None, 4))
    getattr(layer.layer, change)(argument)
    for use in (lambda: layer(data(5, 4)), layer.normalized_kernels, layer.reset_gain):
        with pytest.raises(ValueError, match=f"changed after.*{message}"):
            use()


@pytest.mark.parametrize(
    ("wrapper", "layer", "shape", "name"),
    [
        (CWN, layers.DepthwiseConv2D(1), (None, 4, 4, 3), "kernel"),
        (WS, layers.SeparableConv1D(3, 1), (None, 6, 2), "depthwise_kernel"),
        (CWN, layers.SeparableConv1D(3, 2), (None, 6, 1), "pointwise_kernel"),
        (WS, layers.EinsumDense("ab,b->ab", 4), (None, 4), "kernel"),
    ],
)
def test_a_unit_with_one_weight_is_refused(wrapper, layer, shape, name):
    with pytest.raises(ValueError, match=f"`{name}`.*Use WN.*{name}.shape="):
        wrapper(layer).build(shape)


def test_wn_takes_units_with_one_weight():
    layer, x = layers.DepthwiseConv2D(1, depth_multiplier=2), data(2, 4, 4, 3)
    assert_close(WN(layer)(x), layer(x))


def test_weights_are_there_after_build_only_and_inputs_must_fit():
    layer = WN(layers.Dense(3))
    for use in (layer.normalized_kernels, layer.reset_gain):
        with pytest.raises(ValueError, match="`build`"):
            use()
    layer.build((None, 4))
    with pytest.raises(ValueError, match="incompatible with the layer"):
        layer(keras.Input((5,)))
