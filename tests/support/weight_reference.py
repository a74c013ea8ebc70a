"""WS, CWN and WN in float64 NumPy, and the linear maps of the layers they wrap.

Written from the formulas, unit by unit. Nothing here is shared with the package.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from keras import layers


@dataclasses.dataclass
class WeightReference:
    """The map from a weight to what takes its place, and its gradient.

    `kind` is "ws", "cwn" or "wn". Axes are those of a unit.
    """

    kind: str
    epsilon: float = 1e-5
    scale: float = 1.0

    def forward(self, weight, gain, axes):
        def one(w, g):
            return self._factor(w) * g * self._shifted(w) / self._root(w)

        return _per_unit(one, axes, weight, gain)

    def gradients(self, upstream, weight, gain, axes):
        """dweight and dgain of sum(upstream * forward(weight, gain))."""

        def dweight(w, u, g):
            c, r = self._shifted(w), self._root(w)
            dc = u / r - c * np.dot(c, u) / r**3
            if self.kind != "wn":
                dc = dc - dc.mean()
            return self._factor(w) * g * dc

        def dgain(w, u):
            return self._factor(w) * np.dot(u, self._shifted(w)) / self._root(w)

        return (
            _per_unit(dweight, axes, weight, upstream, gain),
            _per_unit(dgain, axes, weight, upstream),
        )

    def _shifted(self, w):
        return w if self.kind == "wn" else w - w.mean()

    def _root(self, w):
        """WS as sqrt(n) * c / sqrt(|c|^2 + n * epsilon)."""
        n = w.size if self.kind == "ws" else 1
        return np.sqrt(np.sum(self._shifted(w) ** 2) + n * self.epsilon)

    def _factor(self, w):
        return np.sqrt(w.size) if self.kind == "ws" else self.scale


def _per_unit(function, axes, *arrays):
    """Apply `function` to the vectors of each unit, one unit at a time.

    The first array, and those of its shape, have the vectors along `axes`. Others have
    one number for each unit. The result is of the first kind or of the second.
    """
    full = np.asarray(arrays[0], "float64")
    units = [i for i in range(full.ndim) if i not in axes]
    order = [*units, *axes]
    outer = [full.shape[i] for i in units]
    inner = [full.shape[i] for i in axes]
    rows = [
        np.transpose(a, order).reshape(-1, np.prod(inner, dtype=int))
        if np.shape(a) == full.shape
        else np.reshape(a, -1)
        for a in arrays
    ]
    results = np.array([function(*row) for row in zip(*rows)])
    if results.ndim == 1:
        return results.reshape(outer)
    return np.transpose(results.reshape(outer + inner), np.argsort(order))


# Linear maps of layers, channels last, without padding


def convolution(x, kernel, stride=1, groups=1):
    inputs = np.split(x, groups, axis=-1)
    kernels = np.split(kernel, groups, axis=-1)
    outputs = [
        sum(part @ k[at] for at, part in _windows(i, k.shape, stride))
        for i, k in zip(inputs, kernels)
    ]
    return np.concatenate(outputs, axis=-1)


def depthwise_convolution(x, kernel, stride=1):
    y = sum(
        part[..., None] * kernel[at] for at, part in _windows(x, kernel.shape, stride)
    )
    return y.reshape(*y.shape[:-2], -1)


def transposed_convolution(x, kernel, stride=1):
    sizes = [(n - 1) * stride + k for n, k in zip(x.shape[1:-1], kernel.shape)]
    y = np.zeros((x.shape[0], *sizes, kernel.shape[-2]))
    for at, part in _windows(y, kernel.shape, stride):
        part += x @ kernel[at].T
    return y


def _windows(x, kernel_shape, stride):
    """For each position in the kernel, the elements that it meets."""
    size = kernel_shape[: x.ndim - 2]
    for at in np.ndindex(*size):
        window = tuple(
            slice(i, n - k + i + 1, stride) for i, k, n in zip(at, size, x.shape[1:])
        )
        yield at, x[(slice(None), *window)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, an input for it, where its units lie, and what it computes.

    `make` takes further arguments of the layer. `fan_in` has the axes of a unit for
    each kernel, `units` the axes of the output that count units.
    """

    make: Callable
    input_shape: tuple
    linear: Callable
    fan_in: dict
    units: tuple = (-1,)

    def output(self, x, kernels, bias):
        return self.linear(x, *kernels.values()) + bias


def _einsum(equation, output_shape, bias_axes, input_shape, fan_in, units):
    return Case(
        lambda **kwargs: layers.EinsumDense(
            equation, output_shape, bias_axes=bias_axes, **kwargs
        ),
        input_shape,
        lambda x, w: np.einsum(equation, x, w),
        {"kernel": fan_in},
        units,
    )


CASES = {
    "dense": Case(
        lambda **kwargs: layers.Dense(3, **kwargs),
        (5, 4),
        lambda x, w: x @ w,
        {"kernel": (0,)},
    ),
    "dense_of_sequences": Case(
        lambda **kwargs: layers.Dense(3, **kwargs),
        (2, 3, 4),
        lambda x, w: x @ w,
        {"kernel": (0,)},
    ),
    "einsum_heads": _einsum(
        "abc,cde->abde", (3, 2, 2), "de", (2, 3, 4), (0,), (-2, -1)
    ),
    "einsum_of_heads": _einsum(
        "abde,dec->abc", (3, 4), "c", (2, 3, 2, 3), (0, 1), (-1,)
    ),
    "einsum_swapped": _einsum(
        "abc,ced->abde", (3, 2, 3), "de", (2, 3, 4), (0,), (-1, -2)
    ),
    "einsum_kernel_per_step": _einsum(
        "abc,bcd->abd", (3, 2), "bd", (4, 3, 4), (1,), (1, 2)
    ),
    "einsum_ellipsis_left": _einsum("...x,xy->...y", 3, "y", (2, 3, 4), (0,), (-1,)),
    "einsum_ellipsis_right": _einsum("ab...,bc->ac...", 3, "c", (2, 4, 5), (0,), (1,)),
    "conv1d": Case(
        lambda **kwargs: layers.Conv1D(3, 3, **kwargs),
        (2, 6, 2),
        convolution,
        {"kernel": (0, 1)},
    ),
    "conv2d": Case(
        lambda **kwargs: layers.Conv2D(3, (3, 2), strides=2, **kwargs),
        (2, 6, 6, 2),
        lambda x, w: convolution(x, w, stride=2),
        {"kernel": (0, 1, 2)},
    ),
    "conv2d_in_groups": Case(
        lambda **kwargs: layers.Conv2D(4, 2, groups=2, **kwargs),
        (2, 4, 4, 4),
        lambda x, w: convolution(x, w, groups=2),
        {"kernel": (0, 1, 2)},
    ),
    "conv3d": Case(
        lambda **kwargs: layers.Conv3D(3, (2, 1, 2), **kwargs),
        (2, 3, 3, 3, 2),
        convolution,
        {"kernel": (0, 1, 2, 3)},
    ),
    "conv1d_transpose": Case(
        lambda **kwargs: layers.Conv1DTranspose(3, 3, strides=2, **kwargs),
        (2, 4, 2),
        lambda x, w: transposed_convolution(x, w, stride=2),
        {"kernel": (0, 2)},
    ),
    "conv2d_transpose": Case(
        lambda **kwargs: layers.Conv2DTranspose(3, 2, **kwargs),
        (2, 3, 3, 2),
        transposed_convolution,
        {"kernel": (0, 1, 3)},
    ),
    "conv3d_transpose": Case(
        lambda **kwargs: layers.Conv3DTranspose(3, (2, 1, 2), **kwargs),
        (2, 2, 2, 2, 2),
        transposed_convolution,
        {"kernel": (0, 1, 2, 4)},
    ),
    "depthwise_conv1d": Case(
        lambda **kwargs: layers.DepthwiseConv1D(3, depth_multiplier=2, **kwargs),
        (2, 6, 3),
        depthwise_convolution,
        {"kernel": (0,)},
    ),
    "depthwise_conv2d": Case(
        lambda **kwargs: layers.DepthwiseConv2D(2, depth_multiplier=2, **kwargs),
        (2, 4, 4, 3),
        depthwise_convolution,
        {"kernel": (0, 1)},
    ),
    "separable_conv1d": Case(
        lambda **kwargs: layers.SeparableConv1D(3, 3, **kwargs),
        (3, 6, 2),
        lambda x, d, p: convolution(depthwise_convolution(x, d), p),
        {"depthwise_kernel": (0,), "pointwise_kernel": (0, 1)},
    ),
    "separable_conv2d": Case(
        lambda **kwargs: layers.SeparableConv2D(3, 2, depth_multiplier=2, **kwargs),
        (2, 4, 4, 2),
        lambda x, d, p: convolution(depthwise_convolution(x, d), p),
        {"depthwise_kernel": (0, 1), "pointwise_kernel": (0, 1, 2)},
    ),
}


@dataclasses.dataclass
class LayerReference:
    """A wrapped layer as a function of its weights, which are a dict by name."""

    case: Case
    norm: WeightReference
    x: np.ndarray

    def kernels(self, weights):
        return {
            name: self.norm.forward(weights[name], _gain(weights, name, axes), axes)
            for name, axes in self.case.fan_in.items()
        }

    def forward(self, weights):
        return self.case.output(self.x, self.kernels(weights), weights["bias"])

    def gradients(self, upstream, weights):
        """Gradients of sum(upstream * forward), also a dict."""
        kernels = self.kernels(weights)
        gradients = {"bias": _sum_to(upstream, weights["bias"].shape)}
        for name, axes in self.case.fan_in.items():

            def linear(kernel, name=name):
                return self.case.output(self.x, {**kernels, name: kernel}, 0.0)

            dkernel = _adjoint(linear, kernels[name].shape, upstream)
            gain = _gain(weights, name, axes)
            gradients[name], dgain = self.norm.gradients(
                dkernel, weights[name], gain, axes
            )
            if gain_name(name) in weights:
                gradients[gain_name(name)] = dgain
        return gradients


def gain_name(kernel_name):
    return kernel_name.replace("kernel", "gain")


def _gain(weights, name, axes):
    shape = [n for i, n in enumerate(weights[name].shape) if i not in axes]
    return weights.get(gain_name(name), np.ones(shape))


def _adjoint(linear, shape, upstream):
    """The gradient of sum(upstream * linear(w)) for a linear function of w."""
    basis = np.eye(np.prod(shape, dtype=int))
    products = [np.sum(upstream * linear(e.reshape(shape))) for e in basis]
    return np.reshape(products, shape)


def _sum_to(array, shape):
    """Sum over the axes along which an array of `shape` is broadcast."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    repeated = tuple(i for i, n in enumerate(shape) if n == 1)
    return array.sum(repeated, keepdims=True)


class AsLayer:
    """A function of one tensor in the place of a layer, for `autodiff`."""

    trainable_variables = ()
    non_trainable_variables = ()

    def __init__(self, function):
        self.function = function

    def stateless_call(self, parameters, state, x, training):
        return self.function(x), []
