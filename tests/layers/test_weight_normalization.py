"""WS, CWN and WN: gains, weights of any size, and precision."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CWN, WN, WS, FusedCBN
from tests.support.any_layer import FORMS, WRAPPERS, case, reference_of
from tests.support.backend import has_float64, numpy
from tests.support.batch_reference import relative_error
from tests.support.weight_reference import CASES
from tests.support.wrapped import assert_close, data, randomize, wrapped

DENSE = ["WS(dense)", "CWN(dense)", "WN(dense)"]


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("dense", False),
        ("conv1d_transpose", True),
        ("depthwise_conv2d", True),
        ("separable_conv1d", False),
    ],
)
def test_wn_changes_nothing_at_the_start_and_after_reset_gain(name, trained):
    linear = CASES[name]
    layer, x = linear.make(activation="tanh"), data(*linear.input_shape)
    if trained:
        layer.build(x.shape)
        randomize(layer)
    wrapper = wrapped(WN, layer, x.shape, epsilon=0.1)
    for reset in (False, True):
        if reset:
            randomize(wrapper)
            assert np.abs(numpy(wrapper(x)) - numpy(layer(x))).max() > 0.01
            wrapper.reset_gain()
        assert_close(wrapper(x), layer(x), rtol=1e-6)
        for key, kernel in wrapper.normalized_kernels().items():
            assert_close(kernel, getattr(layer, key), rtol=1e-6, atol=1e-7)


def test_gain_initializers():
    layer = wrapped(WS, layers.Dense(3), (None, 4), gain=True)
    assert_close(layer.gains["kernel"], [1] * 3)
    half = keras.initializers.Constant(0.5)
    layer = CWN(layers.Dense(3), 4.0, True, half, 1e-12)
    layer.build((None, 4))
    kernel = numpy(layer.normalized_kernels()["kernel"])
    assert_close(np.sum(kernel**2, 0), [4.0] * 3)


# Precision


@pytest.mark.parametrize(
    ("policy", "tolerance", "inside_of_a_model"),
    [("mixed_float16", 2e-3, False), ("mixed_bfloat16", 2e-2, True)],
)
@pytest.mark.parametrize("name", DENSE)
def test_mixed_precision(name, policy, tolerance, inside_of_a_model):
    """Half precision cannot hold this kernel: 100 plus digits that count."""
    call = layer = FORMS[name].make(dtype=policy)
    exact = FORMS[name].make()
    if inside_of_a_model:
        call = keras.Sequential([keras.Input((4,)), layer])
        call.dtype_policy = keras.dtype_policies.get(policy)
    for each in (layer, exact):
        if not each.built:
            each.build((None, 4))
        randomize(each)
        each.layer.kernel.assign(100 + 0.1 * data(4, 3))
    x = numpy(ops.cast(ops.cast(data(5, 4), layer.compute_dtype), "float32"))
    y = call(x)
    assert dtype_of(y) == policy.removeprefix("mixed_")
    assert_close(ops.cast(y, "float32"), exact(x), tolerance, tolerance)
    kernels = [each.normalized_kernels()["kernel"] for each in (layer, exact)]
    assert_close(*kernels, rtol=1e-6)
    assert {*map(dtype_of, layer.weights)} == {"float32"}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float16", 1e-3), pytest.param("float64", 1e-13, marks=has_float64)],
)
def test_other_dtypes(name, dtype, tolerance):
    """Weights in float16 are normalised in float32, in float64 in float64."""
    each = case(name, dtype=dtype)
    inner = each.layer.layer
    randomize(each.layer)
    inner.kernel.assign(1e3 * numpy(inner.kernel))
    x = data(*each.shape)
    expected = reference_of(each).kernels(each.values(x))["kernel"]
    kernel = each.layer.normalized_kernels()["kernel"]
    assert dtype_of(kernel) == dtype
    assert relative_error(kernel, expected) < tolerance

    y = each.layer(x)
    assert dtype_of(y) == dtype
    inner.kernel.assign(kernel)
    assert relative_error(y, numpy(inner(x))) < 1e-15


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
