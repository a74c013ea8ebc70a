"""The normalising maps and their hand-written gradients.

`x` is an activation tensor, a statistic is a vector over its channel axis. Statistics
and affine weights are float32 or wider, the output has the dtype of `x`.
"""

from typing import NamedTuple

from keras_norms._types import Tensor
from keras_norms.ops.custom_gradient import (
    custom_gradient,
    is_differentiated,
    is_eager_torch,
    without_gradient,
)
from keras_norms.ops.functions import ops
from keras_norms.ops.moments import Moments, after_batch, moments
from keras_norms.ops.passes import affine, gradient_sums, gradient_x
from keras_norms.ops.replicas import number_of_replicas, sum_over_replicas
from keras_norms.ops.shapes import Axis
from keras_norms.ops.single_pass import single_pass

# The debiasing weight must grow at learning rate 0 too, or the averages never start.
SMALLEST_STEP = 1e-6
# Bound on mu_A / mu_B as a weight of the gradient (`mean_gradient="ratio"`).
_LARGEST_RATIO = 10.0


class CBNSettings(NamedTuple):
    """The static part of CBN's map, the key of compiled functions.

    They are the arguments of `keras_norms.CBN`; `axis` is a tuple with groups, see
    `shapes`.
    """

    epsilon: float
    axis: Axis
    omega: float = 10.0
    momentum: float = 0.99
    decouple: bool = True
    mean_gradient: str = "shift"
    synchronized: bool = False


class CBNState(NamedTuple):
    """The statistics that CBN keeps between two steps.

    `mean` and `square` are the moving mean and the moving mean square of the shifted
    activation (mu_A and sigma_A^2, shape `(channels,)`). They are debiased: the scalar
    `weight`, from 0 towards 1, is the weight of all batches so far in a plain
    exponential average.
    """

    mean: Tensor
    square: Tensor
    weight: Tensor


class BatchMap(NamedTuple):
    """One batch's map, `gamma * inverse * (x - center) + offset`, and its statistics.

    All are vectors over the channels, with groups one for each group; `count` may be a
    scalar.

    Attributes:
        center, inverse, offset: The map. `offset` is 0 where `beta` is decoupled.
        mean: The mean of the batch.
        square: The variance or mean square of the batch. The gradient is that of the
            root of its sum with epsilon.
        mean_weight: Weight of the gradient through the batch mean.
        count: How many elements were seen.
    """

    center: Tensor
    inverse: Tensor
    offset: Tensor
    mean: Tensor
    square: Tensor
    mean_weight: Tensor
    count: Tensor


def cbn_inference(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    state: CBNState,
    rho: Tensor,
    settings: CBNSettings,
) -> Tensor:
    """Complete batch normalization with stored statistics: affine in `x`.

    See `cbn_training` for the arguments; `state.weight` is not used.
    """
    center, inverse, offset = _stored_map(beta, state, rho, settings)
    offset = () if settings.decouple else (offset,)
    return affine(x, center, gamma * inverse, *offset, axis=settings.axis)


def cbn_training(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    state: CBNState,
    rho: Tensor,
    learning_rate: Tensor,
    settings: CBNSettings,
    mask: Tensor | None = None,
) -> tuple[Tensor, CBNState]:
    """Complete batch normalization of one training batch (Peng et al., Eqs. 4-9).

    Args:
        x: Tensor of rank 2 or more.
        gamma, beta: `(channels,)`, in the dtype to compute in; with groups `(groups,
            channels)`.
        state: `CBNState` before this batch.
        rho: Scalar, the magnitude of the normalisation.
        learning_rate: Scalar that this step uses. Negative means unknown: the batch is
            normalised with its own statistics, and the moving averages follow
            `settings.momentum`.
        settings: `CBNSettings`.
        mask: Boolean, broadcasts to `x`; `False` elements are kept out of statistics.

    Returns:
        The output and the `CBNState` after this batch, which carries no gradient. A
        channel whose mean or mean square is not finite keeps its averages.
    """
    given = state, rho, learning_rate, settings, mask
    batch_map, state, remake = _map_of_batch(x, beta, *given)
    return _normalize(x, gamma, beta, batch_map, mask, settings, remake), state


def _map_of_batch(x, beta, state, rho, learning_rate, settings, mask):
    """`BatchMap` and state after a batch, and a function that computes the map again.

    Gradients treat the map as a constant, and PyTorch records nothing of it: there a
    second derivative computes it again. Elsewhere the function is `None`.
    """

    def make(x, beta):
        dtype, synchronized = beta.dtype, settings.synchronized
        batch = moments(x, dtype, settings.axis, mask, synchronized, state.mean)
        return map_of_moments(batch, beta, state, rho, learning_rate, settings=settings)

    if not is_eager_torch():
        return *make(x, beta), None
    with without_gradient():
        return *make(x, beta), lambda x, beta: make(x, beta)[0]


def _map_and_mask(x, beta, kept, remake):
    """`BatchMap` and a tuple with the mask, if any, from what a gradient kept."""
    fields = len(BatchMap._fields)
    if remake is not None and is_differentiated():
        return remake(x, beta), kept[fields:]
    return BatchMap(*kept[:fields]), kept[fields:]


def cbn_scale_and_shift(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    state: CBNState,
    rho: Tensor,
    learning_rate: Tensor,
    settings: CBNSettings,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, CBNState]:
    """The map of one training batch as vectors: `cbn_training` is scale * x + shift.

    See `cbn_training` for the arguments. The gradient with respect to `x` passes
    through the statistics alone.

    Returns:
        Scale and shift, each of the shape of `gamma`, and the `CBNState` after this
        batch.
    """
    given = state, rho, learning_rate, settings, mask
    batch_map, state, remake = _map_of_batch(x, beta, *given)

    def forward(x, gamma, beta, center, inverse, offset, *for_gradient):
        scale = gamma * inverse
        return scale, offset - scale * center

    def gradient(upstreams, x, gamma, beta, *rest):
        batch_map, mask = _map_and_mask(x, beta, rest, remake)
        of_scale, of_shift = (
            ops.zeros_like(gamma) if each is None else each for each in upstreams
        )
        of_mean, of_square, dgamma, dbeta = _gradient_of_vectors(
            of_scale, of_shift, gamma, batch_map, settings=settings
        )
        if settings.synchronized:
            both = sum_over_replicas(ops.stack([of_mean, of_square]))
            of_mean, of_square = both[0], both[1]
        count = ops.maximum(batch_map.count, 1)
        vectors = batch_map.mean, 2 * of_square / count, of_mean / count
        dx = affine(x, *vectors, *mask, axis=settings.axis)
        return dx, dgamma, dbeta, *[None] * len(rest)

    masks = () if mask is None else (mask,)
    vectors = custom_gradient(forward, gradient)(x, gamma, beta, *batch_map, *masks)
    return *vectors, state


@single_pass()
def _gradient_of_vectors(of_scale, of_shift, gamma, batch_map, *, settings):
    """The gradients of the batch mean, of `square`, and of gamma and beta."""
    scale = gamma * batch_map.inverse
    of_scale = of_scale - of_shift * batch_map.center
    of_mean = -of_shift * scale
    of_square = -0.5 * of_scale * scale / (batch_map.square + settings.epsilon)
    if _is_masked(batch_map):
        seen = batch_map.count > 0
        of_square = ops.where(seen, of_square, ops.zeros_like(of_square))
    dbeta, of_difference = of_shift, 0.0
    if settings.decouple:
        # square = variance + difference^2, and center = mean - difference
        difference = batch_map.mean - batch_map.center
        of_difference = 2 * of_square * difference
        dbeta = of_difference - of_mean
    if settings.mean_gradient == "ratio":
        weight = batch_map.mean_weight
        of_mean = weight * of_mean + (1 - weight) * of_difference
    return of_mean, of_square, of_scale * batch_map.inverse, dbeta


def cbn_stored_scale_and_shift(
    gamma: Tensor, beta: Tensor, state: CBNState, rho: Tensor, settings: CBNSettings
) -> tuple[Tensor, Tensor]:
    """The map of `cbn_inference` as vectors: it is scale * x + shift."""
    center, inverse, offset = _stored_map(beta, state, rho, settings)
    scale = gamma * inverse
    return scale, offset - scale * center


def _stored_map(beta, state, rho, settings):
    center = state.mean - beta if settings.decouple else state.mean
    offset = ops.zeros_like(beta) if settings.decouple else beta
    return center, 1 / (rho * ops.sqrt(state.square + settings.epsilon)), offset


@single_pass()
def map_of_moments(
    batch: Moments,
    beta: Tensor,
    state: CBNState,
    rho: Tensor,
    learning_rate: Tensor,
    *,
    settings: CBNSettings,
) -> tuple[BatchMap, CBNState]:
    """Compute the map from the `Moments` of a batch: arithmetic of vectors.

    Returns:
        `BatchMap`, and the `CBNState` after this batch, which carries no gradient.
    """
    seen = batch.count > 0
    known = learning_rate >= 0
    step = ops.where(
        known,
        ops.clip(settings.omega * learning_rate, SMALLEST_STEP, 1.0),
        ops.full_like(learning_rate, 1 - settings.momentum),
    )
    # Debiased: plain averages that start at 0 would hold their values with `weight`.
    # Divided by it, the first batch counts alone, whatever `step` is.
    weight = state.weight + step * (1 - state.weight)
    kept = ops.where(seen, (1 - step) * state.weight / weight, ops.ones_like(weight))
    # It normalises with the moving averages, or with the batch if the rate is unknown.
    kept_here = ops.where(known, kept, ops.cast(ops.logical_not(seen), kept.dtype))

    # `ahead` is how much mu_B exceeds the mean in use: for the gradient a constant, and
    # with "ratio" such that the mean in use is proportional to mu_B.
    excess = ops.stop_gradient(batch.mean - state.mean)
    ahead = kept_here * excess
    mean_weight = ops.ones_like(ahead)
    if settings.mean_gradient == "ratio":
        # mu_A / mu_B, bounded, and 1 where mu_B is 0.
        is_zero = batch.mean == 0
        ratio = (batch.mean - ahead) / ops.where(is_zero, mean_weight, batch.mean)
        ratio = ops.clip(ratio, -_LARGEST_RATIO, _LARGEST_RATIO)
        mean_weight = ops.stop_gradient(ops.where(is_zero, mean_weight, ratio))
        ahead = ahead + (1 - mean_weight) * (batch.mean - ops.stop_gradient(batch.mean))
    mean = batch.mean - ahead

    # The mean of x' = x - mean + beta is ahead + beta.
    square = batch.variance
    center, offset = mean, beta
    if settings.decouple:
        square = square + ops.square(ahead + beta)
        center, offset = mean - beta, ops.zeros_like(beta)
        if _is_masked(batch):
            # Where nothing was seen, old averages normalise, and beta has no effect.
            square = ops.where(seen, square, ops.stop_gradient(square))
    # sq_A+ + eps = r * (sq_B + eps) with r a constant for the gradient.
    behind = state.square - square
    of_batch = square + settings.epsilon
    used = square + kept_here * behind + settings.epsilon
    ratio = ops.stop_gradient(used / of_batch)
    inverse = 1 / (rho * ops.sqrt(ratio * of_batch))

    # A channel that was not seen, or has statistics that are not finite, keeps its own.
    usable = ops.logical_and(ops.isfinite(batch.mean + square), seen)
    averages = batch.mean - kept * excess, square + kept * behind
    averages, usable = after_batch(usable, averages, (state.mean, state.square))
    state = CBNState(*averages, ops.where(ops.any(usable), weight, state.weight))
    batch_map = BatchMap(
        center, inverse, offset, batch.mean, square, mean_weight, batch.count
    )
    return batch_map, CBNState(*(ops.stop_gradient(value) for value in state))


def _is_masked(batch):
    """Whether a mask may hide whole channels."""
    return len(batch.count.shape) > 0


def batch_normalization(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    batch: Moments,
    *,
    epsilon: float,
    axis: Axis,
    mask: Tensor | None = None,
    synchronized: bool = False,
) -> Tensor:
    """gamma * (x - mean) / sqrt(variance + epsilon) + beta.

    `batch` holds the `Moments` of `x`, of the same `mask` and `synchronized`: the
    gradient passes through them. See `cbn_training` for the other arguments.
    """
    count, mean, variance = batch
    inverse, one = 1 / ops.sqrt(variance + epsilon), ops.ones_like(mean)
    batch_map = BatchMap(mean, inverse, beta, mean, variance, one, count)
    settings = CBNSettings(epsilon, axis, decouple=False, synchronized=synchronized)
    return _normalize(x, gamma, beta, batch_map, mask, settings)


def batch_normalization_inference(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float,
    axis: int,
) -> Tensor:
    """Batch normalization with stored statistics: affine in `x`."""
    return affine(x, mean, gamma / ops.sqrt(variance + epsilon), beta, axis=axis)


def _normalize(x, gamma, beta, batch_map, mask, settings, remake=None):
    """The map of a batch. Its gradient passes through the statistics of the batch too.

    See `_map_of_batch` for `remake`.

    With c = `center`, a = gamma * inverse, g = `upstream`, m = `count` and
    k = sum(g * (x - c)) / m / (square + epsilon), the derivative that arrives at
    x' = x - c is a * (g - k * x'). From there it passes to x, directly and through the
    batch mean.
    """
    axis = settings.axis

    def forward(x, gamma, beta, center, inverse, offset, *for_gradient):
        offset = () if settings.decouple else (offset,)
        return affine(x, center, gamma * inverse, *offset, axis=axis)

    def gradient(upstream, x, gamma, beta, *rest):
        batch_map, mask = _map_and_mask(x, beta, rest, remake)
        local = total = gradient_sums(upstream, x, batch_map.center, *mask, axis=axis)
        replicas = 1
        if settings.synchronized:
            total, replicas = sum_over_replicas(local), number_of_replicas()
        vectors, dgamma, dbeta = gradient_vectors(
            local, total, gamma, batch_map, replicas=replicas, settings=settings
        )
        dx = gradient_x(upstream, x, *vectors, *mask, axis=axis)
        return dx, dgamma, dbeta, *[None] * len(rest)

    masks = () if mask is None else (mask,)
    return custom_gradient(forward, gradient)(x, gamma, beta, *batch_map, *masks)


@single_pass()
def gradient_vectors(
    local: Tensor,
    total: Tensor,
    gamma: Tensor,
    batch_map: BatchMap,
    *,
    replicas: int,
    settings: CBNSettings,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """What `gradient_x` needs, and the gradients of gamma and beta.

    `local` and `total` are sum(g) and sum(g * (x - c)) of one and of all replicas.
    """
    center, mean = batch_map.center, batch_map.mean
    scale = gamma * batch_map.inverse
    sum_g, sum_gx = total[0], total[1]
    count = ops.maximum(batch_map.count, 1)
    k = sum_gx / count / (batch_map.square + settings.epsilon)
    if _is_masked(batch_map):
        k = ops.where(batch_map.count > 0, k, ops.zeros_like(k))
    through_mean = sum_g / count
    if settings.decouple:
        # The batch mean of x' is not 0, so the derivative of its norm has a mean.
        mean_of_norm = k * (mean - center)
        through_mean = through_mean - mean_of_norm
        pivot = center
        # Each replica takes an equal part of the sum; the optimizer adds them up.
        share = count if replicas == 1 else count / replicas
        dbeta = scale * (local[0] - mean_of_norm * share)
    else:
        pivot = mean
        dbeta = local[0]
    if settings.mean_gradient == "ratio":
        through_mean = batch_map.mean_weight * through_mean
    vectors = scale, k, pivot, through_mean
    return vectors, local[1] * batch_map.inverse, dbeta
