"""Accuracy of a classifier under noise and under attack."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_norms._checks import arguments
from keras_norms._checks.models import check_compiled_or_loss, check_inputs
from keras_norms._keras import layers_of
from keras_norms._types import Data, Loss, Tensor
from keras_norms.diagnostics._engine.differentiation import (
    compiler,
    differentiate,
    drawing_from,
    randomness,
)
from keras_norms.diagnostics._engine.model_loss import ModelLoss, as_tensors
from keras_norms.diagnostics._engine.reading import float64


def bim(
    model: keras.Model,
    x: Tensor,
    y: Tensor,
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
    deterministic. Layers run in inference mode: no sample depends on another. The model
    does not change.

    Args:
        model: A built `keras.Model` with one input, and an output of shape `(samples,
            classes)`. Use logits rather than probabilities, with which a loss
            saturates.
        x: Array of floats, `(samples, ...)`.
        y: Labels: integers, `(samples,)` or `(samples, 1)`, or numbers, `(samples,
            classes)`.
        loss: As in `model.compile`. `None`: the compiled one.
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
        ValueError: If an argument is out of its range, if `x` is empty, not of floats
            or not within `bounds`, if labels or outputs have another shape, if labels
            are of other classes, or if the loss has no gradient at any sample of the
            first batch, as with a model that begins with an `Embedding`.

    Reference:

    - Kurakin, Goodfellow and Bengio, Adversarial Examples in the Physical World, 2016,
      Section 2.2. https://arxiv.org/abs/1607.02533
    """
    attack = _Attack(model, x, y, loss, epsilon, norm, steps, step_size, bounds)
    batches = attack.batches(batch_size, verbose)
    return np.concatenate([attack.run(x, y)[0][:size] for x, y, size in batches])


class Robustness(NamedTuple):
    """What `robustness` returns.

    Attributes:
        clean: The accuracy, from 0 to 1.
        noise: The accuracy under Gaussian noise.
        attacked: The accuracy under the attack.
        noise_difference: `clean - noise`, "Acc-Diff1" of the paper.
        attack_difference: `clean - attacked`, "Acc-Diff2".
        without_gradient: The share of samples whose loss is saturated at `x`, with a
            gradient of exactly zero: the attack does not move them.
        samples: How many there are.
    """

    clean: float
    noise: float
    attacked: float
    noise_difference: float
    attack_difference: float
    without_gradient: float
    samples: int


def robustness(
    model: keras.Model,
    x: Tensor,
    y: Tensor,
    loss: Loss = None,
    *,
    noise: float = 0.1,
    epsilon: float = 8 / 255,
    norm: str | int = "inf",
    steps: int = 10,
    step_size: float | None = None,
    bounds: tuple[Data, Data] | None = (0.0, 1.0),
    batch_size: int = 128,
    seed: int = 0,
    verbose: str | int = "auto",
) -> Robustness:
    """Measure a classifier's accuracy: clean, under Gaussian noise and under attack.

    The noisy input is `x + n`, with `n` of mean 0 and standard deviation `noise`,
    clipped to `bounds`. The attack is `bim`, and layers run as they do there.

    Args:
        model, x, y, loss, epsilon, norm, steps, step_size, bounds, batch_size, verbose:
            See `bim`.
        noise: Non-negative, in units of `x`.
        seed: Of the noise.

    Reference:

    - Sun et al., AAAI 2020, Section 3.2, Tables 1 and 2. See `decompose`.
    """
    noise = arguments.number("noise", noise, at_least=0)
    rng = np.random.default_rng(arguments.integer("seed", seed, at_least=0))
    attack = _Attack(model, x, y, loss, epsilon, norm, steps, step_size, bounds)
    hits, still = np.zeros(3), 0
    for x, y, size in attack.batches(batch_size, verbose):
        disturbance = np.zeros(x.shape)
        # The noise of a sample must not depend on the size of batches.
        disturbance[:size] = rng.standard_normal(x[:size].shape)
        noisy = attack.clip(x + noise * disturbance)
        attacked, without_gradient = attack.run(x, y)
        hits += [attack.hits(z, y, size) for z in (x, noisy, attacked)]
        still += int(np.sum(without_gradient[:size]))
    n = attack.samples
    clean, noisy, attacked = (hits / n).tolist()
    differences = clean - noisy, clean - attacked
    return Robustness(clean, noisy, attacked, *differences, still / n, n)


# Scales of the loss. At small ones the gradients of confident samples vanish, at large
# ones those of others overflow: each sample uses the largest with finite gradients.
_SCALES_OF_FLOAT16 = (2.0**-12, 1.0, 2.0**12, 2.0**24, 2.0**36)


class _Attack:
    """The attack on a model, and the accuracy of what it makes."""

    def __init__(self, model, x, y, loss, epsilon, norm, steps, step_size, bounds):
        check_compiled_or_loss(model, loss)
        self._x = x = arguments.array("x", x)
        if not np.issubdtype(x.dtype, np.floating):
            raise ValueError(
                "Argument `x` must hold floats: integers have no gradient. "
                f"Received: x of dtype {x.dtype} and shape {x.shape}"
            )
        check_inputs(model, x)
        self._y = _targets(x, y)
        self.samples = len(x)
        self._epsilon = arguments.number("epsilon", epsilon, at_least=0)
        self._norm = arguments.choice("norm", norm, ("inf", 2))
        self._steps = arguments.integer("steps", steps, at_least=1)
        self._step_size = self._epsilon / self._steps
        if step_size is not None:
            self._step_size = arguments.number("step_size", step_size, above=0)
        self._bounds = _bounds(bounds, x)
        self._model = model
        self._pure = ModelLoss(model, loss, training=False)
        self._values = self._pure.values()
        self._randomness = randomness()
        self._has_gradient = False  # at any sample so far
        is_narrow = any(v.compute_dtype == "float16" for v in layers_of(model))
        self._scales = _SCALES_OF_FLOAT16 if is_narrow else (1.0,)
        compiled = compiler(model)
        self._slope = compiled(self._slope_of)
        self._outputs = compiled(self._pure.outputs)

    def batches(self, batch_size, verbose):
        """Yield batches of one size, to compile once, and how many samples are new."""
        size = arguments.integer("batch_size", batch_size, at_least=1)
        size = min(size, self.samples)
        arguments.choice("verbose", verbose, ("auto", 0, 1, 2))
        verbose = 1 if verbose == "auto" else verbose
        starts = range(0, self.samples, size)
        progress = keras.utils.Progbar(len(starts), verbose=verbose, unit_name="batch")
        for done, first in enumerate(starts, 1):
            places = np.arange(first, first + size) % self.samples
            yield self._x[places], self._y[places], min(size, self.samples - first)
            progress.update(done)

    def run(self, x, y):
        """Return the attacked inputs, and which samples had no gradient."""
        self._predict(x, y)  # This checks both.
        z = x
        slope, without_gradient = self._direction(z, y)
        self._has_gradient |= not np.all(without_gradient)
        if not self._has_gradient:
            raise ValueError(
                "Argument `model` must have a loss with a gradient with respect to its "
                "inputs. No sample of this batch has one: the model reads integers, as "
                "an Embedding does, or its loss is saturated (use logits). "
                f"Received: model '{self._model.name}'"
            )
        for step in range(self._steps if self._epsilon else 0):
            if step:
                slope, _ = self._direction(z, y)
            moved = z + self._step_size * slope - x
            if self._norm == "inf":
                moved = np.clip(moved, -self._epsilon, self._epsilon)
            else:
                moved *= self._epsilon / np.maximum(_length(moved), self._epsilon)
            z = self.clip(x + moved)
        return z, without_gradient

    def clip(self, z):
        """Clip `z` to the bounds, in the dtype of inputs."""
        return np.clip(z, *self._bounds).astype(self._x.dtype)

    def hits(self, z, y, size):
        """Count how many of the first `size` samples are classified correctly."""
        outputs = self._predict(z, y)
        labels = np.argmax(y, 1) if y.size > len(y) else np.ravel(y)
        right = (np.argmax(outputs, 1) == labels) & np.all(np.isfinite(outputs), 1)
        return np.count_nonzero(right[:size])

    def _predict(self, z, y):
        """Compute the outputs, float64, and check that `y` has labels of them."""
        x, _ = as_tensors(self._model, z, None)
        with drawing_from(self._randomness):
            outputs = float64(self._outputs(*self._values, x))
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise ValueError(
                "Argument `model` must have an output of shape (samples, classes), "
                f"with two classes or more. Received: outputs of shape {outputs.shape}"
            )
        classes = outputs.shape[1]
        if y.size > len(y):
            fits = y.shape == outputs.shape
        else:
            fits = y.min() >= 0 and y.max() < classes
        if not fits:
            raise ValueError(
                f"Argument `y` must have labels of {classes} classes. Received: y of "
                f"shape {y.shape}, from {y.min()} to {y.max()}"
            )
        return outputs

    def _direction(self, z, y):
        """Find the direction of each sample's step, float64, and which have none."""
        x, y = as_tensors(self._model, z, y)
        self._pure.build(x, y)
        with drawing_from(self._randomness):
            slope = float64(self._slope(*self._values, x, y))
        axes = tuple(range(1, slope.ndim))
        without = np.all(slope == 0, axes)
        slope = np.where(np.isfinite(slope), slope, 0)
        if self._norm == "inf":
            return np.sign(slope), without
        # By the largest first: squares of small numbers vanish.
        largest = np.abs(slope).max(axes, keepdims=True)
        slope = slope / np.where(largest > 0, largest, 1)
        return slope / np.maximum(_length(slope), 1), without

    def _slope_of(self, weights, state, x, y):
        """The gradient at each sample, times a positive number of its own."""

        def scaled(scale):
            def loss(values):
                mean = self._pure(weights, state, values[0], y)
                # The sum over samples: that of one is not smaller in larger batches.
                return mean * ops.cast(ops.shape(x)[0], mean.dtype) * scale

            return differentiate(loss, [x])[1][0]

        slope, axes = scaled(self._scales[0]), tuple(range(1, len(x.shape)))
        for scale in self._scales[1:]:
            larger = scaled(scale)
            usable = ops.all(ops.isfinite(larger), axes, keepdims=True)
            slope = ops.where(usable, larger, slope)
        return slope


def _length(v):
    return np.sqrt(np.square(v).sum(tuple(range(1, v.ndim)), keepdims=True))


def _targets(x, y):
    y = arguments.array("y", y)
    is_one_each = y.shape[:1] == x.shape[:1]
    are_labels = y.size == len(x) and np.issubdtype(y.dtype, np.integer)
    if not is_one_each or not (are_labels or y.ndim == 2 and y.shape[1] > 1):
        raise ValueError(
            "Argument `y` must hold a label for each sample: integers of shape "
            "(samples,), or numbers of shape (samples, classes). "
            f"Received: y of dtype {y.dtype} and shape {y.shape} for {len(x)} samples"
        )
    return y


def _bounds(bounds, x):
    if bounds is None:
        return -np.inf, np.inf
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise arguments.wrong("bounds", "a pair (low, high)", bounds)
    low, high = (arguments.array("bounds", b).astype(x.dtype) for b in bounds)
    try:
        fits = np.broadcast_shapes(low.shape, high.shape, x.shape[1:]) == x.shape[1:]
    except ValueError:
        fits = False
    if not fits or not np.all((low < high) & (low <= x) & (x <= high)):
        raise ValueError(
            "Argument `bounds` must be the range of `x`, a pair (low, high) of numbers "
            "or arrays that broadcast to a sample. "
            f"Received: bounds={bounds} for x from {x.min()} to {x.max()}"
        )
    return low, high
