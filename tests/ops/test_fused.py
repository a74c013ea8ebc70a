"""A linear map of scale * x + shift against the same map of that tensor."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms.ops.linear_of_affine import linear_of_affine
from tests.support.backend import BACKEND
from tests.support.cbn_reference import relative_error

# Shape of x and of the kernel, padding, and the other arguments.
CASES = {
    "dense": ((5, 4), (4, 3), None, {}),
    "dense of rank 4": ((5, 2, 3, 4), (4, 3), None, {}),
    "valid": ((5, 7, 6, 4), (3, 2, 4, 3), "valid", {"border": (3, 2)}),
    "same": ((5, 7, 6, 4), (3, 3, 4, 3), "same", {"border": (7, 6)}),
    "groups": ((5, 7, 6), (3, 2, 6), "same", {"border": (7,), "groups": 3}),
    "3D": ((2, 3, 4, 5, 2), (2, 2, 2, 2, 3), "same", {"border": (3, 4, 5)}),
}
FIRST = {"channels_first": True}
if BACKEND != "tensorflow":  # That layout is a GPU's.
    CASES |= {
        "first": ((5, 4, 7, 6), (3, 3, 4, 3), "same", {"border": (7, 6), **FIRST}),
        "first, 1D": ((5, 4, 7), (3, 4, 3), "valid", {"border": (3,), **FIRST}),
    }


def operands(name, dtype="float32"):
    """x, scale, shift, kernel, bias, `linear` and the arguments."""
    shape, kernel_shape, padding, arguments = CASES[name]
    rng = np.random.default_rng(0)
    layout = "channels_first" if "channels_first" in arguments else "channels_last"
    channels = shape[1 if "channels_first" in arguments else -1]
    sizes = (shape, channels, channels, kernel_shape, kernel_shape[-1])
    arrays = [rng.normal(0.3, 1, size).astype("float32") for size in sizes]
    x, *vectors = map(ops.convert_to_tensor, arrays)
    conv = functools.partial(ops.conv, padding=padding, data_format=layout)
    linear = conv if padding else ops.matmul
    return ops.cast(x, dtype), *vectors, linear, arguments


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_as_of_the_affine_tensor(name, with_bias):
    x, scale, shift, kernel, bias, linear, arguments = operands(name)
    trailing = len(x.shape) - 2 if arguments.get("channels_first") else 0
    by_channel = [ops.reshape(v, (-1, *[1] * trailing)) for v in (scale, shift, bias)]
    expected = linear(by_channel[0] * x + by_channel[1], kernel)
    if with_bias:
        expected = expected + by_channel[2]
    actual = linear_of_affine(
        x, scale, shift, kernel, bias if with_bias else None, linear, **arguments
    )
    assert tuple(actual.shape) == tuple(expected.shape)
    assert relative_error(actual, ops.convert_to_numpy(expected)) < 1e-5


@pytest.mark.parametrize("name", ["dense", "groups", "same"])
def test_half_precision(name):
    """The two parts are added up in float32."""
    x, scale, shift, kernel, bias, linear, arguments = operands(name, "bfloat16")
    shift = 100 * shift
    half = linear_of_affine(x, scale, shift, kernel, bias, linear, **arguments)
    assert keras.backend.standardize_dtype(half.dtype) == "bfloat16"
    full = linear_of_affine(
        ops.cast(x, "float32"), scale, shift, kernel, bias, linear, **arguments
    )
    full = ops.convert_to_numpy(full)
    # The sum is rounded, and the products with x, which are of the order of 20.
    error = np.abs(ops.convert_to_numpy(ops.cast(half, "float32")) - full)
    assert np.all(error < 2**-8 * np.abs(full) + 0.2)
