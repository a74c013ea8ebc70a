"""Layers whose training calls checkpointing (`keras.remat`) may run twice."""

import functools
import sys
from typing import Any, NamedTuple

import keras

from keras_norms import _keras
from keras_norms.ops.custom_gradient import without_gradient
from keras_norms.ops.functions import ops

_MOST = 32  # first passes that a layer remembers
_SAME = 1e-6  # relative difference of two states that are the same
_LARGE = 1e9  # makes any other difference larger than a number of uses


class _Pass(NamedTuple):
    """A first pass: the values of all variables, and how often it was repeated."""

    before: list
    after: list
    uses: Any


class Recomputable(keras.layers.Layer):
    """Base of a layer whose training calls change its state.

    If a call runs again in the backward pass, it reads the state that the first run
    read, random seeds included, and does not change the state. `moves_state` decorates
    such methods. It is a layer, not a mixin, for the reason that `Frozen` gives.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._first_passes = _FirstPasses()

    def rematerialized_call(self, layer_call, *args, **kwargs):
        # The layer keeps little except its input, which must be kept anyway. Inside of
        # a `keras.RematScope` it therefore runs once, which works in every mode.
        return layer_call


def moves_state(call):
    """Decorate a method of a `Recomputable` that changes state in training."""

    @functools.wraps(call)
    def once(self, inputs, training=None, mask=None):
        def run():
            return call(self, inputs, training=training, mask=mask)

        def run_from(state):
            # Weights too: this scope would hide those of the one around it.
            weights = [(v, v.value) for v in self.trainable_variables]
            with keras.StatelessScope([*weights, *zip(variables, state)]):
                return run(), _values(variables)

        if not training or not self.trainable:
            return run()
        backend = keras.backend.backend()
        if backend not in _WHICH:
            raise ValueError(
                f"Layer '{self.name}' trains on {', '.join(_WHICH)} only. "
                f"Received: training=True with KERAS_BACKEND={backend}"
            )
        which = _WHICH[backend]()
        if which is None:
            return run()
        if which == "lost":
            raise ValueError(
                f"Layer '{self.name}' cannot update its statistics inside "
                "`keras.remat`, `keras.RematScope` or `jax.checkpoint` on JAX. In the "
                "recomputed function call `stateless_call` of the layer or its block, "
                "and assign the state that it returns outside."
            )
        variables = self.non_trainable_variables
        if which == "second":
            before = self._first_passes.repeated_by(run_from, self.name)
            return run_from(before)[0]
        before = _values(variables)
        outputs = run()
        self._first_passes.add(before, _values(variables))
        return outputs

    return once


class _FirstPasses:
    """The state of a layer before and after each of its latest first passes."""

    def __init__(self):
        self._passes = []
        self._graph = None
        self._repeated = 0

    def add(self, before, after):
        graph = _current_graph()
        if graph is not self._graph or self._repeated >= len(self._passes):
            self._passes, self._graph, self._repeated = [], graph, 0
        self._passes = [_Pass(before, after, 0.0), *self._passes[: _MOST - 1]]

    def repeated_by(self, run_from, name):
        """The state before the pass that this one repeats."""
        in_graph = _current_graph() is not None
        if not self._passes or in_graph != (self._graph is not None):
            raise ValueError(
                f"Layer '{name}' was called in training mode in a backward pass, but "
                "no forward pass is known that this call repeats. Call it under the "
                "gradient tape, or in the graph, that differentiates it."
            )
        self._repeated += 1
        if len(self._passes) == 1:
            return self._passes[0].before
        # The pass that leads to the same state again. If several do, for equal batches,
        # the latest one that was not repeated yet.
        gaps = []
        for each in self._passes:
            with without_gradient():
                gaps.append(_gap(run_from(each.before)[1], each.after))
        nearest = ops.min(ops.stack(gaps))
        if len(gaps) == _MOST and ops.convert_to_numpy(nearest) > _SAME:
            raise ValueError(
                f"Layer '{name}' was called more than {_MOST} times before the "
                "backward pass, and cannot tell which call is repeated. Call it fewer "
                "times in a step, or outside of the recomputed function."
            )
        ranks = [
            ops.where(gap < _SAME, each.uses, gap * _LARGE)
            for gap, each in zip(gaps, self._passes)
        ]
        index = ops.argmin(ops.stack(ranks))
        self._passes = [
            each._replace(uses=each.uses + ops.cast(index == i, "float32"))
            for i, each in enumerate(self._passes)
        ]
        states = zip(*(each.before for each in self._passes))
        return [ops.take(ops.stack(values), index, axis=0) for values in states]


def _values(variables):
    # Copies: PyTorch assigns in place.
    return [ops.copy(variable) for variable in variables]


def _gap(actual, expected):
    """The largest relative difference of two states."""
    gaps = [
        ops.max(ops.abs(a - b)) / (ops.max(ops.abs(b)) + 1e-30)
        for a, b in zip(actual, expected)
        if "float" in keras.backend.standardize_dtype(a.dtype)
    ]
    return ops.max(ops.stack([ops.cast(gap, "float32") for gap in gaps]))


def _current_graph():
    """The TensorFlow graph that is being built, `None` where there is none."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _in_tensorflow():
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


def _in_torch():
    import torch

    if torch.compiler.is_compiling():
        return None
    if torch._C._current_graph_task_id() != -1:  # within a backward pass
        return "second"
    # Checkpointing hooks what is saved, or, the reentrant one, has nothing saved.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return "first" if hooked or not torch.is_grad_enabled() else None


def _in_jax():
    frame, inside = sys._getframe(1), []
    while frame is not None:
        if frame.f_globals.get("__name__") == "jax._src.ad_checkpoint":
            break
        inside.append(frame)
        frame = frame.f_back
    else:
        return None
    scope = _keras.get_stateless_scope()
    # A scope that was entered in that function can hand updates out of it.
    names = (value for frame in inside for value in frame.f_locals.values())
    return None if scope and any(value is scope for value in names) else "lost"


# "first" if the current run may be repeated in a backward pass, "second" if it is that
# repetition, else `None`. JAX differentiates the program of the first run: there it is
# "lost" if no update can leave the traced function, else `None`.
_WHICH = {"tensorflow": _in_tensorflow, "jax": _in_jax, "torch": _in_torch}
