"""Hand-written gradients and fused passes, by the means of each backend."""

import functools

import keras

_SMALL = 2048  # elements of a sample
_NO_FORWARD_MODE = (
    "A normalisation layer in training mode has no forward-mode derivative. Use "
    "reverse mode, and reverse mode twice for the product of a Hessian and a vector."
)


def custom_gradient(forward, backward):
    """Give `forward` a hand-written gradient where the backend can hold one.

    `forward` must also be right under ordinary differentiation, which second
    derivatives on JAX use. `backward` must itself be made of differentiable operations,
    which makes reverse-over-reverse derivatives right everywhere.

    Args:
        forward: Function of positional tensors that returns one tensor. A statistic
            that depends on another argument may be passed in as an argument of its
            own, as long as `backward` accounts for that dependence and returns
            `None` for the statistic.
        backward: `backward(upstream, *tensors)`, a tuple with one gradient for each
            argument of `forward`, `None` where there is none.

    Returns:
        A function with the signature of `forward`. It has no forward-mode derivative:
        that is a `NotImplementedError` on TensorFlow and PyTorch, a `TypeError` on JAX.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        @tf.custom_gradient
        def with_gradient(*tensors):
            if _have_tangents(tensors):
                raise NotImplementedError(_NO_FORWARD_MODE)

            def gradient(upstream):
                return backward(upstream, *_in_this_graph(tensors))

            return forward(*tensors), gradient

        return with_gradient
    if backend == "jax":
        import jax

        with_gradient = jax.custom_vjp(forward)
        with_gradient.defvjp(
            lambda *tensors: (forward(*tensors), tensors),
            lambda tensors, upstream: backward(upstream, *tensors),
        )
        return with_gradient

    def gradient(upstreams, tensors):
        return backward(*upstreams, *tensors)

    return functools.partial(_torch_function().apply, forward, gradient)


@functools.cache
def _torch_function():
    """`keras.ops.custom_gradient` is wrong under double backward on PyTorch."""
    import torch

    class WithGradient(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(forward, backward, *tensors):
            return forward(*tensors)

        @staticmethod
        def setup_context(ctx, inputs, output):
            _, ctx.gradient, *tensors = inputs
            # Not in a closure: double backward must find the way to what made them.
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)

        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(_NO_FORWARD_MODE)

        @staticmethod
        def backward(ctx, *upstreams):
            if all(upstream is None for upstream in upstreams):
                return (None,) * len(ctx.needs_input_grad)
            return None, None, *ctx.gradient(upstreams, ctx.saved_tensors)

    return WithGradient


def fused(xla=False):
    """Decorate a pass over activations so that it runs as few kernels.

    The function it decorates is written in `keras.ops`. XLA fuses it with its
    neighbours, under JAX and `jit_compile=True`, and there it is left as it is.
    TensorFlow elsewhere launches a kernel for each operation, and each reads and writes
    the whole tensor: on a GPU the function is compiled by XLA, and on a CPU there are
    better ways for some passes, as there are for PyTorch.

    Tensors are positional arguments, everything static (the channel axis) is a hashable
    keyword argument. The function must not communicate between replicas.

    Args:
        xla: Whether TensorFlow compiles the function by XLA on a CPU too, where it has
            nothing better. XLA there is slow where it reduces large tensors, and fast
            where it computes element by element. `"small"`: only where the first
            argument is small, so that starting kernels is what takes the time.

    Returns:
        A decorator. What it makes of a function has `on_cpu(where)`, a decorator too:
        of a function that computes the same on a CPU, faster, where
        `where(*tensors, **static)` is true, and that needs no gradient.
    """

    def decorate(function):
        @functools.cache
        def compiled_by_tensorflow(static):
            import tensorflow as tf

            function_of_tensors = functools.partial(function, **dict(static))
            return tf.function(function_of_tensors, jit_compile=True, autograph=False)

        @functools.wraps(function)
        def call(*tensors, **static):
            backend = keras.backend.backend()
            key = tuple(sorted(static.items()))
            if backend == "tensorflow" and _have_tangents(tensors):
                return function(*tensors, **static)
            if backend == "tensorflow" and _has_gpu():
                return compiled_by_tensorflow(key)(*tensors)
            for kernel, applies_to in call.kernels:
                if applies_to(*tensors, **static):
                    with_gradient_of = _GRADIENT_OF[backend]
                    return with_gradient_of(function, kernel, static)(*tensors)
            if backend == "tensorflow" and _compiles(xla, tensors):
                return compiled_by_tensorflow(key)(*tensors)
            return function(*tensors, **static)

        def on_cpu(where):
            def register(kernel):
                call.kernels.append((kernel, where))
                return kernel

            return register

        call.kernels, call.on_cpu = [], on_cpu
        return call

    return decorate


def linear_in_half_precision(linear, x, kernel):
    """`linear(x, kernel)` in the dtype of `x`, 16 bits, with a kernel of 32.

    Compiled for TPUs by JAX, the gradient of the kernel has 32 bits before devices add
    it up, not after. It loses no digits, and goes with gradients of 32 bits that are
    due at the same time: one all-reduce in place of two.
    """

    def half(x, kernel):
        return linear(x, keras.ops.cast(kernel, x.dtype))

    if keras.backend.backend() != "jax":
        return half(x, kernel)
    import jax

    def gradient(linear, x, kernel, upstream):
        return jax.vjp(functools.partial(linear, x), kernel)[1](upstream)[0]

    def gradient_on_tpu(x, kernel, upstream):
        x, upstream = (tensor.astype(kernel.dtype) for tensor in (x, upstream))
        return gradient(linear, x, kernel, upstream)

    def backward(tensors, upstream):
        x, kernel = tensors
        dx = jax.vjp(lambda x: half(x, kernel), x)[1](upstream)[0]
        dkernel = jax.lax.platform_dependent(
            x,
            kernel,
            upstream,
            tpu=gradient_on_tpu,
            default=functools.partial(gradient, half),
        )
        return dx, dkernel

    with_gradient = jax.custom_vjp(half)
    with_gradient.defvjp(lambda *tensors: (half(*tensors), tensors), backward)
    return with_gradient(x, kernel)


@functools.cache
def _has_gpu():
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def _compiles(xla, tensors):
    """Whether TensorFlow compiles a function `fused(xla=xla)` for a CPU."""
    import tensorflow as tf

    # XLA compiles anew for every shape: only the batch may vary in size.
    samples = [tensor.shape[1:] for tensor in tf.nest.flatten(tensors)]
    if not xla or not all(shape.is_fully_defined() for shape in samples):
        return False
    return xla != "small" or samples[0].num_elements() <= _SMALL


def _have_tangents(tensors):
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of them.

    It would be wrong without a word about functions with a gradient of their own, and
    about compiled ones.
    """
    import tensorflow as tf
    from tensorflow.python.eager import forwardprop_util

    return bool(forwardprop_util.pack_tangents(tf.nest.flatten(tensors)).tangents)


def _in_this_graph(tensors):
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


def _tensorflow_gradient_of(function, kernel, static):
    """`kernel`, with the gradient of `function` for second derivatives."""
    import tensorflow as tf

    @tf.custom_gradient
    def call(*tensors):
        def gradient(*upstreams):
            inputs = _in_this_graph(tensors)
            with tf.GradientTape() as tape:
                tape.watch([t for t in inputs if t.dtype.is_floating])
                outputs = function(*inputs, **static)
            return tape.gradient(outputs, inputs, upstreams)

        return kernel(*tensors, **static), gradient

    return call


def _torch_gradient_of(function, kernel, static):
    """The same."""
    import torch

    def gradient(upstreams, tensors):
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, for one of the tensors may have been made from another one.
            tensors = [tensor.view_as(tensor) for tensor in tensors]
            outputs = function(*tensors, **static)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = [pair for pair in zip(outputs, upstreams) if pair[1] is not None]
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
    return functools.partial(_torch_function().apply, kernel, gradient)


_GRADIENT_OF = {"tensorflow": _tensorflow_gradient_of, "torch": _torch_gradient_of}
