"""Vectors as points on spheres, and the linear maps that batch normalization makes."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_inputs, check_model
from keras_norms._types import Tensor
from keras_norms.diagnostics._engine.arrays import affine, float64, moments
from keras_norms.diagnostics._engine.layers import names_of
from keras_norms.diagnostics._engine.model_loss import record
from keras_norms.diagnostics._engine.types import Data
from keras_norms.layers.kernel_normalization import KernelNormalization
from keras_norms.layers.kernels import check_layer, kernels_of, overrides_call


class Decomposition(NamedTuple):
    """What `decompose` returns, float64.

    Attributes:
        gamma: Array of the shape of `v` without `axes`, the standard deviation.
        beta: Array of that shape, the mean.
        direction: Array of the shape of `v`, `N(v)`; zero where a vector is constant.
    """

    gamma: np.ndarray
    beta: np.ndarray
    direction: np.ndarray


def decompose(v: Tensor, axes: int | Sequence[int] = -1) -> Decomposition:
    """Split vectors `v = gamma * N(v) + beta`, with `N(v) = (v - mean(v)) / std(v)`.

    `N(v)` lies on the sphere of radius `sqrt(n)` and is orthogonal to `(1, ..., 1)`, so
    that `|v|^2 = n * (gamma^2 + beta^2)`. It is computed in float64; for tensors, with
    a gradient, there is `keras_norms.ops.weight_norms.decompose`.

    Args:
        v: Array of real numbers, or a tensor.
        axes: The axes of a vector.

    Returns:
        A `Decomposition`.

    Reference:

    - Sun et al., New Interpretations of Normalization Methods in Deep Learning, AAAI
      2020, Lemma 1 and Eq. 3. https://doi.org/10.1609/aaai.v34i04.6046
    """
    if not arguments.array("v", v).ndim:
        raise arguments.wrong("v", "an array with an axis", v)
    v = float64(v)
    along = _axes(axes, v.ndim)
    # Less its first element, a constant vector is exactly zero.
    first = v[tuple(slice(0, 1) if i in along else slice(None) for i in range(v.ndim))]
    shifted = v - first
    mean = shifted.mean(along, keepdims=True)
    centred = shifted - mean
    # Divided by the largest, so that no square vanishes.
    size = np.abs(centred).max(along, keepdims=True)
    centred = centred / np.where(size > 0, size, 1)
    deviation = centred.std(along, keepdims=True)
    return Decomposition(
        gamma=np.squeeze(size * deviation, along),
        beta=np.squeeze(first + mean, along),
        direction=centred / np.where(deviation > 0, deviation, 1),
    )


def _axes(axes, ndim):
    """Check axes and count them from the first on."""
    several = axes if isinstance(axes, (list, tuple)) else [axes]
    found = {
        arguments.integer("axes", axis, at_least=-ndim, at_most=ndim - 1) % ndim
        for axis in several
    }
    if not found or len(found) < len(several):
        raise arguments.wrong("axes", "one axis or more, each once", axes)
    return tuple(sorted(found))


class EffectiveWeight(NamedTuple):
    """A linear layer and the batch normalization after it, as one linear layer.

    Attributes:
        layer: The name of the linear layer.
        kernel: Of the shape of its kernel, `W'`, float64.
        bias: Of shape `(units,)`, `b'`, float64.
    """

    layer: str
    kernel: np.ndarray
    bias: np.ndarray


def effective_weights(
    model: keras.Model, x: Data, *, training: bool = True
) -> dict[str, EffectiveWeight]:
    """Compute the maps that linear layers and batch normalization after them make.

    For each `BatchNormalization` that reads the output of a linear layer, `W` a unit of
    its kernel:

    ```
    W' = gamma W / sqrt(W Sigma W^T + epsilon)      b' = beta - W' mean
    ```

    with `mean` and `Sigma` the mean and covariance of what the linear layer reads in
    this batch, patches for a convolution, so that `BN(W x) = W' x + b'` over the batch.
    `W Sigma W^T` is the variance of the output of the linear layer, and is taken from
    there. Nothing of the model changes.

    Args:
        model: A built `keras.Model` of any kind.
        x: A batch of inputs.
        training: If `False`, `moving_mean` and `moving_variance` take the
            place of the statistics of the batch.

    Returns:
        A dict from the name of each such `BatchNormalization`, or its path where
        several have that name, to an `EffectiveWeight`. For a linear layer in `WS`,
        `CWN` or `WN`, `W` is the normalised kernel.

    Raises:
        ValueError: If the model is not built, the batch is empty, or no
            `BatchNormalization` reads the output of a `Dense`, `Conv` or
            `DepthwiseConv` layer that has no activation function.

    Reference:

    - Sun et al., AAAI 2020, Eq. 12. See `decompose`.
    """
    check_model(model)
    check_inputs(model, x)
    arguments.boolean("training", training)
    linear = list(filter(_is_linear, _keras.layers_of(model)))
    wrappers = {
        each.layer: each for each in _keras.layers_of(model, KernelNormalization)
    }
    norms = _keras.layers_of(model, keras.layers.BatchNormalization)
    norms = [norm for norm in norms if not overrides_call(norm)]
    names = dict(zip(norms, names_of(norms)))
    makers, found = {}, {}
    for call in record(model, [*linear, *norms], x, training):
        if call.layer not in names:
            makers[id(call.output)] = call
        elif id(call.input) in makers:
            layer = makers[id(call.input)].layer
            wrapper = wrappers.get(layer)
            found[names[call.layer]] = _effective(call, layer, wrapper, training)
    if not found:
        raise ValueError(
            "Argument `model` must have a BatchNormalization that reads the output of "
            "a Dense, Conv or DepthwiseConv layer without activation function. "
            f"Received: model '{model.name}'"
        )
    return found


def _effective(call, layer, wrapper, training):
    """Compute the `EffectiveWeight` of a layer and of the call of the norm after it."""
    norm, (kernel,) = call.layer, kernels_of(layer)
    weight = getattr(layer, kernel.name)
    if wrapper is not None:
        weight = wrapper.normalized_kernels()[kernel.name]
    weight = float64(weight)
    if training and norm.trainable:
        mean, variance = moments(call.input, norm.axis)
    else:
        mean, variance = float64(norm.moving_mean), float64(norm.moving_variance)
    gamma, beta = affine(norm, len(mean))
    scale = gamma / np.sqrt(variance + norm.epsilon)
    bias = 0.0 if layer.bias is None else float64(layer.bias)
    units = np.expand_dims(
        scale.reshape(kernel.unit_shape(weight.shape)), kernel.fan_in
    )
    return EffectiveWeight(layer.name, weight * units, beta - scale * (mean - bias))


def has_kernels(layer):
    """Whether a layer is built and has kernels whose units are known."""
    try:
        check_layer(layer)
    except ValueError:
        return False
    return layer.built


def _is_linear(layer):
    """Whether the output is a linear map, by one kernel, of the input to each unit."""
    return (
        has_kernels(layer)
        and not overrides_call(layer)
        and not isinstance(layer, keras.layers.EinsumDense)
        and len(kernels_of(layer)) == 1
        and layer.activation is keras.activations.linear
    )
