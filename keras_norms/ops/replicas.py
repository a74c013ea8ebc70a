"""Sums over replicas of a `tf.distribute` strategy or of `torch.distributed`.

JAX needs none: under `keras.distribution` arrays are global, and the compiler adds up
what the devices hold.
"""

import functools
import types
import warnings

import keras
from keras import ops

from keras_norms._types import Tensor


def check_strategy(layer: keras.layers.Layer) -> None:
    """Raise a ValueError under a `tf.distribute` strategy that Keras 3 cannot train."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    if isinstance(
        strategy,
        tf.distribute.MultiWorkerMirroredStrategy
        | tf.distribute.ParameterServerStrategy,
    ):
        raise ValueError(
            "Keras 3 cannot train under this strategy. Use "
            "tf.distribute.MirroredStrategy for the GPUs of one machine, "
            "tf.distribute.TPUStrategy for TPUs, and for many machines the JAX "
            "backend with keras.distribution.initialize and "
            f"keras.distribution.DataParallel. Received: layer '{layer.name}' under "
            f"{type(strategy).__name__}"
        )


def devices_share_batches() -> bool:
    """Whether a batch is divided among the JAX devices of a `keras.distribution`."""
    on_jax = keras.backend.backend() == "jax"
    return on_jax and keras.distribution.distribution() is not None


def number_of_replicas() -> int:
    """How many replicas run this step together."""
    context = _context()
    return 1 if context is None else context.num_replicas_in_sync


def replica_number() -> Tensor:
    """Which of the replicas this is, from 0 on, an integer or a scalar."""
    context = _context()
    return 0 if context is None else context.replica_id_in_sync_group


def sum_over_replicas(x: Tensor) -> Tensor:
    """Add `x` of all replicas; `x` itself where there is one."""
    context = _context()
    return x if context is None else context.all_reduce("sum", x)


def gather_replicas(x: Tensor) -> Tensor:
    """Stack `x` of all replicas along a new first axis."""
    context = _context()
    if context is None:
        return x[None]
    replicas = context.num_replicas_in_sync
    # Each replica fills its own slot: the sum loses nothing.
    slot = ops.one_hot(context.replica_id_in_sync_group, replicas, dtype=x.dtype)
    slot = ops.reshape(slot, (replicas,) + (1,) * len(x.shape))
    return sum_over_replicas(slot * x)


def warn_of_drift(layer: keras.layers.Layer) -> None:
    """Warn once that the averages of PyTorch processes differ.

    It does not average them: an unexpected collective would hang a program in which
    only one process trains, and mix unrelated models.
    """
    if keras.backend.backend() == "torch" and _context() and not layer.synchronized:
        _warn_of_drift_once()


@functools.cache
def _warn_of_drift_once():
    warnings.warn(
        "A layer of keras_norms without `synchronized=True` is trained in several "
        "processes of torch.distributed: its moving averages differ between them. If "
        "they train one model, use `synchronized=True`, or average the moving averages "
        "before the model is saved (docs/groups.md).",
        stacklevel=2,
    )


def _context():
    """The context of a replica where there are several replicas, else `None`."""
    if keras.backend.backend() == "torch":
        return _torch_context()
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context


def _torch_context():
    """The default group of `torch.distributed`, as a replica context of TensorFlow."""
    import torch

    group = torch.distributed
    if not group.is_available() or not group.is_initialized():
        return None
    if group.get_world_size() == 1:
        return None
    return types.SimpleNamespace(
        num_replicas_in_sync=group.get_world_size(),
        replica_id_in_sync_group=group.get_rank(),
        all_reduce=lambda operation, x: _torch_sum().apply(x),
    )


@functools.cache
def _torch_sum():
    """A sum over processes, differentiable any number of times."""
    import torch

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            total = x.clone(memory_format=torch.contiguous_format)
            torch.distributed.all_reduce(total)
            return total

        @staticmethod
        def backward(ctx, upstream):
            return None if upstream is None else Sum.apply(upstream)

    return Sum
