"""Passes over activations for TensorFlow on a CPU, outside XLA.

There every operation is a loop of its own over the whole tensor. The batch
normalization operations are the only ones that do several things in one loop; with the
right arguments they compute what CBN needs, two to four times as fast, and in float32
for 16 bits. Each function computes what the one of that name in `moments` or `passes`
does.
"""

import tensorflow as tf

from keras_norms.ops import moments, passes
from keras_norms.ops.shapes import ALIGNED, channel_groups, sums_are_long
from keras_norms.ops.single_pass import in_xla, is_large

_NEAR = 2.0**-12  # a deviation is small by the mean


def applies_to(x, *others, axis):
    """Whether the functions below can compute for these arguments.

    The operations know channels last and float32 statistics. In XLA they cancel where
    the mean is much larger than the standard deviation.
    """
    return (
        isinstance(axis, int)
        and axis % len(x.shape) == len(x.shape) - 1
        and x.shape[-1] is not None
        and is_large(x)
        and channel_groups(x.shape) * x.shape[-1] % ALIGNED == 0
        and x.dtype in (tf.float32, tf.float16, tf.bfloat16)
        and all(
            tensor.dtype == (x.dtype if tensor.shape.rank > 1 else tf.float32)
            for tensor in others
        )
        and not in_xla()
    )


@passes.affine.faster(where=applies_to)
def affine(x, center, scale, offset=None, *, axis):
    """(x - center) * scale + offset: normalisation by a variance of 1."""
    offset = tf.zeros_like(center) if offset is None else offset
    if x.shape[1:-1] == (1, 1):
        # TensorFlow would fuse the operation below with the convolution before it and
        # the activation after it, and has no kernel for some of them.
        y = (tf.cast(x, tf.float32) - center) * scale + offset
        return tf.cast(y, x.dtype)
    groups = 1 if x.shape[-1] % ALIGNED == 0 else channel_groups(x.shape)
    scale, offset, center = (tf.tile(v, [groups]) for v in (scale, offset, center))
    y = tf.raw_ops.FusedBatchNormV3(
        x=_rows(x, groups),
        scale=scale,
        offset=offset,
        mean=center,
        variance=tf.ones_like(center),
        epsilon=0.0,
        is_training=False,
    ).y
    y = tf.reshape(y, tf.shape(x))
    y.set_shape(x.shape)
    return y


@moments.mean_and_variance.faster(where=applies_to)
def mean_and_variance(x, prior, count, *, axis):
    """Both from one operation, which subtracts the mean itself and needs no prior."""

    def of_small_numbers():
        wide = tf.cast(x, tf.float32)
        shift = tf.math.divide_no_nan(passes.channel_sums(wide, axis), count)
        mean, variance = _mean_and_variance(wide - shift, count)
        return mean + shift, variance

    if sums_are_long(x.shape):
        return of_small_numbers()
    mean, variance = _mean_and_variance(x, count)
    # The last digits of a mean matter where nearly all of x is the mean.
    nearly_constant = variance < tf.square(_NEAR * mean)
    return tf.cond(
        tf.reduce_any(nearly_constant), of_small_numbers, lambda: (mean, variance)
    )


def _mean_and_variance(x, count):
    groups = channel_groups(x.shape)
    unused = tf.zeros(groups * x.shape[-1])
    outputs = tf.raw_ops.FusedBatchNormV3(
        x=_rows(x, groups),
        scale=unused,
        offset=unused,
        mean=unused,
        variance=unused,
        is_training=True,
    )
    # It returns the unbiased variance of each group, and NaN for an empty batch.
    rows = tf.maximum(count / groups, 1)
    means = _of_channels(outputs.batch_mean, groups)
    variances = _of_channels(outputs.batch_variance, groups) * ((rows - 1) / rows)
    mean = _sums(means) / groups
    variance = _sums(variances + tf.square(means - mean)) / groups
    zero = tf.zeros_like(mean)
    return tuple(tf.where(count > 0, value, zero) for value in (mean, variance))


@passes.gradient_sums.faster(where=applies_to)
def gradient_sums(upstream, x, center, *, axis):
    """sum(g) and sum(g * (x - center)), which is how `affine` backpropagates."""
    groups = channel_groups(x.shape)
    ones = tf.ones(groups * x.shape[-1])
    gradients = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=_rows(upstream, groups),
        x=_rows(x, groups),
        scale=ones,
        reserve_space_1=tf.tile(center, [groups]),
        reserve_space_2=ones,
        reserve_space_3=ones,
        epsilon=0.0,
        is_training=False,
    )
    sums = gradients.offset_backprop, gradients.scale_backprop
    return tf.stack([_sums(_of_channels(each, groups)) for each in sums])


def _rows(x, groups):
    """The tensor as the batch of 1 x 1 images that the operations take."""
    return tf.reshape(x, (-1, 1, 1, groups * x.shape[-1]))


def _of_channels(vector, groups):
    """The numbers of each channel in a column."""
    return tf.reshape(vector, (groups, -1))


def _sums(columns):
    """The sums of columns.

    TensorFlow adds up rows in pairs, which keeps digits; columns too if their number is
    a multiple of eight, else one by one. Columns are faster: rows need a transpose.
    """
    groups, channels = columns.shape
    if channels % 8 and groups > 16:
        return tf.reduce_sum(tf.transpose(columns), 1)
    return tf.reduce_sum(columns, 0)
