"""Linear maps of `scale * x + shift` that never write that tensor."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_norms._types import Tensor
from keras_norms.ops.custom_gradient import custom_vjp
from keras_norms.ops.functions import ops
from keras_norms.ops.replicas import devices_share_batches


def linear_of_affine(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    linear: Callable[[Tensor, Tensor], Tensor],
    *,
    groups: int = 1,
    depthwise: bool = False,
    inside: Sequence[Tensor] | None = None,
    channels_first: bool = False,
) -> Tensor:
    """Compute linear(scale * x + shift, kernel) + bias with linear(x, scale * kernel).

    The shift adds the linear map of one constant image: the taps of the kernel, each
    summed over the input channels, added up over the taps that an output reads. With
    zero padding, outputs at the border read fewer taps.

    Args:
        x: Tensor with `channels` in axis 1 or in the last.
        scale, shift: `(channels,)`, in the dtype to compute in.
        kernel: `(..., channels / groups, units)`, in the same dtype. The leading axes
            are those of the taps, one for each spatial axis of `x`.
        bias: `(units,)`, or `None`.
        linear: Function of a tensor and a kernel.
        groups: The number of groups of channels. Equal parts of the units read one
            group each.
        depthwise: Whether each channel is its own group, and the kernel is
            `(..., channels, units / channels)`.
        inside: For each spatial axis a boolean tensor `(outputs, taps)`, whether a tap
            of an output reads the tensor, not its padding. `None`: all do.
        channels_first: Whether channels are in axis 1.

    Returns:
        Tensor in the dtype of `x`.
    """

    def of_inputs(vector):
        """The vector in the shape that broadcasts to the kernel: its input channels."""
        if groups == 1:
            return vector[:, None]
        by_group = ops.transpose(ops.reshape(vector, (groups, -1)))
        return ops.repeat(by_group, kernel.shape[-1] // groups, axis=1)

    constant = kernel * of_inputs(shift)
    if depthwise:
        constant = ops.reshape(constant, (*constant.shape[:-2], -1))
    else:
        constant = ops.sum(constant, -2)
    if inside is None:
        constant = ops.sum(constant, tuple(range(len(constant.shape) - 1)))
    else:
        constant = _of_taps(constant, inside)
    if bias is not None:
        constant = constant + bias
    if channels_first:
        ones = (1,) * (len(x.shape) - 1 - len(constant.shape))
        constant = ops.moveaxis(ops.reshape(constant, (*ones, *constant.shape)), -1, 0)
    x, scaled = _apart(x), kernel * of_inputs(scale)
    if x.dtype == scaled.dtype:
        return linear(x, scaled) + constant
    return _in_half_precision(linear, x, scaled, constant, inside is not None)


def _of_taps(taps, inside):
    """Sum, for the outputs at each place, the taps that read no padding."""
    image = taps
    for axis, reads in enumerate(inside):
        # Not a product of matrices, which accelerators round to fewer digits.
        trailing = (1,) * (len(image.shape) - 1 - axis)
        reads = ops.cast(reads, taps.dtype)
        reads = ops.reshape(reads, (-1, taps.shape[axis], *trailing))
        if keras.backend.backend() == "torch":  # which starts operations one by one
            image = ops.sum(ops.expand_dims(image, axis) * reads, axis + 1)
            continue
        parts = (
            ops.split(each, taps.shape[axis], at)
            for each, at in ((reads, 1), (image, axis))
        )
        image = sum(ops.squeeze(place, 1) * part for place, part in zip(*parts))
    return image


def _apart(x):
    """Return x, which XLA for GPUs then writes before it uses it; its gradient too.

    Otherwise cuDNN adds to a convolution what is added to its result, which must be
    written first. An affine function of x is better added in the next pass.
    """
    if keras.backend.backend() != "jax":
        return x
    import jax

    return jax.lax.platform_dependent(
        x, cuda=jax.lax.optimization_barrier, default=lambda x: x
    )


def _in_half_precision(linear, x, kernel, constant, is_image):
    """`linear(x, kernel) + constant` in the 16-bit dtype of `x`; the others have 32.

    So do their gradients. Compiled by JAX for TPUs, the gradient of the kernel has 32
    bits before devices add it up, not after. It loses no digits, and shares one
    all-reduce with other 32-bit gradients that are due at the same time.
    """

    def half(x, kernel):
        return linear(x, ops.cast(kernel, x.dtype))

    def add_first(x, kernel, constant):
        outputs = ops.cast(half(x, kernel), constant.dtype) + constant
        return ops.cast(outputs, x.dtype)

    if keras.backend.backend() != "jax":
        return add_first(x, kernel, constant)
    import jax

    def in_cudnn(x, kernel, constant):
        # It adds a bias, and what the network adds to the sum, before it rounds.
        return half(x, kernel) + ops.cast(constant, x.dtype)

    def forward(*tensors):
        on_gpu = add_first if is_image else in_cudnn
        return jax.lax.platform_dependent(*tensors, cuda=on_gpu, default=add_first)

    def gradient(linear, x, kernel, upstream):
        return jax.vjp(functools.partial(linear, x), kernel)[1](upstream)[0]

    def gradient_on_tpu(x, kernel, upstream):
        x, upstream = (tensor.astype(kernel.dtype) for tensor in (x, upstream))
        return gradient(linear, x, kernel, upstream)

    def backward(upstream, x, kernel, constant):
        dx = jax.vjp(lambda x: half(x, kernel), x)[1](upstream)[0]
        dkernel = jax.lax.platform_dependent(
            x,
            kernel,
            upstream,
            tpu=gradient_on_tpu,
            default=functools.partial(gradient, half),
        )
        # XLA for GPUs sums samples where it writes them, and then the small sum. But
        # devices that share a batch would exchange that sum.
        total = ops.sum(ops.cast(upstream, constant.dtype), 0)
        total = total if devices_share_batches() else _apart(total)
        spread = jax.vjp(lambda v: ops.broadcast_to(v, total.shape), constant)[1]
        return dx, dkernel, spread(total)[0]

    return custom_vjp(forward, backward)(x, kernel, constant)


def taps_inside(
    size: Any, taps: int, stride: int, dilation: int, padding: str = "same"
) -> Any:
    """Which taps of a convolution read no padding along an axis: (outputs, taps)."""
    # With a known size, NumPy starts no operation on a device.
    np_or_ops: Any = np if isinstance(size, int) else keras.ops
    before = (taps - 1) * dilation
    if padding != "causal":
        before, _ = same_padding(size, taps, stride, dilation)
    first = np_or_ops.arange(-(-size // stride), dtype="int32")[:, None] * stride
    place = first - before + np_or_ops.arange(taps, dtype="int32") * dilation
    return np_or_ops.logical_and(place >= 0, place < size)


def same_padding(size: Any, taps: int, stride: int, dilation: int) -> tuple[Any, Any]:
    """How many zeros `padding="same"` puts before and behind an axis."""
    np_or_ops: Any = np if isinstance(size, int) else keras.ops
    read = (-(-size // stride) - 1) * stride + (taps - 1) * dilation + 1
    zeros = np_or_ops.maximum(read - size, 0)
    return zeros // 2, zeros - zeros // 2
