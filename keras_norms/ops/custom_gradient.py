"""Hand-written gradients, by the means of each backend."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_norms.ops.forward_mode import NO_FORWARD_MODE, have_tangents


def custom_gradient(forward: Callable, backward: Callable) -> Callable:
    """Give `forward` a hand-written gradient.

    `forward` takes positional tensors and returns a tensor or a tuple. It must also be
    right under ordinary differentiation, which second derivatives on JAX use.
    `backward(upstream, *tensors)` returns one gradient for each argument, or `None`. It
    must consist of differentiable operations: reverse-over-reverse derivatives are then
    right everywhere. `upstream` is a tuple if `forward` returns one; in it, PyTorch has
    `None` for zeros. A statistic that depends on another argument may be an argument
    too, if `backward` accounts for that and returns `None` for it.

    There is no forward-mode derivative: it is a `NotImplementedError` on TensorFlow and
    PyTorch, a `TypeError` on JAX.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        @tf.custom_gradient
        def with_gradient(*tensors):
            if have_tangents(tensors):
                raise NotImplementedError(NO_FORWARD_MODE)

            def gradient(*upstreams):
                return backward(_one_or_all(upstreams), *in_this_graph(tensors))

            return forward(*tensors), gradient

        return with_gradient
    if backend == "jax":
        return custom_vjp(forward, backward)

    def gradient(upstreams, tensors):
        return backward(_one_or_all(upstreams), *tensors)

    return functools.partial(apply_in_torch, forward, gradient)


def custom_vjp(forward: Callable, backward: Callable) -> Callable:
    """`jax.custom_vjp`, in `jax.shard_map` too; see `custom_gradient`.

    There JAX adds up the gradients of tensors that devices share, but not those that a
    hand-written gradient returns. So tensors are first marked as different on each
    device: JAX adds up the gradient of that.
    """
    import jax

    with_gradient = jax.custom_vjp(forward)
    with_gradient.defvjp(
        lambda *tensors: (forward(*tensors), tensors),
        lambda tensors, upstream: backward(upstream, *tensors),
    )

    def call(*tensors):
        axes = frozenset().union(*map(_axes_of, tensors))
        return with_gradient(*(_varying(tensor, axes) for tensor in tensors))

    return call


def _axes_of(tensor):
    """The axes of a mesh over which a tensor differs, in `jax.shard_map`."""
    import jax

    kind = jax.typeof(tensor)
    if hasattr(kind, "manual_axis_type"):
        return kind.manual_axis_type.varying
    return getattr(kind, "vma", frozenset())  # JAX 0.9 and older


def _varying(tensor, axes):
    """A tensor as one that differs over these axes too."""
    import jax

    if not (missing := tuple(axes - _axes_of(tensor))):
        return tensor
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(tensor, missing, to="varying")
    return jax.lax.pvary(tensor, missing)  # JAX 0.8 and older


def _one_or_all(upstreams):
    return upstreams if len(upstreams) > 1 else upstreams[0]


def apply_in_torch(forward, gradient, *tensors):
    """`forward` of PyTorch tensors, whose gradient is `gradient(upstreams, tensors)`.

    `keras.ops.custom_gradient` is wrong under double backward.
    """
    from keras_norms.ops.torch_autograd import Anywhere, Eager

    function = Eager if is_eager_torch() else Anywhere
    return function.apply(forward, gradient, *tensors)


def is_eager_torch() -> bool:
    """Whether PyTorch computes here, and neither compiles nor maps (`torch.func`)."""
    if keras.backend.backend() != "torch":
        return False
    import torch

    if torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active()


def is_differentiated() -> bool:
    """In a gradient on PyTorch: whether it will be differentiated itself."""
    import torch

    return torch.is_grad_enabled()


def without_gradient():
    """A context in which PyTorch keeps nothing for a backward pass."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def snapshot(value: Any) -> Any:
    """A stored value as it is now, for gradients of this call.

    PyTorch assigns variables in place.
    """
    return value.clone() if keras.backend.backend() == "torch" else value


def in_this_graph(tensors):
    """What the forward pass kept, as tensors of the graph that differentiates it.

    A gradient that has tensors of another graph cannot be differentiated itself.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        return tensors
    graph = tf.compat.v1.get_default_graph()
    return [
        t if getattr(t, "graph", None) is graph else tf.identity(t) for t in tensors
    ]
