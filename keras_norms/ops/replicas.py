"""Sums over the replicas of a `tf.distribute` strategy.

JAX needs none: under `keras.distribution` an array is the global one, and the compiler
adds up what its devices hold. PyTorch replicas normalise each by themselves.
"""

import keras
from keras import ops

from keras_norms._types import Tensor


def check_strategy(layer: keras.layers.Layer) -> None:
    """Raise a ValueError under a `tf.distribute` strategy that Keras 3 cannot train.

    Args:
        layer: The `keras.layers.Layer` that is being built, for the message.
    """
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
            "Keras 3 does not train under this strategy. Use "
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
    """How many TensorFlow replicas run this step together."""
    context = _context()
    return 1 if context is None else context.num_replicas_in_sync


def replica_number() -> Tensor:
    """Which of the TensorFlow replicas this is, from 0 on, an integer or a scalar."""
    context = _context()
    return 0 if context is None else context.replica_id_in_sync_group


def sum_over_replicas(x: Tensor) -> Tensor:
    """Add `x` of all TensorFlow replicas; `x` itself where there is one."""
    context = _context()
    return x if context is None else context.all_reduce("sum", x)


def gather_replicas(x: Tensor) -> Tensor:
    """Stack `x` of all TensorFlow replicas along a new first axis."""
    context = _context()
    if context is None:
        return x[None]
    replicas = context.num_replicas_in_sync
    # Each replica fills its own slot, so that the sum loses nothing.
    slot = ops.one_hot(context.replica_id_in_sync_group, replicas, dtype=x.dtype)
    slot = ops.reshape(slot, (replicas,) + (1,) * len(x.shape))
    return sum_over_replicas(slot * x)


def _context():
    """TensorFlow's replica context where there are several replicas, else `None`."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context
