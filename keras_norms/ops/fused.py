"""Linear maps of `scale * x + shift` that never write that tensor."""

from keras import ops

from keras_norms.ops.custom_gradient import linear_in_half_precision


def linear_of_affine(
    x,
    scale,
    shift,
    kernel,
    bias,
    linear,
    *,
    groups=1,
    border=None,
    channels_first=False,
):
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
        outputs = linear_in_half_precision(linear, x, scaled)
    return ops.cast(ops.cast(outputs, constant.dtype) + constant, outputs.dtype)


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
