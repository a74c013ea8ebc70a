"""Arithmetic of vectors over channels for PyTorch, in few operations.

PyTorch starts the operations one by one, which for a vector takes longer than the
arithmetic. `map_of_moments` computes what the one in `normalize` does.
"""

import torch

from keras_norms.ops import normalize
from keras_norms.ops.custom_gradient import is_eager_torch


def is_plain(batch, *others, settings):
    """Without masks, groups, `mean_gradient="ratio"`, or a gradient to record."""
    return (
        batch.count.ndim == 0
        and batch.mean.ndim == 1
        and settings.mean_gradient == "shift"
        and is_eager_torch()
        and not torch.is_grad_enabled()
    )


@normalize.map_of_moments.faster(where=is_plain)
def map_of_moments(batch, beta, state, rho, learning_rate, *, settings):
    known = learning_rate >= 0
    step = (learning_rate * settings.omega).clamp_(normalize.SMALLEST_STEP, 1)
    step = torch.where(known, step, 1 - settings.momentum)
    weight = torch.addcmul(step, 1 - step, state.weight)
    kept = (weight - step).div_(weight)  # (1 - step) * the old weight / the new one
    kept_here = kept * known

    excess = batch.mean - state.mean
    ahead = excess * kept_here
    if settings.decouple:
        ahead = ahead.add_(beta)
        square = torch.addcmul(batch.variance, ahead, ahead)
        offset = torch.zeros_like(beta)
    else:
        square, offset = batch.variance, beta
    behind = state.square - square
    used = torch.addcmul(square, behind, kept_here).add_(settings.epsilon)
    batch_map = normalize.BatchMap(
        center=batch.mean - ahead,
        inverse=used.sqrt_().mul_(rho).reciprocal_(),
        offset=offset,
        mean=batch.mean,
        square=square,
        mean_weight=torch.ones_like(square),
        count=batch.count,
    )
    usable = (batch.mean + square).abs_() < torch.inf
    usable &= batch.count > 0
    after = normalize.CBNState(
        torch.where(usable, batch.mean - kept * excess, state.mean),
        torch.where(usable, torch.addcmul(square, behind, kept), state.square),
        torch.where(usable.any(), weight, state.weight),
    )
    return batch_map, after
