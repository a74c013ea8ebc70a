"""Whether a function is run once more in the backward pass, as `keras.remat` does."""

import contextlib
import sys

import keras


def recomputation(scope):
    """Which run of a function this is that is run again in the backward pass.

    Args:
        scope: The `keras.StatelessScope` that takes updates of variables, or `None`.

    Returns:
        `"first"` where what runs now may be run once more in a backward pass,
        `"second"` where it is, and `None` elsewhere. On JAX, which differentiates the
        program of the first run, `"lost"` where no update can leave the function that
        is traced, and `None` elsewhere.
    """
    return _WHICH[keras.backend.backend()](scope)


def current_graph():
    """The TensorFlow graph that is being built, `None` where there is none."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def without_gradient():
    """A context in which PyTorch keeps nothing for a backward pass."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def _in_tensorflow(scope):
    # tf.recompute_grad leaves no other trace than the names of its functions.
    found, frame = None, sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("inner", "inner_recompute_grad") and (
            frame.f_globals.get("__name__") == "tensorflow.python.ops.custom_gradient"
        ):
            if name == "inner_recompute_grad":
                return "second"
            found = "first"
        frame = frame.f_back
    return found


def _in_torch(scope):
    import torch

    if torch.compiler.is_compiling():
        return None
    if torch._C._current_graph_task_id() != -1:  # within a backward pass
        return "second"
    # Checkpointing hooks what is saved, or, the reentrant one, has nothing saved.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return "first" if hooked or not torch.is_grad_enabled() else None


def _in_jax(scope):
    frame, inside = sys._getframe(2), []
    while frame is not None:
        if frame.f_globals.get("__name__") == "jax._src.ad_checkpoint":
            break
        inside.append(frame)
        frame = frame.f_back
    else:
        return None
    # A scope that was entered in that function can hand updates out of it.
    names = (value for frame in inside for value in frame.f_locals.values())
    return None if scope and any(value is scope for value in names) else "lost"


_WHICH = {"tensorflow": _in_tensorflow, "jax": _in_jax, "torch": _in_torch}
