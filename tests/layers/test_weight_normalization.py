"""WS, CWN and WN: gains, precision, `WN.data_init`, and the layers that they wrap."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CWN, WN, WS, FusedCBN
from tests.support.any_layer import WRAPPERS, case, reference_of
from tests.support.backend import BACKEND, has_channels_first, has_float64, numpy, some
from tests.support.batch_reference import relative_error
from tests.support.weight_reference import CASES
from tests.support.wrapped import Doubled, Noisy, assert_close, data, randomize, wrapped


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


@pytest.mark.parametrize(
    ("name", "trained"),
    [("dense", False), ("conv1d_transpose", True), ("separable_conv1d", True)],
)
def test_wn_changes_nothing_at_the_start_and_after_reset_gain(name, trained):
    linear = CASES[name]
    layer, x = linear.make(activation="tanh"), data(*linear.input_shape)
    if trained:
        layer.build(x.shape)
        randomize(layer)
    wrapper = wrapped(WN, layer, x.shape, epsilon=0.1)
    assert_close(wrapper(x), layer(x), rtol=1e-6)
    randomize(wrapper)
    assert np.abs(numpy(wrapper(x)) - numpy(layer(x))).max() > 0.01
    wrapper.reset_gain()
    for key, kernel in wrapper.normalized_kernels().items():
        assert_close(kernel, getattr(layer, key), rtol=1e-6, atol=1e-7)


def test_gain_initializers():
    layer = wrapped(WS, layers.Dense(3), (None, 4), gain=True)
    assert_close(layer.gains["kernel"], [1] * 3)
    half = {"gain": True, "gain_initializer": keras.initializers.Constant(0.5)}
    layer = wrapped(CWN, layers.Dense(3), (None, 4), **half)
    assert_close(layer.gains["kernel"], [0.5] * 3)
    with keras.StatelessScope():  # in which weights have no values yet
        layer = wrapped(WN, layers.Dense(3), (None, 4))
    length = np.sqrt(np.sum(numpy(layer.layer.kernel) ** 2, 0) + 1e-5)
    assert_close(layer.gains["kernel"], length)


# Precision


@pytest.mark.parametrize("name", ["WS(dense)", "CWN(dense)", "WN(dense)"])
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        ("mixed_float16", 1e-5),
        ("mixed_bfloat16", 1e-5),
        ("float16", 1e-3),
        pytest.param("float64", 1e-13, marks=has_float64),
    ],
)
def test_kernels_are_normalized_in_float32_or_wider(name, policy, tolerance):
    """Half precision cannot hold this one, nor its squares: digits count after 300."""
    each = case(name, dtype=policy)
    layer, inner = each.layer, each.layer.layer
    randomize(layer)
    inner.kernel.assign(300 + 3 * numpy(inner.kernel))
    x = data(*each.shape)
    expected = reference_of(each).kernels(each.values(x))["kernel"]
    kernel = layer.normalized_kernels()["kernel"]
    assert dtype_of(kernel) == layer.variable_dtype
    assert relative_error(kernel, expected) < tolerance
    y = layer(x)
    assert dtype_of(y) == layer.compute_dtype
    inner.kernel.assign(kernel)
    np.testing.assert_array_equal(
        *(numpy(ops.cast(v, "float32")) for v in (y, inner(x)))
    )


@pytest.mark.parametrize("cls", [*WRAPPERS, FusedCBN])
def test_a_dtype_of_its_own_is_that_of_inputs_and_outputs(cls):
    x, inner = data(5, 4), layers.Dense(3)
    layer = cls(inner)
    assert layer.dtype_policy == inner.dtype_policy
    y = layer(x.astype("float16"))
    layer = cls(inner, dtype="mixed_float16" if cls is FusedCBN else "float16")
    half = layer(x)
    assert dtype_of(half) == "float16"
    computes = {each.compute_dtype for each in layer._flatten_layers()} - {"float16"}
    assert computes == {weight.dtype for weight in layer.weights} == {"float32"}
    assert_close(half, y, rtol=1e-3, atol=1e-3)


# WN.data_init: outputs before the activation start with mean 0 and variance 1.


def assert_normalised(y, units):
    others = tuple({*range(y.ndim)} - {u % y.ndim for u in units})
    assert_close(y.mean(others), 0, atol=1e-5)
    assert_close(y.std(others), 1, atol=1e-5)


KINDS = [("dense", True), ("separable_conv1d", False), ("einsum_swapped", False)]
KINDS += [("conv1d_transpose", True), ("einsum_kernel_per_step", False)]
QUICK = KINDS[: 2 if BACKEND == "jax" else None]
KINDS += [("depthwise_conv2d", True), ("einsum_ellipsis_right", False)]


@pytest.mark.parametrize(("name", "built"), some(KINDS, QUICK))
def test_data_init(name, built):
    linear, activation = CASES[name], layers.LeakyReLU()
    layer = WN(linear.make(activation=activation))
    x = 3 * data(7, *linear.input_shape[1:]) + 1
    if built:
        layer.build(x.shape)
        randomize(layer)
    kernels = {key: numpy(getattr(layer.layer, key)) for key in linear.fan_in if built}
    layer.data_init(x)
    for key, kernel in kernels.items():
        np.testing.assert_array_equal(numpy(getattr(layer.layer, key)), kernel)
    weights = {k: numpy(v) for k, v in layer.normalized_kernels().items()}
    weights["bias"] = numpy(layer.layer.bias)
    y = linear.output(x.astype("float64"), weights)
    assert_normalised(y, linear.units)
    assert layer.layer.activation is activation
    assert_close(layer(x), np.maximum(y, 0.3 * y), atol=1e-5)


@has_channels_first
def test_channels_first():
    layer = WN(layers.Conv2D(3, 2, data_format="channels_first"))
    x = 3 * data(7, 2, 4, 5) + 1
    layer.data_init(x)
    assert_normalised(numpy(layer(x)), (1,))


def assert_refused(layer, x, message):
    """And left as it was."""
    before = layer.get_weights()
    with pytest.raises(ValueError, match=message):
        layer.data_init(x)
    np.testing.assert_equal(layer.get_weights(), before)


def test_classes_that_override_call():
    layer = WN(Noisy(3))
    layer.data_init(data(20, 4))
    assert_close(layer.layer.calls, 0.0)
    assert layer.losses == []
    x, layer = data(5, 4), WN(Doubled(3))
    y = numpy(layer(x))
    assert_close(y, layer.layer(x))
    layer.gains["kernel"].assign(3 * layer.gains["kernel"])
    assert_close(layer(x), 3 * y)
    assert_refused(layer, 3 * x + 1, "Doubled, overrides `call`")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("abc,cd->abd", (None, 3)), "has no bias.*use_bias=True"),
        (("abc,cde->abde", (None, 2, 3), None, "e"), "Received.*bias_axes='e'"),
    ],
)
def test_a_bias_is_needed_for_each_unit(arguments, message):
    with pytest.raises(ValueError, match=message):
        WN(layers.EinsumDense(*arguments)).data_init(data(5, 6, 4))


def test_data_must_vary():
    layer = WN(layers.Dense(3))
    with pytest.raises(ValueError, match="vary.*x.shape=.1, 4.*3 of 3 units"):
        layer.data_init(data(1, 4))
    layer.layer.kernel.assign(np.eye(4, 3))
    assert_refused(layer, data(5, 4) * np.float32([1, 0, 1, 1]), "1 of 3 units")


# The layer that is wrapped: its state, losses and mask


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
    model.reset_metrics()  # older Keras returns the mean since then
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
    with pytest.warns(UserWarning, match="destroy the mask") as caught:
        y = layer(x)
    assert getattr(y, "_keras_mask", None) is None and len(caught) == 1


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


def test_a_kernel_that_is_no_single_weight_any_more():
    layer = wrapped(WN, layers.Dense(3), (None, 4))
    layer.layer.enable_lora(2)
    for use in (lambda: layer(data(5, 4)), layer.normalized_kernels, layer.reset_gain):
        with pytest.raises(ValueError, match="changed after.*LoRA"):
            use()


def test_quantization_leaves_out_what_is_wrapped():
    x, layer = data(5, 4), WN(layers.Dense(3, name="inner"), name="outer")
    model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(2)])
    before = numpy(layer(x))
    with pytest.warns(UserWarning, match="'inner' in 'outer'.*fold"):
        model.quantize("int8")
    np.testing.assert_array_equal(numpy(layer(x)), before)
    assert model.layers[1].quantization_mode == "int8"


@pytest.mark.parametrize(
    ("wrapper", "layer", "shape", "name"),
    [
        (CWN, layers.DepthwiseConv2D(1), (None, 4, 4, 3), "kernel"),
        (WS, layers.SeparableConv1D(3, 1), (None, 6, 2), "depthwise_kernel"),
        (CWN, layers.SeparableConv1D(3, 2), (None, 6, 1), "pointwise_kernel"),
        (WS, layers.EinsumDense("ab,b->ab", 4), (None, 4), "kernel"),
    ],
)
def test_a_unit_with_one_weight_is_refused_but_by_wn(wrapper, layer, shape, name):
    with pytest.raises(ValueError, match=f"`{name}`.*Use WN.*{name}.shape="):
        wrapper(layer).build(shape)
    x = data(2, *shape[1:])
    assert_close(WN(layer)(x), layer(x))


def test_weights_are_there_after_build_only_and_inputs_must_fit():
    layer = WN(layers.Dense(3))
    for use in (layer.normalized_kernels, layer.reset_gain):
        with pytest.raises(ValueError, match="`build`"):
            use()
    with pytest.raises(ValueError, match="incompatible with the layer"):
        layer(ops.ones(()))
    layer.build((None, 4))
    with pytest.raises(ValueError, match="incompatible with the layer"):
        layer(keras.Input((5,)))
