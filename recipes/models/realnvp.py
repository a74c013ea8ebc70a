"""RealNVP (Dinh, Sohl-Dickstein and Bengio, 2017): a network with inverse and density.

Images go through a logit, then through scales. A scale has affine couplings with
checkerboard masks, moves each 2x2 of pixels into channels, has couplings with channel
masks, and then half of the channels is done; the last scale has only checkerboard
couplings. A coupling keeps one half of its input, and changes the other by what a
residual network computes from the first:

    y_a = x_a       y_b = x_b * exp(s(x_a)) + t(x_a)       log |det dy/dx| = sum s

A normalisation has two places. In the networks of s and t any will do: they are never
inverted. Between couplings it is inverted, see `recipes.models.flow_steps`.

Reference: https://arxiv.org/abs/1605.08803, Sections 3.3 to 3.7, Appendix E.
"""

import math

import keras
from keras import layers, ops

from keras_norms import WN
from recipes.models import flow_steps, norms
from recipes.models.flow_steps import FactorOut, sample_sum
from recipes.models.head import conv2d


def residual_network(shape, width, blocks, norm, name):
    """The network of s and t: twice the channels, all zeros until it is trained.

    `shape` is that of its input, `width` the channels of all convolutions but the last,
    `blocks` the number of residual blocks of two 3x3 convolutions, `norm` a
    `norms.Norm`, and `name` the start of the names of its layers.
    """

    def convolution(x, name):
        layer = conv2d(width, 3, use_bias=norm.use_bias, name=name)
        # Weight normalization, as in the original, where the norm has no other.
        wrapped = norm.convolution(layer)
        return (WN(layer, name=name) if wrapped is layer else wrapped)(x)

    inputs = layers.Input(shape)
    x = convolution(inputs, f"{name}_stem")
    x = ops.relu(norm.after(x, f"{name}_stem"))
    for block in range(1, blocks + 1):
        shortcut = x
        for part in (1, 2):
            layer = f"{name}_block{block}_conv{part}"
            x = norm.after(convolution(norm.before(x, layer), layer), layer)
            x = ops.relu(x if part == 1 else x + shortcut)
    head = f"{name}_head"
    last = conv2d(2 * shape[-1], 3, kernel_initializer="zeros", name=head)
    outputs = last(norm.before(x, head))
    return keras.Model(inputs, outputs, name=f"{name}_network")


class RealNVP(keras.Model):
    """The flow: from an image with pixels in [0, 1] to its log-likelihood in nats.

    Args:
        image_shape: `(height, width, channels)`. Height and width are multiples of
            `2 ** (scales - 1)`.
        norm: Name of a normalisation, see `recipes.models.norms`.
        between: Whether `norm`, if it is in `BETWEEN`, also stands between couplings.
        scales: Integer >= 1.
        couplings: Number of couplings with one kind of mask; the last scale has one
            more.
        width, blocks: See `residual_network`.
    """

    def __init__(self, image_shape, norm, between, scales, couplings, width, blocks):
        super().__init__(name="realnvp")
        if any(size % 2 ** (scales - 1) for size in image_shape[:2]):
            raise ValueError(
                "Argument `image_shape` must have a height and a width that "
                f"{scales} scales can halve {scales - 1} times. "
                f"Received: image_shape={image_shape}"
            )
        self.dimensions = math.prod(image_shape)
        self.steps = [flow_steps.Logit(name="logit")]
        place = flow_steps.BETWEEN.get(norm) if between else None
        norm = norms.get(norm)

        def couple(shape, kind, count):
            mask = 1 - flow_steps.MASKS[kind](shape)
            for i in range(count):
                mask = 1 - mask
                name = f"scale{scale}_{kind}{i + 1}"
                network = residual_network(shape, width, blocks, norm, name)
                steps = [flow_steps.Coupling(network, mask, name=name)]
                if place is not None:
                    steps.append(place(mask, f"{name}_between"))
                for step in steps:
                    step.build((None, *shape))
                self.steps += steps

        h, w, c = image_shape
        for scale in range(1, scales):
            couple((h, w, c), "checkerboard", couplings)
            self.steps.append(flow_steps.Squeeze(name=f"scale{scale}_squeeze"))
            h, w, c = h // 2, w // 2, 4 * c
            couple((h, w, c), "channels", couplings)
            self.steps.append(FactorOut(name=f"scale{scale}_done"))
            c //= 2
        scale = scales
        couple((h, w, c), "checkerboard", couplings + 1)
        self._last_shape = (h, w, c)
        self.built = True  # as the steps are

    def call(self, x, training=None):
        """The log-likelihood of images `(batch, height, width, channels)`, `(batch,)`.

        In training, with batch statistics between couplings, it is that of a sample
        given the statistics, not a density of the batch.
        """
        z, log_det = self.transform(x, training)
        return log_det - 0.5 * sample_sum(ops.square(z) + math.log(2 * math.pi))

    def transform(self, x, training=False):
        """Images to z, `(batch, dimensions)`, and log |det dz/dx|, `(batch,)`.

        Under the model z is standard normal.
        """
        done, log_det = [], 0.0
        for step in self.steps:
            if isinstance(step, FactorOut):
                out, x = ops.split(x, 2, -1)
                done.append(out)
            else:
                x, change = step(x, training=training)
                log_det = log_det + change
        flat = [ops.reshape(a, (-1, math.prod(a.shape[1:]))) for a in (*done, x)]
        return ops.concatenate(flat, -1), log_det

    def inverse(self, z):
        """Latent variables `(batch, dimensions)` to images, at inference."""
        h, w, c = self._last_shape
        first = self.dimensions - h * w * c
        x = ops.reshape(z[:, first:], (-1, h, w, c))
        for step in reversed(self.steps):
            if isinstance(step, FactorOut):
                size = math.prod(x.shape[1:])
                out = ops.reshape(z[:, first - size : first], (-1, *x.shape[1:]))
                x, first = ops.concatenate([out, x], -1), first - size
            else:
                x = step.inverse(x)
        return x
