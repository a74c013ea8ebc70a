"""What runs a few times only is not worth compiling well."""

import contextlib

import keras
from keras import tree

FEW = 8


@contextlib.contextmanager
def cheap_compilation():
    """Let JAX compile fast, not well: it has to compile."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def is_few(x, steps, batch_size):
    """Whether inputs as `predict` takes them are known to be a few batches."""
    first = (tree.flatten(x) or [()])[0]
    try:
        count = len(first) if steps is None else steps
    except TypeError:
        return False  # It does not know its length.
    is_array = steps is None and hasattr(first, "shape")
    return count <= FEW * ((batch_size or 32) if is_array else 1)
