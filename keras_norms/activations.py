"""ReLUs whose gradients read their output, on every backend."""

import functools

import keras
from keras import ops

from keras_norms._types import Tensor


@keras.saving.register_keras_serializable("keras_norms")
def relu(x: Tensor) -> Tensor:
    """Compute `max(x, 0)`: the activation "relu", with less memory in training on JAX.

    JAX's own gradient reads the input, so that a training step keeps the input and what
    the next layers keep of the output. This one reads the output, as TensorFlow's and
    PyTorch's do. Values and gradients are the same. It costs memory where the input is
    kept anyway, as a concatenation of what other layers read too.

    `convert` to CBN puts it in the place of `"relu"`, and `relu6` in that of `"relu6"`;
    `fold` and `convert` to norms of Keras bring these back.

    Args:
        x: Tensor of floats.

    Returns:
        Tensor of the same shape and dtype.

    Example:

    >>> keras.layers.Conv2D(64, 3, activation=keras_norms.activations.relu)
    """
    return ops.relu(x) if _is_not_of_jax(x) else _of_jax(None)(ops.convert_to_tensor(x))


@keras.saving.register_keras_serializable("keras_norms")
def relu6(x: Tensor) -> Tensor:
    """Compute `min(max(x, 0), 6)`, as `relu` of this package does `max(x, 0)`.

    It is to "relu6" and `keras.layers.ReLU(6)` what `relu` is to "relu".

    Args:
        x: Tensor of floats.

    Returns:
        Tensor of the same shape and dtype.
    """
    return ops.relu6(x) if _is_not_of_jax(x) else _of_jax(6)(ops.convert_to_tensor(x))


def _is_not_of_jax(x):
    return keras.backend.backend() != "jax" or isinstance(x, keras.KerasTensor)


@functools.cache
def _of_jax(highest):
    import jax

    @jax.custom_jvp
    @jax.jit
    def relu(x):
        return jax.numpy.clip(x, 0, highest)

    def slope(tangent, output, _):
        output = kept(jax.lax.stop_gradient(output))
        passes = output > 0
        if highest is not None:
            passes &= output < highest
        return jax.lax.select(passes, tangent, jax.numpy.zeros_like(tangent))

    # Without the barrier XLA keeps the input and computes the output again. On GPUs
    # that is better for relu6, which it does not put into convolutions as it does relu.
    kept = jax.lax.optimization_barrier
    if highest is not None:
        kept = functools.partial(
            jax.lax.platform_dependent, tpu=kept, default=lambda output: output
        )
    relu.defjvps(slope)
    return relu
