"""Noise for activations, from a hash of the element's position: no state, no tensor.

A generator fills memory with random bits, which takes longer than a normalisation. The
hash is a dozen operations on integers that XLA fuses with what uses the noise.
"""

import math

import keras
from keras import ops

from keras_norms._types import Tensor
from keras_norms.ops.replicas import replica_number
from keras_norms.ops.shapes import per_channel
from keras_norms.ops.single_pass import single_pass

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, spreads neighbouring numbers


def scale_and_shift(
    x: Tensor,
    seed: keras.random.SeedGenerator,
    dtype: str,
    *,
    mean_range: float,
    scale_range: float,
    mean_jitter: float,
    scale_jitter: float,
    axis: int,
) -> tuple[Tensor, Tensor]:
    """The noise of Santurkar et al., Algorithm 1: y = scale * x + shift.

    Args:
        x: Tensor of rank 2 or more. Only its shape counts.
        seed: The call advances it.
        dtype: Dtype of the noise.
        mean_range, scale_range: Each channel draws a mean of its shift from
            U(-mean_range, mean_range) and of its scale from U(1, scale_range).
        mean_jitter, scale_jitter: Each element draws its shift from U(mean -
            mean_jitter, mean + mean_jitter) and its scale from N(mean, scale_jitter).
        axis: The channel axis.

    Returns:
        `scale` and `shift`, of the shape of `x`, constants for the gradient.
    """
    ndim = len(x.shape)
    # All replicas draw the same for a channel, as for one large batch.
    _, of_channel = _noise(ops.zeros((2, x.shape[axis]), dtype), seed, dtype)
    mean = mean_range * of_channel[0]
    scale = 1 + (scale_range - 1) * (of_channel[1] + 1) / 2
    normal, uniform = _noise(ops.stop_gradient(x), seed, dtype, replica_number())
    scale = per_channel(scale, ndim, axis) + scale_jitter * normal
    shift = per_channel(mean, ndim, axis) + mean_jitter * uniform
    return ops.stop_gradient(scale), ops.stop_gradient(shift)


def _noise(x, seed, dtype, replica=0):
    """Independent N(0, 1) and U(-1, 1), each a tensor of the shape of `x`."""
    if keras.backend.backend() == "torch":
        shape = ops.shape(x)
        normal = keras.random.normal(shape, dtype=dtype, seed=_of(replica, seed))
        uniform = keras.random.uniform(shape, -1, 1, dtype, _of(replica, seed))
        return normal, uniform
    # Not keras.random, which draws other numbers in XLA than outside on TensorFlow.
    state = ops.cast(seed.next(), "uint32")
    replica = ops.cast(replica, "uint32") * ops.cast(_GOLDEN, "uint32")
    state = ops.stack([state[0], ops.bitwise_xor(state[1], replica)])
    return hashed_noise(x, state, dtype=dtype)


def _of(replica, seed):
    """The seed of a PyTorch replica; the first one draws as if it was alone."""
    if replica == 0:
        return seed
    return (sum(map(int, seed.next())) + replica * _GOLDEN) % 2**31


@single_pass(xla=True)
def hashed_noise(x: Tensor, seed: Tensor, *, dtype: str) -> tuple[Tensor, Tensor]:
    """N(0, 1) and U(-1, 1), the same for a seed in every mode and on every device.

    Of the shape of `x`; `seed` is two integers.
    """
    seed = ops.cast(seed, "uint32")
    key = _hash(ops.bitwise_xor(_hash(seed[0]), seed[1]))
    bits = _hash(ops.bitwise_xor(_positions(x), key))
    normal = _normal(_hash(ops.bitwise_xor(bits, _hash(key))), _hash(bits))
    uniform = 2 * _uniform(_hash(bits + ops.cast(_GOLDEN, "uint32"))) - 1
    return ops.cast(normal, dtype), ops.cast(uniform, dtype)


def _normal(bits, more_bits):
    """N(0, 1) by one coordinate of Box and Muller's pair.

    The cosine of a random angle is one of the first quadrant with a random sign.
    """
    radius = ops.sqrt(-2 * ops.log(_uniform(bits)))
    square = ops.square(math.pi / 2 * _uniform(more_bits))
    # Taylor to angle^12, 6e-9 from the cosine: the function itself reduces its argument
    # first, and takes five times as long.
    cosine = ops.ones_like(square)
    for n in (12, 10, 8, 6, 4, 2):
        cosine = 1 - cosine * square / (n * (n - 1))
    negative = ops.bitwise_and(more_bits, ops.cast(1, "uint32")) > 0
    return radius * ops.where(negative, -cosine, cosine)


def _uniform(bits):
    """The middles of 2^23 equal intervals of (0, 1), from the upper bits."""
    odd = 2 * ops.cast(_shifted(bits, 9), "int32") + 1
    return ops.cast(odd, "float32") * 2.0**-24


def _positions(x):
    """0, 1, 2, ... in the shape of `x`, whose sizes may be known only at run time."""
    ndim, stride = len(x.shape), ops.cast(1, "uint32")
    positions = ops.zeros((1,) * ndim, "uint32")
    for axis, size in reversed(list(enumerate(ops.shape(x)))):
        along = ops.cast(ops.arange(size, dtype="int32"), "uint32") * stride
        along = ops.reshape(along, (-1,) + (1,) * (ndim - 1 - axis))
        positions = positions + along
        stride = stride * ops.cast(size, "uint32")
    return positions


def _hash(x):
    """A bijection of 32-bit integers that mixes all bits (C. Wellons, lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ops.bitwise_xor(x, _shifted(x, shift)) * ops.cast(factor, "uint32")
    return ops.bitwise_xor(x, _shifted(x, 16))


def _shifted(x, bits):
    return ops.bitwise_right_shift(x, ops.cast(bits, "uint32"))
