"""Functions of `keras.ops` by PyTorch alone, as far as its own differ in arguments.

See `functions`.
"""

import keras
import numpy as np
import torch

from keras_norms import _keras


def __getattr__(name):
    return getattr(keras.ops, name)


_SAME = {
    *("abs", "all", "any", "isfinite", "logical_and", "logical_not", "logical_or"),
    *("broadcast_to", "reshape", "squeeze", "stack", "where"),
    *("full_like", "ones_like", "zeros_like"),
    *("clip", "relu", "sign", "sqrt", "square"),
}
# At import: `__getattr__` would look for them at each use.
globals().update({name: getattr(torch, name) for name in _SAME})


def cast(x, dtype):
    x, dtype = _tensor(x), _dtype(dtype)
    # `to` takes a microsecond or two even where it changes nothing.
    return x if x.dtype == dtype else x.to(dtype)


def copy(x):
    return _tensor(x).clone()


def full(shape, number, dtype):
    """In Keras, the number goes from the CPU to the GPU, which is waited for."""
    device = _keras.torch_device()
    return torch.full(shape, number, dtype=_dtype(dtype), device=device)


def stop_gradient(x):
    return x.detach()


def shape(x):
    return tuple(x.shape)


def sum(x, axis):
    return x if axis == () else torch.sum(x, axis)  # of no axis, it adds up all


def maximum(x, y):
    """Of two tensors, or of a tensor and a number, which costs one operation."""
    return torch.maximum(x, y) if isinstance(y, torch.Tensor) else x.clamp_min(y)


def minimum(x, number):
    return x.clamp_max(number)


def max(x, axis=(), keepdims=False, initial=None):
    """In Keras, `initial` is on the CPU, and an empty tensor has one maximum alone."""
    if initial is None:
        return torch.amax(x, axis, keepdims)
    if x.numel():
        return torch.amax(x, axis, keepdims).clamp_min(initial)
    return torch.sum(x, axis, keepdims) + initial


def _tensor(x):
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, keras.Variable):
        return x.value
    if isinstance(x, np.ndarray):  # In Keras, a GPU is waited for.
        return torch.as_tensor(x).to(_keras.torch_device(), non_blocking=True)
    return keras.ops.convert_to_tensor(x)


def _dtype(dtype):
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
