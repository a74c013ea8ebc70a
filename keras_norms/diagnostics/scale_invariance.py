"""Which weights a loss does not depend on the scale of."""

from typing import NamedTuple

import keras
import numpy as np

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_model
from keras_norms.diagnostics._engine.arrays import aligned
from keras_norms.diagnostics._engine.layers import learning_rate_of
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics._engine.types import Data, Loss
from keras_norms.diagnostics.geometry import has_kernels
from keras_norms.layers.kernels import kernels_of


class WeightGeometry(NamedTuple):
    """What `weight_geometry` returns, an element for each weight. `print` shows it.

    Attributes:
        weights: Paths, such as `"conv/kernel"`.
        norms: `|W|`.
        gradient_norms: `|g|`.
        cosines: Of the angle between `W` and `g`; `nan` where one is zero.
        unit_cosines: The largest `|cosine|` of one unit and its gradient; `nan` for
            what is not a kernel.
        deviations: `|2 g(2 W) - g| / |g|`, 0 where the loss is scale-invariant; `nan`
            where `g` is zero.
        unit_deviations: The same with a factor for each unit; `nan` for what is not a
            kernel.
        invariance: `"units"` where the scale of each unit alone has no effect,
            `"whole"` where that of all weights together has none, and `"none"`.
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

    def __str__(self):
        header = ("weight", "invariant", "norm", "gradient", "cosine", "of a unit")
        lines = [(*header, "effective rate")]
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
    """Tell which weights the loss does not depend on the scale of, and what follows.

    If `L(a W) = L(W)` for `a > 0`, the gradient `g` is orthogonal to `W` (Lemma 2), a
    step of gradient descent makes `|W|^2` larger by `learning_rate^2 |g|^2` (Lemma 3),
    and `W / |W|` moves as with the rate `learning_rate / |W|^2`.

    Vectors of many elements are nearly orthogonal by chance, so that a small cosine
    proves little. Invariance is decided by `g(a W) = g(W) / a`, which it implies: for
    `a = 2`, and with a factor between 1/2 and 2 for each unit of a kernel (its weights
    of one output channel). An `epsilon` that is not small next to a variance makes both
    deviate, and so do regularizers, which are part of the loss. A weight that is zero
    or has no gradient does not count as invariant.

    Nothing of the model changes. It costs one gradient, and at most two for each
    weight.

    Example:

    >>> print(weight_geometry(model, x[:128], y[:128]))

    Args:
        model, x, y, loss, training: See `Objective`.
        learning_rate: Positive; the optimizer's present one if `None`.
        tolerance: Positive, the largest deviation of an invariant weight.
        seed: Of the factors of units.

    Returns:
        A `WeightGeometry`.

    Reference:

    - Sun et al., AAAI 2020, Lemmas 2 and 3. See `decompose`.
    """
    tolerance = arguments.number("tolerance", tolerance, above=0)
    arguments.integer("seed", seed, at_least=0)
    check_model(model)
    rate = learning_rate_of(model, learning_rate)
    objective = Objective(model, x, y, loss, training=training)
    # The axes that a unit of each kernel sums over.
    fan_in = {
        id(getattr(layer, kernel.name)): kernel.fan_in
        for layer in filter(has_kernels, _keras.layers_of(model))
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
            unit_cosine = _largest(_cosine(w, g, axes))
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


def _largest(cosines):
    finite = np.abs(cosines[np.isfinite(cosines)])
    return finite.max() if finite.size else np.nan
