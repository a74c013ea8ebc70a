"""The normalising maps and their hand-written gradients.

`x` is an activation tensor, a statistic is a vector over its channel axis. Statistics
and affine weights are float32 or wider, the output has the dtype of `x`.
"""

import functools
from typing import Any, NamedTuple

from keras import ops

from keras_norms.ops.custom_gradient import custom_gradient, fused
from keras_norms.ops.moments import (
    moments,
    number_of_replicas,
    sum_over_replicas,
    with_gradient,
)
from keras_norms.ops.passes import (
    affine,
    gradient_sums,
    gradient_x,
    masked_gradient_sums,
    masked_gradient_x,
)

# The debiasing weight must grow also at learning rate 0, or the averages never start.
_SMALLEST_STEP = 1e-6
# Bound on mu_A / mu_B as a weight of the gradient (`mean_gradient="ratio"`).
_LARGEST_RATIO = 10.0


class CBNState(NamedTuple):
    """The statistics that CBN keeps between two steps.

    `mean` and `square` are the moving mean and the moving mean square of the shifted
    activation (mu_A and sigma_A^2, shape `(channels,)`). They are debiased: `weight`, a
    scalar that starts at 0 and tends to 1, is the weight that all batches so far have
    in a plain exponential average.
    """

    mean: Any
    square: Any
    weight: Any


class CBNMap(NamedTuple):
    """One batch's map, `gamma * inverse * (x - center) + offset`, and its statistics.

    `mean` and `square` are those of the batch, `square` with epsilon is what the root
    is taken of for the gradient, `mean_weight` is the weight of the mean's gradient,
    `count` how many elements were seen.
    """

    center: Any
    inverse: Any
    offset: Any
    mean: Any
    square: Any
    mean_weight: Any
    count: Any


def cbn_inference(x, gamma, beta, state, *, rho, epsilon, axis, decouple=True):
    """Complete batch normalization with stored statistics: affine in `x`.

    See `cbn_training` for the arguments; `state.weight` is not used.
    """
    center, inverse, offset = _stored_map(beta, state, rho, epsilon, decouple)
    return affine(x, center, gamma * inverse, offset, axis=axis)


def cbn_training(x, gamma, beta, state, *, mask=None, **settings):
    """Complete batch normalization of one training batch (Peng et al., Eqs. 4-9).

    Args:
        x: Tensor of rank 2 or more.
        gamma, beta: `(channels,)`, in the dtype to compute in.
        state: `CBNState` before this batch.
        mask: Boolean, broadcasts to `x`; `False` elements are kept out of statistics.
        **settings: See `cbn_map`.

    Returns:
        The output and the `CBNState` after this batch, which carries no gradient. A
        channel whose mean or mean square is not finite keeps its averages.
    """
    if mask is not None or settings["synchronized"]:
        return _cbn_training(x, gamma, beta, state, mask=mask, **settings)
    tensors = [settings.pop(name) for name in ("rho", "learning_rate")]
    return _cbn_training_alone(x, gamma, beta, state, *tensors, **settings)


def _cbn_training(x, gamma, beta, state, *, mask=None, **settings):
    values, state = cbn_map(x, beta, state, mask=mask, **settings)
    names = ("epsilon", "axis", "decouple", "synchronized")
    static = {name: settings[name] for name in names}
    return _normalize(x, gamma, beta, *values, mask, **static), state


@fused(xla="small")
def _cbn_training_alone(x, gamma, beta, state, rho, learning_rate, **static):
    return _cbn_training(
        x, gamma, beta, state, rho=rho, learning_rate=learning_rate, **static
    )


def cbn_scale_and_shift(x, gamma, beta, state, **settings):
    """The map of one training batch as vectors: `cbn_training` is scale * x + shift.

    See `cbn_training` for the arguments. The gradient with respect to `x` passes
    through the statistics alone.

    Returns:
        Scale and shift, each `(channels,)`, and the `CBNState` after this batch.
    """
    values, state = cbn_map(x, beta, state, differentiable=True, **settings)
    scale = gamma * values.inverse
    return scale, values.offset - scale * values.center, state


def cbn_stored_scale_and_shift(gamma, beta, state, *, rho, epsilon, decouple):
    """The map of `cbn_inference` as vectors: it is scale * x + shift."""
    center, inverse, offset = _stored_map(beta, state, rho, epsilon, decouple)
    scale = gamma * inverse
    return scale, offset - scale * center


def _stored_map(beta, state, rho, epsilon, decouple):
    center = state.mean - beta if decouple else state.mean
    offset = ops.zeros_like(beta) if decouple else beta
    return center, 1 / (rho * ops.sqrt(state.square + epsilon)), offset


def cbn_map(
    x,
    beta,
    state,
    *,
    rho,
    epsilon,
    learning_rate,
    omega,
    momentum,
    axis,
    decouple=True,
    mean_gradient="shift",
    mask=None,
    synchronized=False,
    differentiable=False,
):
    """The statistics of one training batch, and the map that they make.

    Args:
        x, beta, state, mask: See `cbn_training`.
        rho: Scalar, the magnitude of the normalisation.
        epsilon: Added to the mean square, inside the root.
        learning_rate: Scalar that this step uses. The batch enters the moving averages
            with weight `omega * learning_rate`, at most 1. Negative means unknown: the
            batch is normalised with its own statistics, and the moving averages follow
            `momentum`.
        omega, momentum: See `learning_rate`.
        axis: The channel axis.
        decouple: Whether `beta` is added before the norm is taken (Eq. 5), or after it
            and the variance taken, as in batch normalization.
        mean_gradient: `"shift"` or `"ratio"`, how the gradient passes the moving mean.
        synchronized: Whether statistics are those of all TensorFlow replicas.
        differentiable: Whether the gradient of the map itself is wanted in few passes.

    Returns:
        `CBNMap`, and the `CBNState` after this batch, which carries no gradient.
    """
    batch = moments(x, beta.dtype, axis, mask, synchronized, state.mean)
    if differentiable and mask is None:
        batch = with_gradient(x, batch, axis, synchronized)
    return _map_of_moments(
        batch,
        beta,
        state,
        rho,
        learning_rate,
        epsilon=epsilon,
        omega=omega,
        momentum=momentum,
        decouple=decouple,
        mean_gradient=mean_gradient,
    )


@fused(xla=True)
def _map_of_moments(
    batch,
    beta,
    state,
    rho,
    learning_rate,
    *,
    epsilon,
    omega,
    momentum,
    decouple,
    mean_gradient,
):
    """`cbn_map` from the `Moments` on: arithmetic of vectors over the channels."""
    seen = batch.count > 0
    known = learning_rate >= 0
    step = ops.where(
        known,
        ops.clip(omega * learning_rate, _SMALLEST_STEP, 1.0),
        ops.full_like(learning_rate, 1 - momentum),
    )
    weight, kept = _average_weights(state.weight, step, seen)
    # Normalised with: the moving averages, or the batch where the rate is unknown.
    kept_here = ops.where(known, kept, ops.cast(ops.logical_not(seen), kept.dtype))

    # What mu_B exceeds the mean in use by, a constant for the gradient: x - mu_A+ then
    # differs from x - mu_B by a constant. "ratio" makes it proportional to mu_B
    # instead.
    excess = ops.stop_gradient(batch.mean - state.mean)
    ahead = kept_here * excess
    mean_weight = ops.ones_like(ahead)
    if mean_gradient == "ratio":
        mean_weight = ops.stop_gradient(_mean_ratio(batch.mean - ahead, batch.mean))
        ahead = ahead + (1 - mean_weight) * (batch.mean - ops.stop_gradient(batch.mean))
    mean = batch.mean - ahead

    # The mean of x' = x - mean + beta is ahead + beta.
    square = batch.variance
    center, offset = mean, beta
    if decouple:
        square = square + ops.square(ahead + beta)
        center, offset = mean - beta, ops.zeros_like(beta)
        # Where nothing was seen, the old averages normalise, which beta does not move.
        square = ops.where(seen, square, ops.stop_gradient(square))
    # sqrt(sq_A+ + eps) = r * sqrt(sq_B + eps) with r a constant for the gradient.
    root = ops.sqrt(square + epsilon)
    used = square + kept_here * (state.square - square)
    ratio = ops.stop_gradient(ops.sqrt(used + epsilon) / root)
    inverse = 1 / (rho * ratio * root)

    # A channel that was not seen, or has statistics that are not finite, keeps its own.
    usable = ops.logical_and(ops.isfinite(batch.mean), ops.isfinite(square))
    usable = ops.logical_and(usable, seen)
    averages = batch.mean - kept * excess, square + kept * (state.square - square)
    state = CBNState(
        *(ops.where(usable, new, old) for new, old in zip(averages, state)),
        ops.where(ops.any(usable), weight, state.weight),
    )
    values = CBNMap(
        center, inverse, offset, batch.mean, square, mean_weight, batch.count
    )
    return values, CBNState(*(ops.stop_gradient(value) for value in state))


def batch_normalization(
    x, gamma, beta, batch, *, epsilon, axis, mask=None, synchronized=False
):
    """gamma * (x - mean) / sqrt(variance + epsilon) + beta.

    Args:
        x: Tensor of rank 2 or more.
        gamma, beta: `(channels,)`, in the dtype to compute in.
        batch: The `Moments` of `x`, with the same `mask` and `synchronized`: the
            gradient passes through them.
        epsilon, axis, mask, synchronized: See `cbn_training`.

    Returns:
        The output.
    """
    return _normalize(
        x,
        gamma,
        beta,
        batch.mean,
        1 / ops.sqrt(batch.variance + epsilon),
        beta,
        batch.mean,
        batch.variance,
        ops.ones_like(batch.mean),
        batch.count,
        mask,
        epsilon=epsilon,
        axis=axis,
        decouple=False,
        synchronized=synchronized,
    )


def batch_normalization_inference(x, gamma, beta, mean, variance, *, epsilon, axis):
    """Batch normalization with stored statistics: affine in `x`."""
    return affine(x, mean, gamma / ops.sqrt(variance + epsilon), beta, axis=axis)


def _average_weights(weight, step, seen):
    """One step of a debiased exponential average.

    A plain average that starts at 0 would hold its values with total weight `weight`.
    Dividing by it, the first batch counts alone, whatever `step` is.

    Returns:
        The total weight after this batch, and the share of the new average that the old
        one has: 1 where nothing was seen.
    """
    total = weight + step * (1 - weight)
    kept = ops.where(seen, (1 - step) * weight / total, ops.ones_like(total))
    seen_any = ops.any(seen) if len(seen.shape) else seen
    return ops.where(seen_any, total, weight), kept


def _mean_ratio(moving, batch):
    """mu_A / mu_B, bounded, and 1 where mu_B is 0."""
    nonzero = ops.where(batch == 0, ops.ones_like(batch), batch)
    ratio = ops.clip(moving / nonzero, -_LARGEST_RATIO, _LARGEST_RATIO)
    return ops.where(batch == 0, ops.ones_like(batch), ratio)


def _normalize(x, gamma, beta, *statistics_and_mask, **static):
    """The forward map, with `_normalize_gradient` as its gradient."""
    *statistics, mask = statistics_and_mask

    def forward(x, gamma, beta, center, inverse, offset, *for_gradient):
        return affine(x, center, gamma * inverse, offset, axis=static["axis"])

    normalize = custom_gradient(
        forward, functools.partial(_normalize_gradient, **static)
    )
    masks = () if mask is None else (mask,)
    return normalize(x, gamma, beta, *statistics, *masks)


def _normalize_gradient(
    upstream,
    x,
    gamma,
    beta,
    center,
    inverse,
    offset,
    mean,
    square,
    mean_weight,
    count,
    mask=None,
    *,
    epsilon,
    axis,
    decouple,
    synchronized,
):
    """Gradients with respect to x, gamma and beta, through all statistics.

    With c = `center`, a = gamma * inverse, g = `upstream`, m = `count` and
    k = sum(g * (x - c)) / m / (square + epsilon), the derivative that arrives at
    x' = x - c is a * (g - k * x'). From there it goes on to x, and through the batch
    mean.
    """
    if mask is None:
        local = gradient_sums(upstream, x, center, axis=axis)
    else:
        local = masked_gradient_sums(upstream, x, center, mask, axis=axis)
    total = sum_over_replicas(local) if synchronized else local
    vectors, dgamma, dbeta = _gradient_vectors(
        local,
        total,
        gamma,
        center,
        inverse,
        mean,
        square,
        mean_weight,
        count,
        epsilon=epsilon,
        decouple=decouple,
        replicas=number_of_replicas() if synchronized else 1,
    )
    if mask is None:
        dx = gradient_x(upstream, x, *vectors, axis=axis)
    else:
        dx = masked_gradient_x(upstream, x, *vectors, mask, axis=axis)
    statistics = (center, inverse, offset, mean, square, mean_weight, count)
    return dx, dgamma, dbeta, *[None] * (len(statistics) + (mask is not None))


@fused(xla=True)
def _gradient_vectors(
    local,
    total,
    gamma,
    center,
    inverse,
    mean,
    square,
    mean_weight,
    count,
    *,
    epsilon,
    decouple,
    replicas,
):
    """What `gradient_x` needs, and the gradients of gamma and beta.

    `local` and `total` are sum(g) and sum(g * (x - c)) of one and of all replicas.
    """
    scale = gamma * inverse
    sum_g, sum_gx = total[0], total[1]
    seen = count > 0
    count = ops.maximum(count, ops.ones_like(count))
    k = sum_gx / count / (square + epsilon)
    k = ops.where(seen, k, ops.zeros_like(k))
    through_mean = sum_g / count
    if decouple:
        # The batch mean of x' is not 0, so the derivative of its norm has a mean.
        mean_of_norm = k * (mean - center)
        through_mean = through_mean - mean_of_norm
        pivot = center
        # Each replica takes an equal part of the sum; the optimizer adds them up.
        dbeta = scale * (local[0] - mean_of_norm * (count / replicas))
    else:
        pivot = mean
        dbeta = local[0]
    vectors = scale, k, pivot, mean_weight * through_mean
    return vectors, local[1] * inverse, dbeta
