"""Linear maps of `scale * x + shift` that never write that tensor."""

import functools
from collections.abc import Callable, Sequence

import keras
from keras import ops

from keras_norms._types import Tensor


def linear_of_affine(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    linear: Callable[[Tensor, Tensor], Tensor],
    *,
    groups: int = 1,
    border: Sequence[int] | None = None,
    channels_first: bool = False,
) -> Tensor:
    """linear(scale * x + shift, kernel) + bias, as linear(x, scale * kernel) and more.

    What the shift gives is the linear map of one constant image. With zero padding it
    differs at the border from the inside, and so does the map of the affine tensor.

    Args:
        x: Tensor with `channels` in axis 1 or in the last.
        scale, shift: `(channels,)`, in the dtype to compute in.
        kernel: `(..., channels / groups, units)`, in the same dtype.
        bias: `(units,)`, or `None`.
        linear: Function of a tensor and a kernel.
        groups: How many groups of channels the kernel is applied to, each by the kernel
            of an equal part of the units.
        border: Sizes of the spatial axes of the constant image, or `None` where there
            are none. An image as large as the kernel is enough without padding.
        channels_first: Whether channels are in axis 1.

    Returns:
        Tensor in the dtype of `x`.
    """
    constant = linear(_image(shift, len(x.shape), border, channels_first), kernel)
    if bias is not None:
        trailing = (1,) * (len(x.shape) - 2) if channels_first else ()
        constant = constant + ops.reshape(bias, (-1, *trailing))
    scaled = kernel * _of_inputs(scale, kernel, groups)
    if x.dtype == scaled.dtype:
        outputs = linear(x, scaled)
    else:
        outputs = _linear_in_half_precision(linear, x, scaled)
    return ops.cast(ops.cast(outputs, constant.dtype) + constant, outputs.dtype)


def _linear_in_half_precision(linear, x, kernel):
    """`linear(x, kernel)` in the dtype of `x`, 16 bits, with a kernel of 32.

    Compiled for TPUs by JAX, the gradient of the kernel has 32 bits before devices add
    it up, not after. It loses no digits, and goes with gradients of 32 bits that are
    due at the same time: one all-reduce in place of two.
    """

    def half(x, kernel):
        return linear(x, ops.cast(kernel, x.dtype))

    if keras.backend.backend() != "jax":
        return half(x, kernel)
    import jax

    def gradient(linear, x, kernel, upstream):
        return jax.vjp(functools.partial(linear, x), kernel)[1](upstream)[0]

    def gradient_on_tpu(x, kernel, upstream):
        x, upstream = (tensor.astype(kernel.dtype) for tensor in (x, upstream))
        return gradient(linear, x, kernel, upstream)

    def backward(tensors, upstream):
        x, kernel = tensors
        dx = jax.vjp(lambda x: half(x, kernel), x)[1](upstream)[0]
        dkernel = jax.lax.platform_dependent(
            x,
            kernel,
            upstream,
            tpu=gradient_on_tpu,
            default=functools.partial(gradient, half),
        )
        return dx, dkernel

    with_gradient = jax.custom_vjp(half)
    with_gradient.defvjp(lambda *tensors: (half(*tensors), tensors), backward)
    return with_gradient(x, kernel)


def _of_inputs(scale, kernel, groups):
    """The scale of what each element of a kernel reads, as it broadcasts to one."""
    if groups == 1:
        return scale[:, None]
    by_group = ops.transpose(ops.reshape(scale, (groups, -1)))
    return ops.repeat(by_group, kernel.shape[-1] // groups, axis=1)


def _image(shift, ndim, border, channels_first):
    """One sample that is `shift` everywhere."""
    if border is None:
        return ops.reshape(shift, (1,) * (ndim - 1) + (-1,))
    if channels_first:
        shift = ops.reshape(shift, (-1,) + (1,) * len(border))
        return ops.broadcast_to(shift[None], (1, shift.shape[0], *border))
    return ops.broadcast_to(shift, (1, *border, shift.shape[0]))
