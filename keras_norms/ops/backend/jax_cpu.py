"""Sums over few channels for JAX on a CPU.

There XLA adds up one row of channels after the other, and a row of few channels takes
as long as one of many. Each function computes what the one of that name in `moments` or
`passes` does, with neighbouring positions as channels of their own.
"""

import functools
import math

import jax
from jax import numpy as jnp

from keras_norms.ops import moments, passes
from keras_norms.ops.replicas import devices_share_batches

# With more it is slower where a bias and an activation are computed in the same loop.
_FEW = 15  # channels
_ROW = 128  # elements


def applies_to(x, *others, axis):
    """Whether the functions below can compute for these arguments, and are faster."""
    return (
        isinstance(axis, int)
        and axis % x.ndim == x.ndim - 1
        and all(isinstance(size, int) and size > 0 for size in x.shape)
        and x.shape[-1] <= _FEW
        and all(each.dtype != "bool" for each in others)  # no mask
        and not devices_share_batches()
        and _positions(x) > 1
    )


@moments.mean_and_variance.faster(where=applies_to)
def mean_and_variance(x, prior, count, *, axis):
    plain = functools.partial(moments.mean_and_variance.__wrapped__, axis=-1)
    positions = _positions(x)

    def of_rows(x, prior, count):
        found = plain(_rows(x), jnp.tile(prior, positions), count / positions)
        means, variances = (jnp.reshape(each, (positions, -1)) for each in found)
        # Around one of them, so that nothing rounds where all are equal.
        ahead = means - means[0]
        mean = jnp.mean(ahead, 0)
        return means[0] + mean, jnp.mean(variances + jnp.square(ahead - mean), 0)

    return jax.lax.platform_dependent(x, prior, count, cpu=of_rows, default=plain)


@passes.gradient_sums.faster(where=applies_to)
def gradient_sums(upstream, x, center, *, axis):
    plain = functools.partial(passes.gradient_sums.__wrapped__, axis=-1)
    positions = _positions(x)

    def of_rows(upstream, x, center):
        sums = plain(_rows(upstream), _rows(x), jnp.tile(center, positions))
        return jnp.sum(jnp.reshape(sums, (2, positions, -1)), 1)

    return jax.lax.platform_dependent(upstream, x, center, cpu=of_rows, default=plain)


def _positions(x):
    """How many neighbouring positions make a row."""
    count, channels = math.prod(x.shape[:-1]), x.shape[-1]
    return max(n for n in range(1, _ROW // channels + 1) if count % n == 0)


def _rows(x):
    return jnp.reshape(x, (-1, _positions(x) * x.shape[-1]))
