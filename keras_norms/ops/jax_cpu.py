"""Sums over activations for JAX on one CPU.

XLA for CPUs computes one sum per loop, so that two sums of the same tensors read them
twice from memory. Here they are read in blocks that stay in the cache, and both sums
grow block by block. Each function computes what the one of the same purpose in
`moments` or `passes` does.
"""

import jax
import jax.numpy as jnp

from keras_norms.ops.moments import shift_of

_BLOCK = 2**14  # elements; two float32 tensors and two sums fit into a core's cache
_UNROLL = 8  # blocks per step of the loop: the sums move less often


def apply_to(x, *others, axis):
    """Whether this file can compute for these arguments.

    Blocks are cut along the leading axes: devices that share an array would have to
    exchange them.
    """
    return (
        jax.default_backend() == "cpu"
        and jax.device_count() == 1
        and axis % x.ndim == x.ndim - 1
        and x.shape[-1] <= _BLOCK
        and x.size >= 2 * _UNROLL * _BLOCK
    )


def mean_and_variance(x, prior_mean, has_prior, count, *, axis):
    """Both from sums of x - shift and its square."""
    shift = shift_of(x, prior_mean, has_prior, axis)

    def terms(shift, x):
        shifted = x - shift
        return shifted, jnp.square(shifted)

    mean, square = (total / count for total in _two_sums(terms, shift, x))
    return shift + mean, jax.nn.relu(square - jnp.square(mean))


def gradient_sums(upstream, x, center, *, axis):
    """sum(g) and sum(g * (x - center))."""

    def terms(center, g, x):
        g = g.astype(center.dtype)
        return g, g * (x - center)

    return jnp.stack(_two_sums(terms, center, upstream, x))


def _two_sums(terms, vector, *tensors):
    """Sums per channel of the two tensors `terms(vector, *tensors)`."""
    channels = vector.size
    rows = _BLOCK // channels
    # Flat, because a loop over few channels would not fill the vector registers.
    tensors = [tensor.ravel() for tensor in tensors]
    tiled = jnp.tile(vector, rows)
    span = _UNROLL * tiled.size
    steps = tensors[0].size // span

    def step(i, sums):
        for j in range(_UNROLL):
            first = i * span + j * tiled.size
            blocks = [
                jax.lax.dynamic_slice_in_dim(tensor, first, tiled.size)
                for tensor in tensors
            ]
            sums = [s + term for s, term in zip(sums, terms(tiled, *blocks))]
        return sums

    sums = jax.lax.fori_loop(0, steps, step, [jnp.zeros_like(tiled)] * 2)
    rest = [tensor[steps * span :].reshape(-1, channels) for tensor in tensors]
    return [
        jnp.sum(s.reshape(-1, channels), 0) + jnp.sum(r, 0)
        for s, r in zip(sums, terms(vector, *rest))
    ]
