"""Functions that read activations once, in the best way of each backend."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_norms.ops.custom_gradient import apply_in_torch, in_this_graph
from keras_norms.ops.forward_mode import have_tangents

_LARGE = 2**18  # elements
_BATCH = 64  # samples, if the batch size is unknown


def single_pass(xla: bool | str = False) -> Callable:
    """Decorate a function of activations to read and write them once.

    The function is written in `keras.ops`. Under JAX and `jit_compile=True` XLA fuses
    it with its neighbours, and it mostly stays as it is. Otherwise TensorFlow launches
    a kernel for each operation, and each reads and writes the whole tensor: on a GPU
    XLA compiles the function. On a CPU, and for PyTorch, there are better ways for some
    passes over large tensors.

    Tensors are positional arguments, everything static (the channel axis) is a hashable
    keyword argument. The function must not communicate between replicas.

    `xla` says whether TensorFlow compiles it by XLA on a CPU too: `"large"` if the
    first tensor is large, `True` always. There XLA is slow at reductions and fast at
    element-wise functions. The decorated function has `faster(where)`: it decorates a
    function that computes the same, faster, when `where(*tensors, **static)` is true,
    and needs a gradient on JAX alone.
    """

    def decorate(function):
        @functools.cache
        def compiled(**static):
            import tensorflow as tf

            function_of_tensors = functools.partial(function, **static)
            return tf.function(function_of_tensors, jit_compile=True, autograph=False)

        @functools.wraps(function)
        def call(*tensors, **static):
            backend = keras.backend.backend()
            if backend == "tensorflow" and have_tangents(tensors):
                return function(*tensors, **static)
            if backend == "tensorflow" and _has_gpu():
                return compiled(**static)(*tensors)
            for kernel, applies_to in call.kernels:
                if applies_to(*tensors, **static):
                    with_gradient_of = _GRADIENT_OF[backend]
                    return with_gradient_of(function, kernel, static)(*tensors)
            if backend == "tensorflow" and _compiles(xla, tensors):
                return compiled(**static)(*tensors)
            return function(*tensors, **static)

        def faster(where):
            def register(kernel):
                call.kernels.append((kernel, where))
                return kernel

            return register

        call.kernels, call.faster = [], faster
        return call

    return decorate


def in_xla() -> bool:
    """Whether XLA compiles what is called here, and fuses it with its neighbours."""
    if keras.backend.backend() != "tensorflow":
        return keras.backend.backend() == "jax"
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


@functools.cache
def _has_gpu():
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def is_large(x: Any) -> bool:
    """Whether passes over a TensorFlow tensor take longer than starting operations."""
    elements = x.shape[1:].num_elements()
    if elements is None:
        return True
    # With 2 to 7 channels TensorFlow's element-wise loops take longer by element.
    limit = _LARGE / 4 if 1 < x.shape[-1] < 8 else _LARGE
    return elements * (x.shape[0] or _BATCH) >= limit


def _compiles(xla, tensors):
    """Whether TensorFlow compiles a function `single_pass(xla=xla)` for a CPU."""
    if not xla or (xla == "large" and not is_large(tensors[0])):
        return False
    # XLA compiles for every shape again: only the batch may vary in size.
    return all(tensor.shape[1:].is_fully_defined() for tensor in tensors)


def _tensorflow_gradient_of(function, kernel, static):
    """`kernel`, with the gradient of `function` for second derivatives."""
    import tensorflow as tf

    @tf.custom_gradient
    def call(*tensors):
        def gradient(*upstreams):
            inputs = in_this_graph(tensors)
            with tf.GradientTape() as tape:
                tape.watch([t for t in inputs if t.dtype.is_floating])
                outputs = function(*inputs, **static)
            return tape.gradient(outputs, inputs, upstreams)

        return kernel(*tensors, **static), gradient

    return call


def _torch_gradient_of(function, kernel, static):
    import torch

    def gradient(upstreams, tensors):
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views: one of the tensors may have been made from another one.
            tensors = [tensor.view_as(tensor) for tensor in tensors]
            outputs = function(*tensors, **static)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = [
            (output, upstream)
            for output, upstream in zip(outputs, upstreams)
            if upstream is not None and output.requires_grad  # a count does not
        ]
        outputs, upstreams = zip(*used)
        gradients = iter(
            torch.autograd.grad(
                outputs,
                [tensor for tensor in tensors if tensor.requires_grad],
                upstreams,
                create_graph=create_graph,
                allow_unused=True,
            )
        )
        return [next(gradients) if t.requires_grad else None for t in tensors]

    kernel = functools.partial(kernel, **static)
    if not torch.is_grad_enabled():  # as in forward and backward of a custom gradient
        return kernel
    return functools.partial(apply_in_torch, kernel, gradient)


def _jax_gradient_of(function, kernel, static):
    return functools.partial(kernel, **static)  # JAX differentiates it


_GRADIENT_OF = {
    "jax": _jax_gradient_of,
    "tensorflow": _tensorflow_gradient_of,
    "torch": _torch_gradient_of,
}
