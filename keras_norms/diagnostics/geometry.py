"""Vectors as points on spheres; linear layers with their batch normalization."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_inputs, check_model
from keras_norms._types import Data, Loss, Tensor
from keras_norms.diagnostics._engine.calls import record
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.reading import (
    affine,
    aligned,
    float64,
    learning_rate_of,
    moments,
    names_of,
)
from keras_norms.layers.frozen import is_frozen, plain_class
from keras_norms.layers.kernels import (
    has_kernels,
    kernels_of,
    overrides_call,
    unit_axes,
)
from keras_norms.ops.weight_norms import Decomposition


def decompose(v: Tensor, axes: int | Sequence[int] = -1) -> Decomposition:
    """Split vectors `v = gamma * N(v) + beta`, with `N(v) = (v - mean(v)) / std(v)`.

    `N(v)` lies on the sphere of radius `sqrt(n)` and is orthogonal to `(1, ..., 1)`.
    Hence `|v|^2 = n * (gamma^2 + beta^2)`. It is computed in float64. For tensors, with
    a gradient, use `keras_norms.ops.weight_norms.decompose`.

    Args:
        v: Array of real numbers, or a tensor.
        axes: The axes of a vector.

    Reference:

    - Sun et al., New Interpretations of Normalization Methods in Deep Learning, AAAI
      2020, Lemma 1 and Eq. 3. https://doi.org/10.1609/aaai.v34i04.6046
    """
    if not arguments.array("v", v).ndim:
        raise arguments.wrong("v", "an array with an axis", v)
    v = float64(v)
    along = _axes(axes, v.ndim)
    # Minus its first element, a constant vector is exactly zero.
    first = v[tuple(slice(0, 1) if i in along else slice(None) for i in range(v.ndim))]
    shifted = v - first
    mean = shifted.mean(along, keepdims=True)
    centred = shifted - mean
    # Divided by the largest: then no square vanishes.
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
    """Compute linear layers and the batch normalization after them as one map each.

    For each `BatchNormalization` that normalises the units of a linear layer whose
    output it reads, with `W` one unit of the kernel:

    ```
    W' = gamma W / sqrt(W Sigma W^T + epsilon)      b' = beta - W' mean
    ```

    where `mean` and `Sigma` are the mean and covariance of what the linear layer reads
    in this batch (for a convolution, patches). Then `BN(W x) = W' x + b'` over the
    batch. What a mask hides from the `BatchNormalization` is left out. `W Sigma W^T` is
    taken as the variance of the output of the linear layer. The model does not change.

    Args:
        model: A built `keras.Model` of any kind.
        x: A batch of inputs.
        training: If `False`, `moving_mean` and `moving_variance` replace the statistics
            of the batch.

    Returns:
        A dict from the name of each such `BatchNormalization`, or its path if several
        have that name, to the `EffectiveWeight` of its last call. For a linear layer in
        `WS`, `CWN`, `WN` or `SpectralNormalization`, `W` is the normalised kernel.

    Raises:
        ValueError: If the model is not built, the batch is empty, or no
            `BatchNormalization` of its units reads the output of a `Dense`, `Conv` or
            `DepthwiseConv` layer that has no activation function.

    Reference:

    - Sun et al., AAAI 2020, Eq. 12. See `decompose`.
    """
    check_model(model)
    check_inputs(model, x)
    arguments.boolean("training", training)
    linear = list(filter(_is_linear, _keras.layers_of(model)))
    norms = _keras.layers_of(model, keras.layers.BatchNormalization)
    norms = [norm for norm in norms if not overrides_call(plain_class(type(norm)))]
    if training:  # Renormalised, a batch has other statistics than its own.
        norms = [n for n in norms if is_frozen(n) or not getattr(n, "renorm", False)]
    names = dict(zip(norms, names_of(norms)))
    made, found = [], {}
    for call in record(model, [*linear, *norms], x, training):
        if call.layer not in names:
            made.append(call)
            continue
        read = next((c for c in made if _reads(call.input, c.output)), None)
        if read and _is_by_unit(call, read.layer):
            found[names[call.layer]] = _effective(call, read, training)
    if not found:
        raise ValueError(
            "Argument `model` must have a BatchNormalization of the units of a Dense, "
            "Conv or DepthwiseConv layer, right after it and without an activation "
            f"function between. Received: model '{model.name}'"
        )
    return found


def _reads(x, output):
    """Whether an input is that output: itself, or cast by Keras to another dtype."""
    if x.dtype == output.dtype or x.shape != output.shape:
        return x is output
    return bool(ops.all(ops.equal(x, ops.cast(output, x.dtype))))


def _is_by_unit(call, layer):
    """Whether a norm that reads a linear layer is on the axis of its units."""
    ndim = len(call.input.shape)
    return unit_axes(layer, ndim) == (call.layer.axis % ndim,)


def _effective(call, read, training):
    """Compute the `EffectiveWeight` of a norm's call, and the layer's that it read."""
    norm, layer, weight = call.layer, read.layer, float64(read.kernel)
    (kernel,) = kernels_of(layer)
    if training and not is_frozen(norm):
        mean, variance = moments(call.input, norm.axis, call.mask)
    else:
        mean, variance = float64(norm.moving_mean), float64(norm.moving_variance)
    gamma, beta = affine(norm, len(mean))
    scale = gamma / np.sqrt(variance + norm.epsilon)
    bias = 0.0 if layer.bias is None else float64(layer.bias)
    units = scale.reshape(kernel.unit_shape(weight.shape))
    weight = weight * np.expand_dims(units, kernel.fan_in)
    return EffectiveWeight(layer.name, weight, beta - scale * (mean - bias))


def _is_linear(layer):
    """Whether the output is a linear map, by one kernel, of the input to each unit."""
    return (
        layer.built
        and has_kernels(layer)
        and not overrides_call(layer)
        and not isinstance(layer, keras.layers.EinsumDense)
        and len(kernels_of(layer)) == 1
        and layer.activation is keras.activations.linear
    )


class WeightGeometry(NamedTuple):
    """What `weight_geometry` returns, an element for each weight. `print` shows it.

    Attributes:
        weights: Paths, such as `"conv/kernel"`.
        norms: `|W|`.
        gradient_norms: `|g|`.
        cosines: Of the angle between `W` and `g`; `nan` where one is zero.
        unit_cosines: The largest `|cosine|` of one unit and its gradient; `nan` if the
            weight is not a kernel.
        deviations: `|2 g(2 W) - g| / |g|`, 0 where the loss is scale-invariant; `nan`
            where `g` is zero.
        unit_deviations: The same with a factor for each unit; `nan` if the weight is
            not a kernel.
        invariance: `"units"` if the scale of each single unit has no effect, `"whole"`
            if only the scale of the whole weight has none, else `"none"`.
        effective_learning_rates: `learning_rate / |W|^2`, the rate for `W / |W|`
            where the loss is scale-invariant.
    """

    weights: tuple[str, ...]
    norms: np.ndarray
    gradient_norms: np.ndarray
    cosines: np.ndarray
    unit_cosines: np.ndarray
    deviations: np.ndarray
    unit_deviations: np.ndarray
    invariance: tuple[str, ...]
    effective_learning_rates: np.ndarray

    def __str__(self) -> str:
        header = ("weight", "invariant", "norm", "gradient", "cosine", "of a unit")
        lines: list[tuple[str, ...]] = [(*header, "effective rate")]
        numbers = (self.norms, self.gradient_norms, self.cosines, self.unit_cosines)
        columns = np.transpose([*numbers, self.effective_learning_rates])
        for weight, invariance, row in zip(self.weights, self.invariance, columns):
            lines.append((weight, invariance, *map("{:.2e}".format, row)))
        return aligned(lines)


def weight_geometry(
    model: keras.Model,
    x: Data,
    y: Data,
    loss: Loss = None,
    *,
    learning_rate: float | None = None,
    tolerance: float = 0.05,
    seed: int = 0,
    training: bool = True,
) -> WeightGeometry:
    """Find the weights whose scale does not change the loss, and what follows from it.

    If `L(a W) = L(W)` for `a > 0`, the gradient `g` is orthogonal to `W` (Lemma 2), a
    step of gradient descent makes `|W|^2` larger by `learning_rate^2 |g|^2` (Lemma 3),
    and `W / |W|` moves as with the rate `learning_rate / |W|^2`.

    Vectors of many elements are nearly orthogonal by chance, and a small cosine proves
    little. Invariance is therefore decided by `g(a W) = g(W) / a`, which it implies:
    for `a = 2`, and with a factor between 1/2 and 2 for each unit of a kernel (its
    weights of one output channel). Both deviate if an `epsilon` is not small next to a
    variance, or with regularizers, which are part of the loss. A weight that is zero or
    has no gradient does not count as invariant.

    The model does not change. It costs one gradient, and at most two for each weight.

    Args:
        model, x, y, loss, training: See `Objective`.
        learning_rate: Positive. `None`: the optimizer's present one.
        tolerance: Positive, the largest deviation of an invariant weight.
        seed: Of the factors of units.

    Reference:

    - Sun et al., AAAI 2020, Lemmas 2 and 3. See `decompose`.
    """
    tolerance = arguments.number("tolerance", tolerance, above=0)
    arguments.integer("seed", seed, at_least=0)
    objective = Objective(model, x, y, loss, training=training)
    rate = learning_rate_of(model, learning_rate)
    # The axes that a unit of each kernel sums over.
    fan_in = {
        id(getattr(layer, kernel.name)): kernel.fan_in
        for layer in filter(has_kernels, _keras.layers_of(model))
        if layer.built
        for kernel in kernels_of(layer)
    }
    rng = np.random.default_rng(seed)
    weights = objective.unflatten(objective.start)
    gradients = objective.unflatten(objective.value_and_grad()[1])
    rows, invariance = [], []
    for place, variable in enumerate(model.trainable_variables):
        w, g = weights[place].astype("float64"), gradients[place].astype("float64")
        axes = fan_in.get(id(variable))
        deviation = _deviation(objective, weights, place, g, 2.0)
        unit_cosine = unit_deviation = np.nan
        if axes is not None:
            cosines = np.ravel(np.abs(_cosine(w, g, axes)))
            unit_cosine = max(cosines[np.isfinite(cosines)], default=np.nan)
            shape = [1 if i in axes else size for i, size in enumerate(w.shape)]
            factors = np.exp2(rng.uniform(-1, 1, shape))
            unit_deviation = _deviation(objective, weights, place, g, factors)
        cosine = _cosine(w, g, tuple(range(w.ndim)))
        lengths = np.linalg.norm(w), np.linalg.norm(g)
        rows.append((*lengths, cosine, unit_cosine, deviation, unit_deviation))
        # A comparison with `nan` is false.
        by_unit, by_whole = unit_deviation <= tolerance, deviation <= tolerance
        invariance.append("units" if by_unit else "whole" if by_whole else "none")
    paths = tuple(variable.path for variable in model.trainable_variables)
    columns = np.array(rows).T
    with np.errstate(divide="ignore"):
        rates = rate / np.square(columns[0])
    return WeightGeometry._make([paths, *columns, tuple(invariance), rates])


def _deviation(objective, weights, place, gradient, factor):
    """Measure how far `factor * g(factor * W)` is from `g(W)`, relative to it."""
    length = np.linalg.norm(gradient)
    if not length > 0:
        return np.nan
    scaled = [*weights]
    scaled[place] = weights[place] * factor
    there = objective.value_and_grad(objective.flatten(scaled))[1]
    there = objective.unflatten(there)[place].astype("float64")
    return np.linalg.norm(factor * there - gradient) / length


def _cosine(a, b, axes):
    lengths = np.sqrt(np.square(a).sum(axes) * np.square(b).sum(axes))
    with np.errstate(divide="ignore", invalid="ignore"):
        return (a * b).sum(axes) / lengths
