"""The basic iterative method: inputs that a classifier is wrong about."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_norms._checks import arguments
from keras_norms._checks.models import check_compiled_or_loss, check_inputs
from keras_norms.diagnostics._engine.differentiation import (
    compiler,
    differentiate,
    drawing_from,
    randomness,
)
from keras_norms.diagnostics._engine.model_loss import ModelLoss, as_tensors
from keras_norms.diagnostics._engine.types import Data, Loss

_NORM_ORDERS = ("inf", 2)


def bim(
    model: keras.Model,
    x: np.ndarray,
    y: np.ndarray,
    loss: Loss = None,
    *,
    epsilon: float = 8 / 255,
    norm: str | int = "inf",
    steps: int = 10,
    step_size: float | None = None,
    bounds: tuple[Data, Data] | None = (0.0, 1.0),
    batch_size: int = 128,
    verbose: str | int = "auto",
) -> np.ndarray:
    """Attack with the basic iterative method: find inputs near `x` whose loss is large.

    ```
    x_0     = x
    x_{t+1} = clip(project(x_t + step_size * d_t))
    d_t     = sign(g)          for norm "inf"
            = g / |g|_2        for norm 2
    ```

    with `g` the gradient of a sample's loss at `x_t`, `project` to the ball of radius
    `epsilon` around `x`, and `clip` to `bounds`. It is white-box, untargeted and
    deterministic. Layers run in inference mode, so that no sample depends on another.
    Nothing of the model changes.

    Args:
        model: A built `keras.Model` with one input, and an output of shape `(samples,
            classes)`: rather logits than probabilities, with which a loss saturates.
        x: Array of floats, `(samples, ...)`.
        y: Labels: integers, `(samples,)` or `(samples, 1)`, or numbers, `(samples,
            classes)`.
        loss: What `model.compile` takes as `loss`, or `None`: the compiled one.
        epsilon: Non-negative, the radius of the ball in units of `x`.
        norm: `"inf"` or 2.
        steps: Positive.
        step_size: Positive; `epsilon / steps` if `None`.
        bounds: `(low, high)`, the range of `x`: numbers, or arrays that broadcast to a
            sample. `None` if there is none.
        batch_size: Positive. The result does not depend on it.
        verbose: 0 for no output, `"auto"` or 1 for a progress bar, 2 for a line.

    Returns:
        Array of the shape and dtype of `x`, up to rounding within the ball.

    Raises:
        ValueError: If an argument is out of its range, if `x` is empty, is not of
            floats or not within `bounds`, if labels or outputs have another shape, or
            if the loss has no gradient at any sample of the first batch, as with a
            model that begins with an `Embedding`.

    Reference:

    - Kurakin, Goodfellow and Bengio, Adversarial Examples in the Physical World, 2016,
      Section 2.2. https://arxiv.org/abs/1607.02533
    """
    attack = Attack(model, x, y, loss, epsilon, norm, steps, step_size, bounds)
    batches = attack.batches(batch_size, verbose)
    return np.concatenate([attack.run(batch)[0][: batch.size] for batch in batches])


class Samples(NamedTuple):
    """A batch of the size of all others."""

    x: np.ndarray
    y: np.ndarray
    size: int  # of the samples, which others may follow


class Attack:
    """The attack on a model, and the accuracy of what it makes."""

    def __init__(self, model, x, y, loss, epsilon, norm, steps, step_size, bounds):
        check_compiled_or_loss(model, loss)
        self._x = _inputs(model, x)
        self._y = _targets(self._x, y)
        self.samples = len(self._x)
        self._epsilon = arguments.number("epsilon", epsilon, at_least=0)
        self._norm = arguments.choice("norm", norm, _NORM_ORDERS)
        self._steps = arguments.integer("steps", steps, at_least=1)
        self._step_size = self._epsilon / self._steps
        if step_size is not None:
            self._step_size = arguments.number("step_size", step_size, above=0)
        self._bounds = _bounds(bounds, self._x)
        self._model = model
        self._pure = ModelLoss(model, loss, training=False)
        self._values = self._pure.values()
        self._randomness = randomness()
        self._has_gradient = False  # at any sample so far
        compiled = compiler(model)
        self._slope = compiled(self._slope_of)
        self._outputs = compiled(self._pure.outputs)

    def batches(self, batch_size, verbose):
        """Yield all samples in batches of one size, so that one compilation does."""
        batch_size = arguments.integer("batch_size", batch_size, at_least=1)
        size = min(batch_size, self.samples)
        arguments.choice("verbose", verbose, ("auto", 0, 1, 2))
        verbose = 1 if verbose == "auto" else verbose
        starts = range(0, self.samples, size)
        progress = keras.utils.Progbar(len(starts), verbose=verbose, unit_name="batch")
        for done, first in enumerate(starts, 1):
            places = np.arange(first, first + size) % self.samples
            left = min(size, self.samples - first)
            yield Samples(self._x[places], self._y[places], left)
            progress.update(done)

    def run(self, batch):
        """Return the attacked inputs, and which samples had no gradient."""
        z = batch.x
        slope, without_gradient = self._direction(z, batch.y)
        self._has_gradient |= not np.all(without_gradient)
        if not self._has_gradient:
            raise ValueError(
                "Argument `model` must have a loss with a gradient with respect to its "
                "inputs, which no sample of this batch has: the model reads them as "
                "integers, as an Embedding does, or its loss is saturated, which is "
                f"less so with logits. Received: model '{self._model.name}'"
            )
        for step in range(self._steps if self._epsilon else 0):
            if step:
                slope, _ = self._direction(z, batch.y)
            moved = self._project(z + self._step_size * slope - batch.x)
            z = self.clip(batch.x + moved)
        return z, without_gradient

    def clip(self, z):
        """Clip `z` to the bounds, in the dtype of inputs."""
        return np.clip(z, *self._bounds).astype(self._x.dtype)

    def hits(self, batch, z):
        """Count the samples that are classified as they should be."""
        x, _ = as_tensors(self._model, z, None)
        with drawing_from(self._randomness):
            outputs = self._outputs(*self._values, x)
        outputs = np.asarray(ops.convert_to_numpy(outputs)).astype("float64")
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise ValueError(
                "Argument `model` must have an output of shape (samples, classes), of "
                f"at least two classes. Received: outputs of shape {outputs.shape}"
            )
        right = np.argmax(outputs, 1) == _labels(batch.y, outputs.shape[1])
        right &= np.all(np.isfinite(outputs), 1)
        return np.count_nonzero(right[: batch.size])

    def _direction(self, z, y):
        """Find the direction of each sample's step, float64, and which have none."""
        x, y = as_tensors(self._model, z, y)
        self._pure.build(x, y)
        with drawing_from(self._randomness):
            slope = self._slope(*self._values, x, y)
        slope = np.asarray(ops.convert_to_numpy(slope)).astype("float64")
        axes = tuple(range(1, slope.ndim))
        without = np.ravel(np.all(slope == 0, axes))
        slope = np.where(np.isfinite(slope), slope, 0)
        largest = np.abs(slope).max(axes, keepdims=True)
        if self._norm == "inf":
            return np.sign(slope), without
        # By the largest first: squares of small numbers vanish.
        slope = slope / np.where(largest > 0, largest, 1)
        return slope / np.maximum(_length(slope), 1), without

    def _project(self, moved):
        if self._norm == "inf":
            return np.clip(moved, -self._epsilon, self._epsilon)
        length = _length(moved)
        return moved * (self._epsilon / np.maximum(length, self._epsilon))

    def _slope_of(self, weights, state, x, y):
        def loss(values):
            mean = self._pure(weights, state, values[0], y)
            # The sum over samples: that of one is not smaller in larger batches.
            return mean * ops.cast(ops.shape(x)[0], mean.dtype)

        return differentiate(loss, [x])[1][0]


def _length(v):
    return np.sqrt(np.square(v).sum(tuple(range(1, v.ndim)), keepdims=True))


def _labels(y, classes):
    if y.ndim == 2 and y.shape[1] == classes:
        return np.argmax(y, 1)
    if y.size == len(y):
        return y.reshape(-1)
    raise ValueError(
        f"Argument `y` must have labels of {classes} classes. "
        f"Received: y of shape {y.shape}"
    )


def _inputs(model, x):
    if isinstance(x, (dict, list, tuple)):
        raise ValueError(
            "Argument `x` must be one array, for a model with one input. "
            f"Received: x of class {type(x).__name__}"
        )
    x = arguments.array("x", x)
    if not np.issubdtype(x.dtype, np.floating):
        raise ValueError(
            "Argument `x` must be of floats, for integers have no gradient. "
            f"Received: x of dtype {x.dtype}"
        )
    check_inputs(model, x)
    return x


def _targets(x, y):
    y = arguments.array("y", y)
    if not y.ndim or len(y) != len(x):
        raise ValueError(
            "Argument `y` must hold a label for each sample. "
            f"Received: y of shape {y.shape} for x of shape {x.shape}"
        )
    are_integers = y.size == len(y) and np.issubdtype(y.dtype, np.integer)
    if not are_integers and not (y.ndim == 2 and y.shape[1] > 1):
        raise ValueError(
            "Argument `y` must be integers of shape (samples,), or of shape (samples, "
            f"classes). Received: y of dtype {y.dtype} and shape {y.shape}"
        )
    return y


def _bounds(bounds, x):
    if bounds is None:
        return -np.inf, np.inf
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ValueError(
            "Argument `bounds` must be a pair (low, high). "
            f"Received: bounds={arguments.shown(bounds)}"
        )
    low, high = (arguments.array("bounds", b).astype(x.dtype) for b in bounds)
    try:
        fits = np.broadcast_shapes(low.shape, high.shape, x.shape[1:]) == x.shape[1:]
    except ValueError:
        fits = False
    if not fits or not np.all((low < high) & (low <= x) & (x <= high)):
        raise ValueError(
            "Argument `bounds` must be the range of `x`, low and high, numbers or "
            "arrays that broadcast to a sample. "
            f"Received: bounds={bounds} for x from {x.min()} to {x.max()}"
        )
    return low, high
