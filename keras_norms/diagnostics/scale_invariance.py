"""Which weights a loss does not depend on the scale of."""

from typing import NamedTuple

import numpy as np

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_model
from keras_norms.diagnostics.geometry import has_kernels
from keras_norms.diagnostics.gradients import Objective
from keras_norms.diagnostics.landscape import learning_rate_of
from keras_norms.layers.kernels import kernels_of


class WeightGeometry(NamedTuple):
    """What `weight_geometry` returns, an element for each weight. `print` shows it.

    Attributes:
        weights: Tuple of paths, such as `"conv/kernel"`.
        norms: Array, `|W|`.
        gradient_norms: Array, `|g|`.
        cosines: Array, of the angle between `W` and `g`; `nan` where one is zero.
        unit_cosines: Array, the largest `|cosine|` of one unit and its gradient; `nan`
            for what is not a kernel.
        deviations: Array, `|2 g(2 W) - g| / |g|`, 0 where the loss is scale-invariant;
            `nan` where `g` is zero.
        unit_deviations: Array, the same with a factor for each unit; `nan` for what is
            not a kernel.
        invariance: Tuple of `"units"` where the scale of each unit alone has no effect,
            `"whole"` where that of all weights together has none, and `"none"`.
        effective_learning_rates: Array, `learning_rate / |W|^2`, the rate for `W / |W|`
            where the loss is scale-invariant.
    """

    weights: tuple
    norms: np.ndarray
    gradient_norms: np.ndarray
    cosines: np.ndarray
    unit_cosines: np.ndarray
    deviations: np.ndarray
    unit_deviations: np.ndarray
    invariance: tuple
    effective_learning_rates: np.ndarray

    def __str__(self):
        header = ("weight", "invariant", "norm", "gradient", "cosine", "of a unit")
        lines = [(*header, "effective rate")]
        for row in zip(
            self.weights,
            self.invariance,
            self.norms,
            self.gradient_norms,
            self.cosines,
            self.unit_cosines,
            self.effective_learning_rates,
        ):
            lines.append((*row[:2], *(f"{number:.2e}" for number in row[2:])))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join(
                cell.ljust(w) if i < 2 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(line, widths))
            )
            for line in lines
        )


def weight_geometry(
    model,
    x,
    y,
    loss=None,
    *,
    learning_rate=None,
    tolerance=0.05,
    seed=0,
    training=True,
):
    """Which weights the loss does not depend on the scale of, and what follows.

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
        learning_rate: Positive float; the optimizer's present one if `None`.
        tolerance: Positive float, the largest deviation of an invariant weight.
        seed: Integer, of the factors of units.

    Returns:
        A `WeightGeometry`.

    Raises:
        ValueError: If an argument is out of its range, or `learning_rate` is `None` and
            the model has no optimizer. See also `Objective`.

    Reference:

    - Sun et al., AAAI 2020, Lemmas 2 and 3. See `decompose`.
    """
    tolerance = arguments.number("tolerance", tolerance, above=0)
    arguments.integer("seed", seed, at_least=0)
    check_model(model)
    rate = learning_rate_of(model, learning_rate)
    objective = Objective(model, x, y, loss, training=training)
    fan_in = _fan_in(model)
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
        rows.append(
            (
                np.linalg.norm(w),
                np.linalg.norm(g),
                _cosine(w, g, tuple(range(w.ndim))),
                unit_cosine,
                deviation,
                unit_deviation,
            )
        )
        # A comparison with `nan` is false.
        by_unit, by_whole = unit_deviation <= tolerance, deviation <= tolerance
        invariance.append("units" if by_unit else "whole" if by_whole else "none")
    columns = np.array(rows, "float64").T
    with np.errstate(divide="ignore"):
        rates = rate / np.square(columns[0])
    paths = tuple(variable.path for variable in model.trainable_variables)
    return WeightGeometry(paths, *columns, tuple(invariance), rates)


def _deviation(objective, weights, place, gradient, factor):
    """How far `factor * g(factor * W)` is from `g(W)`, relative to it."""
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


def _fan_in(model):
    """Identity of each kernel -> the axes that one of its units sums over."""
    axes = {}
    for layer in _keras.layers_of(model, include_self=False):
        if has_kernels(layer):
            for kernel in kernels_of(layer):
                axes[id(getattr(layer, kernel.name))] = kernel.fan_in
    return axes
