"""One layer, run forward and backward or at inference, on each backend."""

import keras

from keras_norms import CBN

BACKEND = keras.backend.backend()


def cbn(**options):
    """A `CBN` that got a learning rate, as from AMAT."""
    layer = CBN(**options)
    layer.set_learning_rate(0.01)
    return layer


def training_step(layer, x, g, jit_compile):
    """Return a function that runs forward and backward once, to the end.

    Args:
        layer: A built layer. Gradients are taken with respect to its input and its
            trainable weights, and its moving statistics are updated.
        x, g: Tensors, the input and the upstream gradient of the output.
        jit_compile: Whether XLA compiles it, on TensorFlow and JAX.
    """
    trained, moving = layer.trainable_variables, layer.non_trainable_variables
    parameters, state = ([v.value for v in each] for each in (trained, moving))
    if BACKEND == "tensorflow":
        import tensorflow as tf

        def step(x, g):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
            return y, tape.gradient(y, [x, *parameters], output_gradients=g)

        step = tf.function(step, jit_compile=jit_compile)

        def run():
            step(x, g)
            tf.test.experimental.sync_devices()  # which takes a hundredth of a ms

        return run
    if BACKEND == "jax":
        import jax

        def step(parameters, state, x, g, *memory_of_the_last_step):
            def forward(parameters, x):
                # `stateless_call` gives `training` to layers that do not take it.
                given = zip([*trained, *moving], [*parameters, *state])
                with keras.StatelessScope(given) as scope:
                    y = layer(x, training=True)
                return y, [scope.get_current_value(v) for v in moving]

            y, pullback, state = jax.vjp(forward, parameters, x, has_aux=True)
            dparameters, dx = pullback(g)
            return (y, dx), (state, dparameters)

        if jit_compile:
            # Otherwise the first touch of fresh memory takes longer than the layer.
            step = jax.jit(step, donate_argnums=(4, 5), keep_unused=True)
        large = [x + 0, g + 0]

        def run():
            large[:], _ = jax.block_until_ready(step(parameters, state, x, g, *large))

        return run

    import torch

    def run():
        leaf = x.detach().requires_grad_()
        y = layer(leaf, training=True)
        torch.autograd.grad(y, [leaf, *parameters], g)
        if leaf.is_cuda:
            torch.cuda.synchronize()

    return run


def inference(layer, x, jit_compile):
    """The same for a layer, or a network, at inference."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        call = tf.function(lambda x: layer(x), jit_compile=jit_compile)

        def run():
            call(x)
            tf.test.experimental.sync_devices()

        return run
    if BACKEND == "jax":
        import jax

        def call(weights, x, memory_of_the_last_call=None):
            return layer.stateless_call(*weights, x)[0]

        weights = [
            [v.value for v in variables]
            for variables in (layer.trainable_variables, layer.non_trainable_variables)
        ]
        made = jax.eval_shape(call, weights, x)
        memory = [jax.numpy.zeros(made.shape, made.dtype)]
        if jit_compile:
            call = jax.jit(call, donate_argnums=2, keep_unused=True)

        def run():
            memory[0] = jax.block_until_ready(call(weights, x, memory[0]))

        return run

    import torch

    def run():
        with torch.no_grad():
            layer(x)
        if x.is_cuda:
            torch.cuda.synchronize()

    return run
