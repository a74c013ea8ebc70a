"""Whether a block is the calls that it makes: in training, at inference, in values."""

import contextlib
import re

import keras
import numpy as np
from keras import ops, tree
from keras.utils import is_keras_tensor

from keras_norms.surgery._graph.units import to_float64


def difference(one, other, ours, others, real_tensor):
    """Say why calls of a block at inference and in training are not one, or `None`.

    `ours` and `others` are the calls that they make; `real_tensor` gives what a tensor
    stands for.
    """
    if _form(one, ours, real_tensor) != _form(other, others, real_tensor):
        return "it makes other calls in training than at inference"
    for mine, yours in zip(ours, others):
        modes = [call.kwargs.get("training", "any") for call in (mine, yours)]
        if modes not in (["any", "any"], [False, True]):
            return (
                f"it calls '{mine.operation.name}' with training={modes[0]} "
                "whether it is trained or not"
            )
    return _wrong_values(one, ours, real_tensor)


def _form(entry, calls, real_tensor):
    """A call of a block as text, in which tensors are counted."""
    numbers = {}

    def text(leaf):
        if not is_keras_tensor(leaf):
            return repr(leaf)
        return str(numbers.setdefault(id(real_tensor(leaf)), len(numbers)))

    lines = [str(tree.map_structure(text, entry.args))]
    for operation, args, kwargs, outputs in calls:
        kwargs = {k: v for k, v in kwargs.items() if k != "training"}
        settings = id(operation)
        if not getattr(operation, "variables", ()):  # It may be made in the call.
            settings = {**operation.get_config(), "name": None}
        made = tree.map_structure(text, (args, kwargs, outputs))
        lines.append(f"{type(operation)} {settings} {made}")
    return [*lines, str(tree.map_structure(text, entry.outputs))]


def _wrong_values(entry, calls, real_tensor):
    """What is wrong with what `calls` make of random data, or `None`."""
    leaves = tree.flatten((entry.args, entry.kwargs))
    inputs = [real_tensor(x) for x in leaves if is_keras_tensor(x)]
    block = entry.operation

    def run(state, arrays):
        """What the calls make, and what the block makes."""
        values = {id(x): y for x, y in zip(inputs, arrays)}

        def fill(*structures):
            return tree.map_structure(
                lambda leaf: values.get(id(real_tensor(leaf)), leaf), structures
            )

        with keras.StatelessScope(zip(block.variables, state)):
            args, kwargs = fill(entry.args, entry.kwargs)
            expected = block(*args, **{**kwargs, "training": False})
            for call in calls:
                args, kwargs = fill(call.args, call.kwargs)
                if isinstance(call.operation, keras.layers.Layer):
                    kwargs["training"] = False
                made = tree.flatten(call.operation(*args, **kwargs))
                values.update((id(x), y) for x, y in zip(call.outputs, made))
        return tree.flatten(fill(entry.outputs)), tree.flatten(expected)

    if keras.backend.backend() == "jax":
        import jax

        run = jax.jit(run)  # It would compile each operation by itself.
    rng = np.random.default_rng(0)
    try:
        with quick_compilation():
            state = [v.value for v in block.variables]
            made = run(state, [_draw(rng, x) for x in inputs])
    except Exception as e:
        return f"it cannot be tried on random data: {first_line(e)}"
    limit = 1e-2 if "16" in block.compute_dtype else 1e-5
    for x, y in zip(*made, strict=True):
        x, y = to_float64(x), to_float64(y)
        size = np.max(np.abs(y), initial=0, where=np.isfinite(y))
        if x.shape != y.shape or not np.allclose(
            x, y, rtol=0, atol=limit * size, equal_nan=True
        ):
            return "its layers called one by one give other values"
    return None


def _draw(rng, tensor):
    """Random data for a symbolic tensor; for integers and masks, zeros and ones."""
    shape = [32 if n is None else n for n in tensor.shape]
    shape[:1] = [2 if n is None else n for n in tensor.shape[:1]]
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    made = rng.normal(size=shape)
    made = made if keras.backend.is_float_dtype(dtype) else made > 0
    return ops.cast(made, dtype)


@contextlib.contextmanager
def quick_compilation():
    """Let JAX compile fast, not well, what runs a few times only."""
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


def first_line(error):
    """What an error says, less what Keras puts before it."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered"):
        lines = lines[1:]
    return lines[0] if lines else type(error).__name__
