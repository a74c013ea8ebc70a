"""Hand-written gradients and compilation: the one place where backends differ.

Everything else in `keras_norms.ops` is written once, in `keras.ops`.
"""

import functools

import keras


def custom_gradient(forward, backward):
    """Give `forward` a hand-written gradient where the backend can hold one.

    `forward` must also be right under ordinary differentiation. PyTorch uses it as
    it is (its custom functions are silently wrong under double backward), and so do
    second derivatives on JAX. `backward` must itself be made of differentiable
    operations, which makes reverse-over-reverse derivatives right everywhere.

    Args:
        forward: Function of positional tensors that returns one tensor. A statistic
            that depends on another argument may be passed in as an argument of its
            own, as long as `backward` accounts for that dependence and returns
            `None` for the statistic.
        backward: `backward(upstream, *tensors)`, a tuple with one gradient for each
            argument of `forward`, `None` where there is none.

    Returns:
        A function with the signature of `forward`. It has no forward-mode derivative.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        @tf.custom_gradient
        def with_gradient(*tensors):
            return forward(*tensors), lambda upstream: backward(upstream, *tensors)

        return with_gradient
    if backend == "jax":
        import jax

        with_gradient = jax.custom_vjp(forward)
        with_gradient.defvjp(
            lambda *tensors: (forward(*tensors), tensors),
            lambda tensors, upstream: backward(upstream, *tensors),
        )
        return with_gradient
    return forward


def fused(tensorflow_cpu=None):
    """Decorate a pass over activations so that it runs as few kernels.

    The function it decorates is written in `keras.ops`. JAX and `jit_compile=True` fuse
    it with its neighbours, and it is left as it is. TensorFlow elsewhere launches a
    kernel for each operation, and each reads and writes the whole tensor: there the
    function is compiled by XLA on a GPU, and on a CPU, where XLA is slow, replaced.

    Tensors are positional arguments, everything static (the channel axis) is a hashable
    keyword argument. The function must not communicate between replicas.

    Args:
        tensorflow_cpu: Name of the function in `keras_norms.ops.tensorflow_cpu` that
            computes the same. It takes the same arguments and needs no gradient.
    """

    def decorate(function):
        @functools.cache
        def compiled(static):
            import tensorflow as tf

            static = dict(static)
            return tf.function(functools.partial(function, **static), jit_compile=True)

        @functools.wraps(function)
        def call(*tensors, **static):
            if keras.backend.backend() != "tensorflow":
                return function(*tensors, **static)
            if _has_gpu():
                return compiled(tuple(sorted(static.items())))(*tensors)
            from keras_norms.ops import tensorflow_cpu as kernels

            if tensorflow_cpu and kernels.apply_to(*tensors, **static):
                kernel = getattr(kernels, tensorflow_cpu)
                return _with_gradient_of(function, kernel, static)(*tensors)
            return function(*tensors, **static)

        return call

    return decorate


@functools.cache
def _has_gpu():
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def _with_gradient_of(function, kernel, static):
    """`kernel`, with the gradient of `function` for second derivatives."""
    import tensorflow as tf

    @tf.custom_gradient
    def call(*tensors):
        def gradient(*upstreams):
            with tf.GradientTape() as tape:
                tape.watch([t for t in tensors if t.dtype.is_floating])
                outputs = function(*tensors, **static)
            return tape.gradient(outputs, tensors, upstreams)

        return kernel(*tensors, **static), gradient

    return call
