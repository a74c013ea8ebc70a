"""Derivatives and compilation of functions of tensors: where the backends differ."""

import contextlib

import keras


@contextlib.contextmanager
def twice_differentiable():
    """Let operations that Keras calls have a second derivative."""
    backend = keras.backend.backend()
    if backend == "jax":
        yield
        return
    if backend == "tensorflow":
        import tensorflow as tf

        module, name, replacement = tf.nn, "moments", _moments
    else:
        import torch

        module, name = torch.nn.functional, "scaled_dot_product_attention"
        replacement = _attention(getattr(module, name))
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


def _moments(x, axes, shift=None, keepdims=False, name=None):
    """Compute `tf.nn.moments` without a stopped gradient.

    TensorFlow's stops it at the mean in the variance: its first derivative is right,
    because deviations sum to zero, but its second is not.
    """
    import tensorflow as tf

    wide = tf.float32 if x.dtype in (tf.float16, tf.bfloat16) else x.dtype
    y = tf.cast(x, wide)
    mean = tf.reduce_mean(y, axes, keepdims=keepdims)
    variance = tf.math.reduce_variance(y, axes, keepdims=keepdims)
    return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)


def _attention(function):
    """Attention of PyTorch by plain operations, which have a second derivative."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(*args, **kwargs):
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **kwargs)

    return attention


def differentiate(function, values, differentiable=False):
    """Compute a scalar function of tensors, and its gradients: zeros for unused ones.

    `differentiable` says that the gradients will be differentiated in turn.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(values)
            result = function(values)
        gradients = tape.gradient(result, values, unconnected_gradients="zero")
        return result, [tf.convert_to_tensor(g) for g in gradients]
    if backend == "jax":
        import jax

        return jax.value_and_grad(function)(values)
    import torch

    if not differentiable:
        values = [v.detach().requires_grad_() for v in values]
    with torch.enable_grad():
        result = function(values)
        if not result.requires_grad:
            return result, [torch.zeros_like(v) for v in values]
        gradients = torch.autograd.grad(
            result, values, create_graph=differentiable, materialize_grads=True
        )
    return result.detach(), list(gradients)


def randomness():
    """Read PyTorch's generators: Keras gives its dropout no seed there."""
    if keras.backend.backend() != "torch":
        return None
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.get_rng_state(), {d: torch.cuda.get_rng_state(d) for d in devices}


@contextlib.contextmanager
def drawing_from(state):
    """A scope that draws random numbers from a state, and restores the generators."""
    if state is None:
        yield
        return
    import torch

    of_cpu, of_devices = state
    with torch.random.fork_rng(of_devices):
        torch.set_rng_state(of_cpu)
        for device, device_state in of_devices.items():
            torch.cuda.set_rng_state(device_state, device)
        yield


def compiler(model):
    """Return a decorator that compiles functions like the model's training step."""
    backend = keras.backend.backend()
    if backend == "torch" or getattr(model, "run_eagerly", False):
        return lambda function: function
    if backend == "jax":
        import jax

        return jax.jit
    import tensorflow as tf

    jit_compile = model.compiled and bool(model.jit_compile)

    def compiled_by_tensorflow(function):
        compiled = tf.function(function, jit_compile=jit_compile, autograph=False)
        # A function for each layer is intended.
        compiled._omit_frequent_tracing_warning = True
        return compiled

    return compiled_by_tensorflow
