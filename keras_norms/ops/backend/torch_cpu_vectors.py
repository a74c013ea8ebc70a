"""Arithmetic of vectors over channels for PyTorch on a CPU, in few operations.

PyTorch starts the operations one by one, which for a vector takes longer than the
arithmetic. `map_of_moments` computes what the one in `normalize` does.
"""

import math

import torch

from keras_norms.ops import normalize
from keras_norms.ops.custom_gradient import is_eager_torch


def is_plain(batch, settings):
    """Without masks, groups, `mean_gradient="ratio"`, or a gradient to record."""
    return (
        batch.count.ndim == 0
        and batch.mean.ndim == 1
        and settings.mean_gradient == "shift"
        and is_eager_torch()
        and not torch.is_grad_enabled()
    )


def applies_to(batch, *others, settings):
    return batch.mean.is_cpu and is_plain(batch, settings)


@normalize.map_of_moments.faster(where=applies_to)
def map_of_moments(batch, beta, state, rho, learning_rate, *, settings):
    weight, kept, kept_here = _weights(learning_rate, state.weight, settings)
    ahead = (batch.mean - state.mean).mul_(kept_here)
    if settings.decouple:
        ahead = ahead.add_(beta)
        square = torch.addcmul(batch.variance, ahead, ahead)
        offset = torch.zeros_like(beta)
    else:
        square, offset = batch.variance, beta
    used = torch.lerp(square, state.square, kept_here).add_(settings.epsilon)
    batch_map = normalize.BatchMap(
        center=batch.mean - ahead,
        inverse=used.rsqrt_().div_(rho),
        offset=offset,
        mean=batch.mean,
        square=square,
        mean_weight=torch.ones_like(square),
        count=batch.count,
    )
    after = normalize.CBNState(
        torch.lerp(batch.mean, state.mean, kept),
        torch.lerp(square, state.square, kept),
        weight,
    )
    found = batch.mean + square
    # Nearly always, and then nothing is selected.
    if batch.count.item() > 0 and math.isfinite(found.sum().item()):
        return batch_map, after
    usable = (found.abs_() < torch.inf) & (batch.count > 0)
    mean, square = (torch.where(usable, *pair) for pair in zip(after[:2], state[:2]))
    weight = torch.where(usable.any(), weight, state.weight)
    return batch_map, normalize.CBNState(mean, square, weight)


def _weights(rate, weight, settings):
    """The new weight, and those of the averages in new ones and in the map.

    Numbers: a CPU is read without waiting.
    """
    rate, old = rate.item(), weight.item()
    step = min(max(settings.omega * rate, normalize.SMALLEST_STEP), 1.0)
    step = step if rate >= 0 else 1 - settings.momentum
    new = step + (1 - step) * old
    kept = (new - step) / new  # (1 - step) * the old weight / the new one
    return torch.full_like(weight, new), kept, kept if rate >= 0 else 0.0
