"""Passes over activations for PyTorch on CUDA, by the kernels of its SyncBatchNorm.

There every operation is a kernel that reads and writes the whole tensor; these do
several things in one. They compute in float32 for 16 bits. Each function computes what
the one of that name in `moments` or `passes` does.
"""

import torch

from keras_norms.ops import moments, passes
from keras_norms.ops.forward_mode import have_tangents

_LARGE = 2**16  # elements; below, what is saved is less than a custom function takes


def applies_to(x, *others, axis):
    """Whether the functions below can compute for these arguments."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    wide = torch.float32 if half else x.dtype
    return (
        not torch.compiler.is_compiling()  # first: sizes may be symbols
        and x.is_cuda
        and x.dtype.is_floating_point
        and x.numel() >= _LARGE
        and isinstance(axis, int)
        and axis % x.ndim != 0
        and all(
            tensor.dtype == (x.dtype if tensor.ndim == x.ndim else wide)
            for tensor in others
        )
        and not have_tangents(others)
    )


@passes.affine.faster(where=applies_to)
def affine(x, center, scale, offset=None, *, axis):
    flat, back = _flat(x, axis)
    if offset is None:
        return back(torch.batch_norm_elemt(flat, None, None, center, scale, 0.0))
    ones = torch.ones_like(scale)
    return back(torch.batch_norm_elemt(flat, scale, offset, center, ones, 0.0))


@passes.gradient_x.faster(where=applies_to)
def gradient_x(upstream, x, scale, k, pivot, constant, *, axis):
    flat, back = _flat(x, axis)
    g, _ = _flat(upstream, axis, like=flat)
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    return back(
        torch.batch_norm_backward_elemt(
            g, flat, pivot, torch.ones_like(k), scale, constant, k, one
        )
    )


@moments.mean_and_variance.faster(where=applies_to)
def mean_and_variance(x, prior, count, *, axis):
    """Both by Welford's algorithm, which needs no prior."""
    return torch.batch_norm_update_stats(_flat(x, axis)[0], None, None, 0.0)


@passes.gradient_sums.faster(where=applies_to)
def gradient_sums(upstream, x, center, *, axis):
    flat, _ = _flat(x, axis)
    g, _ = _flat(upstream, axis, like=flat)
    ones = torch.ones_like(center)
    sums = torch.batch_norm_backward_reduce(
        g, flat, center, ones, None, True, False, False
    )
    return torch.stack(sums[:2])


def _flat(x, axis, like=None):
    """A tensor as rows of channels, or as samples of channels of positions.

    Whichever its memory is, or else that of the flat tensor `like`: the kernels read
    both. Also returns the function that gives an output the shape that `x` has.
    """
    first = x.movedim(axis, 1)
    channels_first = first.is_contiguous() and not first.movedim(1, -1).is_contiguous()
    if channels_first if like is None else like.ndim == 3:
        flat = first.reshape(*first.shape[:2], -1)
        return flat, lambda y: y.view(first.shape).movedim(1, axis)
    last = first.movedim(1, -1)
    flat = last.reshape(-1, last.shape[-1]).contiguous()
    return flat, lambda y: y.view(last.shape).movedim(-1, axis)
