"""WS, CWN and WN in float64 NumPy, and the linear maps of the layers they wrap.

Written from the formulas. Nothing here is shared with the package.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from keras import layers


@dataclasses.dataclass
class WeightReference:
    """The map from a weight to its replacement, and its gradient.

    `kind` is "ws", "cwn" or "wn". Axes are those of a unit.
    """

    kind: str
    epsilon: float = 1e-5
    scale: float = 1.0

    def forward(self, weight, gain, axes):
        factor, c, root = self._parts(weight, axes)
        return factor * np.expand_dims(gain, axes) * c / root

    def gradients(self, upstream, weight, gain, axes):
        """dweight and dgain of sum(upstream * forward(weight, gain))."""
        factor, c, root = self._parts(weight, axes)
        along = np.sum(c * upstream, axes, keepdims=True)
        dc = upstream / root - c * along / root**3
        if self.kind != "wn":
            dc = dc - dc.mean(axes, keepdims=True)
        dgain = np.squeeze(factor * along / root, axes)
        return factor * np.expand_dims(gain, axes) * dc, dgain

    def _parts(self, w, axes):
        """WS as sqrt(n) * c / sqrt(|c|^2 + n * epsilon): sqrt(n), c and the root."""
        c = w if self.kind == "wn" else w - w.mean(axes, keepdims=True)
        n = np.prod([w.shape[i] for i in axes]) if self.kind == "ws" else 1
        root = np.sqrt(np.sum(c**2, axes, keepdims=True) + n * self.epsilon)
        return np.sqrt(n) if self.kind == "ws" else self.scale, c, root


# Linear maps of layers, channels last


def convolution(x, kernel, strides=1, dilation_rate=1, groups=1, padding="valid"):
    if padding == "same":
        x = _padded(x, kernel.shape, strides, dilation_rate)
    inputs = np.split(x, groups, axis=-1)
    kernels = np.split(kernel, groups, axis=-1)
    outputs = [
        sum(part @ k[at] for at, part in _windows(i, k.shape, strides, dilation_rate))
        for i, k in zip(inputs, kernels)
    ]
    return np.concatenate(outputs, axis=-1)


def depthwise_convolution(x, kernel, depth_multiplier=1, padding="valid"):
    kernel = kernel.reshape(*kernel.shape[:-2], 1, -1)
    return convolution(x, kernel, groups=x.shape[-1], padding=padding)


def separable_convolution(x, depthwise_kernel, pointwise_kernel, depth_multiplier=1):
    return convolution(depthwise_convolution(x, depthwise_kernel), pointwise_kernel)


def transposed_convolution(x, kernel, strides=1):
    sizes = [(n - 1) * strides + k for n, k in zip(x.shape[1:-1], kernel.shape)]
    dtype = np.result_type(x, kernel)
    y = np.zeros((x.shape[0], *sizes, kernel.shape[-2]), dtype)
    for at, part in _windows(y, kernel.shape, strides):
        part += x @ kernel[at].T
    return y


def _windows(x, kernel_shape, strides=1, dilation=1):
    """For each position in the kernel, the elements that meet it."""
    size = kernel_shape[: x.ndim - 2]
    for at in np.ndindex(*size):
        window = tuple(
            slice(i * dilation, n - (k - 1 - i) * dilation, strides)
            for i, k, n in zip(at, size, x.shape[1:])
        )
        yield at, x[(slice(None), *window)]


def _padded(x, kernel_shape, strides, dilation):
    """Pads with zeros, as `padding="same"` does: an odd zero goes last."""
    pads = [(0, 0)]
    for n, k in zip(x.shape[1:-1], kernel_shape):
        total = max((-(-n // strides) - 1) * strides + (k - 1) * dilation + 1 - n, 0)
        pads.append((total // 2, total - total // 2))
    return np.pad(x, [*pads, (0, 0)])


class Linear(NamedTuple):
    """A layer, an input for it, where its units lie, and what it computes.

    `make` takes further arguments of the layer. `fan_in` has the axes of a unit for
    each kernel, `units` the axes of the output that count units.
    """

    make: Callable
    input_shape: tuple
    linear: Callable
    fan_in: dict
    units: tuple = (-1,)

    def output(self, x, weights):
        kernels = (weights[name] for name in self.fan_in)
        return self.linear(x, *kernels) + weights.get("bias", 0)


# By the name of the layer of Keras without its rank.
LINEAR = {
    "Dense": np.matmul,
    "Conv": convolution,
    "ConvTranspose": transposed_convolution,
    "DepthwiseConv": depthwise_convolution,
    "SeparableConv": separable_convolution,
}


def _case(name, shape, fan_in, *arguments, **config):
    """A layer of Keras with one kernel, or two: a tuple of their `fan_in`."""
    linear = partial(LINEAR[re.sub(r"\dD", "", name)], **config)
    make = partial(getattr(layers, name), *arguments, **config)
    if isinstance(fan_in[0], tuple):
        fan_in = {"depthwise_kernel": fan_in[0], "pointwise_kernel": fan_in[1]}
    else:
        fan_in = {"kernel": fan_in}
    return Linear(make, shape, linear, fan_in)


def _einsum(equation, output_shape, bias_axes, shape, fan_in, units=(-1,)):
    make = partial(layers.EinsumDense, equation, output_shape, bias_axes=bias_axes)
    linear = partial(np.einsum, equation)
    return Linear(make, shape, linear, {"kernel": fan_in}, units)


SAME, DOUBLE = {"padding": "same"}, {"depth_multiplier": 2}
IMAGES, EVEN, SERIES = (2, 5, 4, 4), (2, 4, 4, 4), (2, 3, 4)
ONE, TWO, THREE = (0,), (0, 1), (0, 1, 2)
CASES = {
    "dense": _case("Dense", (5, 4), ONE, 3),
    "dense_of_sequences": _case("Dense", SERIES, ONE, 3),
    "einsum_heads": _einsum("abc,cde->abde", (3, 2, 2), "de", SERIES, ONE, (-2, -1)),
    "einsum_of_heads": _einsum("abde,dec->abc", (3, 4), "c", (2, 3, 2, 3), TWO),
    "einsum_swapped": _einsum("abc,ced->abde", (3, 2, 3), "de", SERIES, ONE, (-1, -2)),
    "einsum_kernel_per_step": _einsum(
        "abc,bcd->abd", (3, 2), "bd", (4, 3, 4), (1,), (1, 2)
    ),
    "einsum_ellipsis_left": _einsum("...x,xy->...y", 3, "y", SERIES, ONE),
    "einsum_ellipsis_right": _einsum("ab...,bc->ac...", 3, "c", (2, 4, 5), ONE, (1,)),
    "conv1d": _case("Conv1D", (2, 6, 2), TWO, 3, 3),
    "conv2d": _case("Conv2D", (2, 6, 6, 2), THREE, 3, (3, 2), strides=2),
    "conv2d_same": _case("Conv2D", IMAGES, THREE, 3, 3, strides=2, **SAME),
    "conv2d_dilated": _case("Conv2D", IMAGES, THREE, 3, 2, dilation_rate=2, **SAME),
    "conv2d_in_groups": _case("Conv2D", EVEN, THREE, 4, 2, groups=2),
    "conv3d": _case("Conv3D", (2, 3, 3, 3, 2), (0, 1, 2, 3), 3, (2, 1, 2)),
    "conv1d_transpose": _case("Conv1DTranspose", (2, 4, 2), (0, 2), 3, 3, strides=2),
    "conv2d_transpose": _case("Conv2DTranspose", (2, 3, 3, 2), (0, 1, 3), 3, 2),
    "depthwise_conv1d": _case("DepthwiseConv1D", (2, 6, 3), ONE, 3, **DOUBLE),
    "depthwise_conv2d": _case(
        "DepthwiseConv2D", (2, 4, 4, 3), TWO, 2, **DOUBLE, **SAME
    ),
    "separable_conv1d": _case("SeparableConv1D", (3, 6, 2), (ONE, TWO), 3, 3),
    "separable_conv2d": _case("SeparableConv2D", EVEN, (TWO, THREE), 3, 2, **DOUBLE),
}


class AsLayer(NamedTuple):
    """A function of one tensor in the form of a layer, for `autodiff`."""

    function: Callable
    trainable_variables = non_trainable_variables = ()

    def stateless_call(self, parameters, state, x, training):
        return self.function(x), []
