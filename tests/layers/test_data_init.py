"""WN.data_init: outputs before the activation start with mean 0 and variance 1."""

import numpy as np
import pytest
from keras import layers

from keras_norms import WN
from tests.support.backend import BACKEND, has_channels_first, numpy, some
from tests.support.weight_reference import CASES
from tests.support.wrapped import Doubled, Noisy, assert_close, data, randomize


def assert_normalised(y, units):
    others = tuple(i for i in range(y.ndim) if i not in [u % y.ndim for u in units])
    mean, deviation = y.mean(others), y.std(others)
    assert_close(mean, np.zeros(mean.shape), atol=1e-5)
    assert_close(deviation, np.ones(mean.shape), atol=1e-5)


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
    for weight, value in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)


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
