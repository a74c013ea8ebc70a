"""Gradients of a layer's output, eager or compiled, on whichever backend runs."""

import keras

from tests.support.backend import BACKEND, numpy

MODES = {
    "tensorflow": ("eager", "graph", "jit_compile"),
    "jax": ("eager", "jit_compile"),
    "torch": ("eager",),
}[BACKEND]
# Without compilation where it costs more than it saves: JAX compiles in every mode.
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
    """Return a function of x: a training call of a built layer, which keeps its state.

    Args:
        loss: Function of the output tensor that returns a scalar tensor.

    Returns:
        A function that returns the output, and the gradients of the loss with respect
        to x and to each trainable variable, as NumPy arrays. It takes more tensors for
        the call, such as a mask, by name.
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
        tensors = {name: _tensor(value) for name, value in tensors.items()}
        (y, state), (dx, dparameters) = step(_tensor(x), parameters, state, tensors)
        for variable, value in zip(layer.non_trainable_variables, state):
            variable.assign(value)
        return tuple(map(numpy, (y, dx, *dparameters)))

    return run


def second_derivative(layer, x, loss, direction, mode="eager"):
    """d/dx of sum(direction * d loss/dx), reverse over reverse, state unchanged."""
    parameters = [v.value for v in layer.trainable_variables]
    state = [v.value for v in layer.non_trainable_variables]
    direction = _tensor(direction)

    def step(x):
        def scalar(x, _):
            def inner(x, _):
                y, _ = layer.stateless_call(parameters, state, x, training=True)
                return loss(y), ()

            _, (dx, _) = _gradient(inner, x, [], keep=True)
            return keras.ops.sum(direction * dx), ()

        return _gradient(scalar, x, [])[1][0]

    return numpy(compiled(step, mode)(_tensor(x)))


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

    x = x if keep else x.detach().requires_grad_()
    parameters = [p.detach().requires_grad_() for p in parameters]
    with torch.enable_grad():
        value, aux = scalar(x, parameters)
        dx, *rest = torch.autograd.grad(value, [x, *parameters], create_graph=keep)
    return aux, (dx, rest)


def _tensor(x):
    return keras.ops.convert_to_tensor(x)
