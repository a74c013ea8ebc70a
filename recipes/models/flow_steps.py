"""The steps of a flow: maps of images with an inverse and a log-determinant.

A call returns the output, and log |det| of its Jacobian for each sample, of shape
`(batch,)`; `inverse` takes the output back. Masks are arrays of zeros and ones of the
shape of an image: the half of the ones is kept.

A norm between couplings has to be inverted. At inference, batch normalization uses its
moving statistics and is an affine map. In training it uses those of the batch, and
gradients go through them; the log-determinant is then that of a sample with the
statistics held constant, as in Dinh et al. (the batch as a whole has no inverse: its
mean is lost). Layer normalization loses the mean and the deviation of a sample, and so
has neither inverse nor density. Here it takes them from the half that the preceding
coupling kept, which makes it a coupling itself, exact in both modes.

Reference: Dinh, Sohl-Dickstein and Bengio, Density estimation using Real NVP, 2017,
Sections 3.2 to 3.7 and Appendix E. https://arxiv.org/abs/1605.08803
"""

import math

import numpy as np
from keras import layers, ops

LOGIT_MARGIN = 0.05
EPSILON = 1e-5


def sample_sum(x):
    """The sum over all but the first axis."""
    return ops.sum(x, tuple(range(1, len(x.shape))))


class Logit(layers.Layer):
    """`logit(margin + (1 - 2 margin) x)`, which is finite for pixels in [0, 1]."""

    def call(self, x, training=None):
        p = LOGIT_MARGIN + (1 - 2 * LOGIT_MARGIN) * x
        log_p, log_q = ops.log(p), ops.log(1 - p)
        return log_p - log_q, sample_sum(math.log(1 - 2 * LOGIT_MARGIN) - log_p - log_q)

    def inverse(self, y):
        return (ops.sigmoid(y) - LOGIT_MARGIN) / (1 - 2 * LOGIT_MARGIN)


class Squeeze(layers.Layer):
    """Turns each 2x2 of pixels into one pixel with four times the channels."""

    def call(self, x, training=None):
        _, h, w, c = x.shape
        y = ops.reshape(x, (-1, h // 2, 2, w // 2, 2, c))
        y = ops.transpose(y, (0, 1, 3, 5, 2, 4))
        y = ops.reshape(y, (-1, h // 2, w // 2, 4 * c))
        return y, ops.zeros_like(x[:, 0, 0, 0])

    def inverse(self, y):
        _, h, w, c = y.shape
        x = ops.reshape(y, (-1, h, w, c // 4, 2, 2))
        x = ops.transpose(x, (0, 1, 4, 2, 5, 3))
        return ops.reshape(x, (-1, 2 * h, 2 * w, c // 4))


class FactorOut(layers.Layer):
    """Marks where the first half of the channels is done; `RealNVP` takes it out."""


class Coupling(layers.Layer):
    """Affine coupling, with s = scale * tanh of what the network returns.

    `network` is a `keras.Model` from an image to one with twice the channels, those of
    s before those of t.
    """

    def __init__(self, network, mask, **kwargs):
        super().__init__(**kwargs)
        self.network = network
        self.mask = mask

    def build(self, input_shape):
        self.scale = self.add_weight((input_shape[-1],), "ones", name="scale")

    def _s_and_t(self, x, training):
        mask = ops.cast(self.mask, x.dtype)
        s, t = ops.split(self.network(mask * x, training=training), 2, -1)
        return (1 - mask) * self.scale * ops.tanh(s), (1 - mask) * t

    def call(self, x, training=None):
        s, t = self._s_and_t(x, training)
        return x * ops.exp(s) + t, sample_sum(s)

    def inverse(self, y):
        s, t = self._s_and_t(y, False)
        return (y - t) * ops.exp(-s)


class FlowBatchNormalization(layers.BatchNormalization):
    """Batch normalization without affine weights; `inverse` is that of inference."""

    def __init__(self, **kwargs):
        super().__init__(-1, 0.9, EPSILON, center=False, scale=False, **kwargs)

    def call(self, x, training=None):
        mean, variance = moving = self.moving_mean, self.moving_variance
        if training:
            mean, variance = ops.moments(x, (0, 1, 2))
            for stored, new in zip(moving, (mean, variance)):
                kept = self.momentum * stored.value
                stored.assign(kept + (1 - self.momentum) * ops.stop_gradient(new))
        log_deviation = 0.5 * ops.log(variance + EPSILON)
        log_det = -x.shape[1] * x.shape[2] * ops.sum(log_deviation)
        y = (x - mean) * ops.exp(-log_deviation)
        return y, log_det + ops.zeros_like(x[:, 0, 0, 0])

    def inverse(self, y):
        return y * ops.sqrt(self.moving_variance + EPSILON) + self.moving_mean


class FlowLayerNormalization(layers.Layer):
    """Layer normalization of one half of an image by the statistics of the other.

    The mean and the deviation of a sample are over height, width and channels of the
    half that is kept.
    """

    def __init__(self, mask, **kwargs):
        super().__init__(**kwargs)
        self.mask = mask

    def _statistics(self, x, mask):
        """The mean, and the logarithm of the deviation, of each sample."""
        axes, count = (1, 2, 3), float(self.mask.sum())
        mean = ops.sum(mask * x, axes, keepdims=True) / count
        squares = ops.sum(mask * ops.square(x - mean), axes, keepdims=True)
        return mean, 0.5 * ops.log(squares / count + EPSILON)

    def call(self, x, training=None):
        mask = ops.cast(self.mask, x.dtype)
        mean, log_deviation = self._statistics(x, mask)
        y = mask * x + (1 - mask) * (x - mean) * ops.exp(-log_deviation)
        return y, -float((1 - self.mask).sum()) * log_deviation[:, 0, 0, 0]

    def inverse(self, y):
        mask = ops.cast(self.mask, y.dtype)
        mean, log_deviation = self._statistics(y, mask)
        return mask * y + (1 - mask) * (y * ops.exp(log_deviation) + mean)


# Other norms stand in the networks alone.
BETWEEN = {
    "bn": lambda mask, name: FlowBatchNormalization(name=name),
    "layer": lambda mask, name: FlowLayerNormalization(mask, name=name),
}


def checkerboard(shape):
    """Ones where row + column is even, of shape `(height, width, channels)`."""
    rows, columns, _ = np.indices(shape)
    return ((rows + columns) % 2 == 0).astype("float32")


def of_channels(shape):
    """Ones in the first half of the channels, of shape `(height, width, channels)`."""
    return (np.indices(shape)[2] < shape[2] // 2).astype("float32")


MASKS = {"checkerboard": checkerboard, "channels": of_channels}
