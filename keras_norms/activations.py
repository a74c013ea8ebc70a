"""ReLU whose gradient reads its output, on every backend."""

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

    `convert` to CBN puts it in the place of `"relu"`; `fold` and `convert` to norms of
    Keras bring `"relu"` back.

    Args:
        x: Tensor of floats.

    Returns:
        Tensor of the same shape and dtype.

    Example:

    >>> keras.layers.Conv2D(64, 3, activation=keras_norms.activations.relu)
    """
    if keras.backend.backend() != "jax" or isinstance(x, keras.KerasTensor):
        return ops.relu(x)
    return _relu_of_jax()(ops.convert_to_tensor(x))


@functools.cache
def _relu_of_jax():
    import jax

    @jax.custom_jvp
    @jax.jit
    def relu(x):
        return jax.numpy.maximum(x, 0)

    def slope(tangent, output, _):
        # Without the barrier XLA keeps the input and computes the output again.
        output = jax.lax.optimization_barrier(jax.lax.stop_gradient(output))
        return jax.lax.select(output > 0, tangent, jax.numpy.zeros_like(tangent))

    relu.defjvps(slope)
    return relu
