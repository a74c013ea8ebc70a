"""One training on many devices of a machine: each batch is divided among them.

    mirrored        TensorFlow, all GPUs, by tf.distribute.MirroredStrategy
    tpu             TensorFlow, a TPU, by tf.distribute.TPUStrategy; the environment
                    variable TPU_NAME says which, that of this machine if it is not set
    data_parallel   JAX, all devices of a slice or machine, by keras.distribution

With TensorFlow, a norm of batch statistics takes those of its own device's part of the
batch; with JAX, those of the whole batch.
"""

import contextlib
import itertools
import os

import keras

from recipes.data import TEST_BATCH_SIZE

BACKENDS = {"mirrored": "tensorflow", "tpu": "tensorflow", "data_parallel": "jax"}


def get(name):
    """Makes a strategy, whose `scope` and `distribute` `recipes.train.train` calls.

    Args:
        name: A key of `BACKENDS`.
    """
    backend = keras.backend.backend()
    if BACKENDS.get(name) != backend:
        known = [key for key, value in BACKENDS.items() if value == backend]
        raise ValueError(
            f"Argument `strategy` must be one of {known} on the backend {backend}. "
            f"Received: strategy={name!r}"
        )
    return DataParallel() if name == "data_parallel" else Replicas(name)


class Replicas:
    """`tf.distribute`, with batches of a known size, as TPUs need them.

    Args:
        name: `"mirrored"` or `"tpu"`.
    """

    def __init__(self, name):
        import tensorflow as tf

        if name == "tpu":
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(
                tpu=os.environ.get("TPU_NAME", "local")
            )
            self._strategy = tf.distribute.TPUStrategy(resolver)
        else:
            self._strategy = tf.distribute.MirroredStrategy()
        self.devices = self._strategy.num_replicas_in_sync

    def scope(self):
        return self._strategy.scope()

    def distribute(self, source, config):
        """`source`, see `recipes.data.source`, whose batches are `tf.data.Dataset`."""
        _check_batch(config["batch_size"], self.devices)
        if isinstance(source.test, tuple):
            return _Datasets(source, config["batch_size"], self.devices)
        return source


class _Datasets:
    def __init__(self, source, batch_size, devices):
        import tensorflow as tf

        self._source = source
        self._batch_size = batch_size
        self.image_shape = source.image_shape
        self.num_classes = source.num_classes
        self.steps = source.steps
        count = len(source.test[1])
        sizes = [
            size
            for size in range(devices, TEST_BATCH_SIZE + 1, devices)
            if count % size == 0
        ]
        if not sizes:
            _refuse_test(count, devices)
        self.test = tf.data.Dataset.from_tensor_slices(source.test).batch(
            max(sizes), drop_remainder=True
        )

    def batches(self, first_epoch=0):
        import tensorflow as tf

        batches = self._source.batches(first_epoch)
        size = self._batch_size
        return tf.data.Dataset.from_generator(
            lambda: (batches[i] for i in itertools.count()),
            output_signature=(
                tf.TensorSpec((size, *self.image_shape), "float32"),
                tf.TensorSpec((size,), "int32"),
            ),
        ).prefetch(tf.data.AUTOTUNE)


class DataParallel:
    """`keras.distribution.DataParallel` over all devices of JAX."""

    def __init__(self):
        distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
        keras.distribution.set_distribution(distribution)
        self.devices = len(keras.distribution.list_devices())

    def scope(self):
        return contextlib.nullcontext()

    def distribute(self, source, config):
        """`source`, whose batches must divide among the devices."""
        _check_batch(config["batch_size"], self.devices)
        if isinstance(source.test, tuple):
            count = len(source.test[1])
            sizes = {min(count, TEST_BATCH_SIZE), count % TEST_BATCH_SIZE}
            if any(size % self.devices for size in sizes):
                _refuse_test(count, self.devices)
        return source


def _check_batch(size, devices):
    if size % devices:
        raise ValueError(
            f"Argument `batch_size` must be divisible by the number of devices, "
            f"{devices}. Received: batch_size={size}"
        )


def _refuse_test(count, devices):
    raise ValueError(
        f"The {count} test images do not divide into batches for {devices} devices. "
        "Give a `validation_size` that does, such as a multiple of their number"
    )
