"""Passes over groups of samples for PyTorch on a CPU: group after group."""

import torch

from keras_norms.ops import moments, passes
from keras_norms.ops.backend import torch_cpu
from keras_norms.ops.custom_gradient import is_eager_torch


def applies_to(x, *others, axis):
    return (
        is_eager_torch()
        and isinstance(axis, tuple)
        and len(x) > 0
        and torch_cpu.applies_to(*_group(0, x, *others), axis=_axis(x, axis))
    )


@passes.affine.faster(where=applies_to)
def affine(x, *vectors, axis):
    return _written_by(torch_cpu.affine, x, *vectors, axis=axis)


@passes.gradient_x.faster(where=applies_to)
def gradient_x(upstream, x, *vectors, axis):
    return _written_by(torch_cpu.gradient_x, upstream, x, *vectors, axis=axis)


@moments.mean_and_variance.faster(where=applies_to)
def mean_and_variance(x, prior, count, *, axis):
    found = [
        torch_cpu.mean_and_variance(*_group(i, x, prior), count, axis=_axis(x, axis))
        for i in range(len(x))
    ]
    return tuple(torch.stack(vectors) for vectors in zip(*found))


@passes.gradient_sums.faster(where=applies_to)
def gradient_sums(*tensors, axis):
    x = tensors[0]
    found = [
        torch_cpu.gradient_sums(*_group(i, *tensors), axis=_axis(x, axis))
        for i in range(len(x))
    ]
    return torch.stack(found, 1)


def _written_by(function, *tensors, axis):
    """What an elementwise function makes of each group, in one tensor."""
    x = tensors[0]
    y = x.new_empty(x.shape)
    for i in range(len(x)):
        function(*_group(i, *tensors), axis=_axis(x, axis), out=y[i])
    return y


def _group(i, *tensors):
    """The part of a group, of vectors too if each group has its own."""
    return [tensor[i] if tensor.ndim > 1 else tensor for tensor in tensors]


def _axis(x, axis):
    """The channel axis of a group."""
    return axis[1] % x.ndim - 1
