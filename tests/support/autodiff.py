"""Gradients of a layer's output, eager or compiled, on whichever backend runs."""

import keras
from keras.ops import convert_to_tensor

from tests.support.backend import BACKEND, numpy

MODES = {
    "tensorflow": ("eager", "graph", "jit_compile"),
    "jax": ("eager", "jit_compile"),
    "torch": ("eager",),
}[BACKEND]
# No compilation where it costs more than it saves: JAX compiles in every mode.
FAST = "jit_compile" if BACKEND == "jax" else "eager"


def compiled(function, mode):
    """Return `function` of tensors as the backend runs it in `mode`."""
    if mode == "eager":
        return function
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=mode == "jit_compile")
    import jax

    return jax.jit(function)


def training_step(layer, loss, mode="eager", **call_arguments):
    """A function of x: a training call of a built layer, which keeps its state.

    It returns the output, and the gradients of the loss with respect to x and to each
    trainable variable, as arrays. The loss is a scalar that `loss` computes from the
    output. More tensors for the call, such as a mask, are passed by name.
    """

    def step(x, parameters, state, tensors):
        def scalar(x, parameters):
            y, new_state = layer.stateless_call(
                parameters, state, x, training=True, **call_arguments, **tensors
            )
            return loss(y), (y, new_state)

        return _gradient(scalar, x, parameters)

    step = compiled(step, mode)

    def run(x, **tensors):
        parameters = [v.value for v in layer.trainable_variables]
        state = [v.value for v in layer.non_trainable_variables]
        tensors = {name: convert_to_tensor(value) for name, value in tensors.items()}
        (y, state), (dx, dparameters) = step(
            convert_to_tensor(x), parameters, state, tensors
        )
        for variable, value in zip(layer.non_trainable_variables, state):
            variable.assign(value)
        return tuple(map(numpy, (y, dx, *dparameters)))

    return run


def second_derivative(layer, x, loss, directions, mode="eager", **call_arguments):
    """Gradients, like those of `training_step`, of its gradients times the directions.

    Reverse over reverse, in the layer's current state.
    """
    parameters = [v.value for v in layer.trainable_variables]
    state = [v.value for v in layer.non_trainable_variables]
    directions = [convert_to_tensor(direction) for direction in directions]

    def step(x, parameters):
        def scalar(x, parameters):
            def inner(x, parameters):
                y, _ = layer.stateless_call(
                    parameters, state, x, training=True, **call_arguments
                )
                return loss(y), ()

            _, (dx, dparameters) = _gradient(inner, x, parameters, keep=True)
            products = zip(directions, [dx, *dparameters])
            return sum(keras.ops.sum(a * b) for a, b in products), ()

        return _gradient(scalar, x, parameters)[1]

    dx, dparameters = compiled(step, mode)(convert_to_tensor(x), parameters)
    return [numpy(v) for v in (dx, *dparameters)]


def _gradient(scalar, x, parameters, keep=False):
    """`scalar` returns a number and something else; return the latter and gradients."""
    if BACKEND == "jax":
        import jax

        (_, aux), gradients = jax.value_and_grad(scalar, (0, 1), has_aux=True)(
            x, parameters
        )
        return aux, gradients
    if BACKEND == "tensorflow":
        import tensorflow as tf

        x = tf.identity(x)
        with tf.GradientTape() as tape:
            tape.watch([x, *parameters])
            value, aux = scalar(x, parameters)
        dx, *rest = tape.gradient(value, [x, *parameters])
        return aux, (dx, rest)
    import torch

    if not keep:
        x, *parameters = (v.detach().requires_grad_() for v in (x, *parameters))
    with torch.enable_grad():
        value, aux = scalar(x, parameters)
        dx, *rest = torch.autograd.grad(value, [x, *parameters], create_graph=keep)
    return aux, (dx, rest)
