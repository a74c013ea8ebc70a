"""WS, CWN and WN: gains, weights of any size, and precision."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CWN, WN, WS, FusedCBN
from tests.support.any_layer import WRAPPERS, case, reference_of
from tests.support.backend import has_float64, numpy
from tests.support.batch_reference import relative_error
from tests.support.weight_reference import CASES
from tests.support.wrapped import assert_close, data, randomize, wrapped


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
    half = keras.initializers.Constant(0.5)
    more = {"scale": 4.0, "gain": True, "gain_initializer": half, "epsilon": 1e-12}
    layer = wrapped(CWN, layers.Dense(3), (None, 4), **more)
    kernel = numpy(layer.normalized_kernels()["kernel"])
    assert_close(np.sum(kernel**2, 0), [4.0] * 3)
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
