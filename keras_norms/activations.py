"""ReLUs whose gradients read their output, on every backend."""

import functools

import keras
from keras import ops

from keras_norms._types import Tensor


def relu(x: Tensor) -> Tensor:
    """Compute `max(x, 0)`: the activation "relu", with less memory in training on JAX.

    JAX's own gradient reads the input: a training step keeps the input, and what the
    next layers keep of the output. This one reads the output, as TensorFlow's and
    PyTorch's do. Values and gradients are the same. It costs memory where the input is
    kept anyway, such as a concatenation of tensors that other layers read too. On a CPU
    it saves memory from JAX 0.10.2 on.

    `convert` to CBN replaces `"relu"` by it, and `"relu6"` by `relu6`. `fold` and
    `convert` to norms of Keras undo this.

    Args:
        x: Tensor of floats.

    Returns:
        Tensor of the same shape and dtype.

    Example:

    >>> keras.layers.Conv2D(64, 3, activation=keras_norms.activations.relu)
    """
    return _relu(x, ops.relu, None)


def relu6(x: Tensor) -> Tensor:
    """Compute `min(max(x, 0), 6)`: the activation "relu6", with less memory on JAX.

    As `relu` of this package, but on GPUs its gradient reads the input, which moves
    fewer bytes there.

    Args:
        x: Tensor of floats.

    Returns:
        Tensor of the same shape and dtype.
    """
    return _relu(x, ops.relu6, 6)


# Not as decorators: these have no types, and neither would the functions.
keras.saving.register_keras_serializable("keras_norms")(relu)
keras.saving.register_keras_serializable("keras_norms")(relu6)


def _relu(x, of_keras, highest):
    if keras.backend.backend() != "jax" or isinstance(x, keras.KerasTensor):
        return of_keras(x)
    return _relu_of_jax(highest)(ops.convert_to_tensor(x))


@functools.cache
def _relu_of_jax(highest):
    import jax

    @jax.custom_jvp
    @jax.jit
    def relu(x):
        return jax.numpy.clip(x, 0, highest)

    def passes(x):
        return x > 0 if highest is None else (x > 0) & (x < highest)

    def passes_by_output(_, output):
        # Without the barrier XLA keeps the input and computes the output again.
        return passes(jax.lax.optimization_barrier(output))

    @relu.defjvp
    def derivative(primals, tangents):
        (tangent,) = tangents
        output = jax.lax.platform_dependent(
            relu(*primals), cpu=_written_on_cpu, default=lambda x: x
        )
        both = jax.lax.stop_gradient((*primals, output))
        if highest is None:
            passed = passes_by_output(*both)
        else:
            # On GPUs convolutions compute relu too, but not relu6: they write its input
            # anyway, and the output would be one more tensor.
            passed = jax.lax.platform_dependent(
                *both,
                cpu=passes_by_output,
                tpu=passes_by_output,
                default=lambda x, _: passes(x),
            )
        return output, jax.lax.select(passed, tangent, jax.numpy.zeros_like(tangent))

    return relu


def _written_on_cpu(x):
    """Return `x`, which XLA on a CPU then writes to memory and never recomputes.

    There XLA removes optimization barriers before it fuses operations. But it does not
    fuse across a call that it may not inline, and such a call copies nothing.
    """
    import jax
    from jax.experimental.xla_metadata import set_xla_metadata

    with set_xla_metadata(inlineable="false"):
        # Not the identity: JAX removes a call that returns its argument.
        return jax.jit(jax.lax.optimization_barrier)(x)
