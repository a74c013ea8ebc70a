"""One training on many devices: each batch is divided among them.

    none            one device
    mirrored        TensorFlow, all GPUs of a machine, by tf.distribute.MirroredStrategy
    tpu             TensorFlow, the TPU of this machine or the one that the environment
                    variable TPU_NAME says, by tf.distribute.TPUStrategy
    data_parallel   JAX, all devices of all machines, by keras.distribution

    python -m recipes.train --strategy=mirrored
    KERAS_BACKEND=jax python -m recipes.train --strategy=data_parallel

On many machines, the same command on each, with its own number. The machines of a TPU
slice know of each other: there, `--num_processes` is enough, with how many they are.

    KERAS_BACKEND=jax python -m recipes.train --strategy=data_parallel \
        --job_addresses=10.0.0.1:1234,10.0.0.2:1234 --num_processes=2 --process_id=0

`--batch_size` is that of all devices together, and the norms have the statistics of all
of it (`synchronized=True` on TensorFlow), so that a run does on many devices what it
does on one, up to rounding. A batch that is k times as large, with `--learning_rate` k
times as large, takes 1/k of the steps (the linear rule of
https://arxiv.org/abs/1706.02677; the recipes have no warmup). Nothing of that is done
unasked.

Process 0 writes the files of a run. The others start from what it has: a run goes on
from the last epoch that process 0 has recorded, whichever process died.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import tempfile

import keras
import numpy as np
from absl import flags

from recipes.engine.data import TEST_BATCH_SIZE

BACKENDS = {"mirrored": "tensorflow", "tpu": "tensorflow", "data_parallel": "jax"}


def get(name, job_addresses=None, num_processes=None, process_id=None):
    """Makes a strategy, the argument `strategy` of `recipes.engine.classifier.problem`.

    Args:
        name: A key of `BACKENDS`, `"none"` or `None`.
        job_addresses, num_processes, process_id: See `keras.distribution.initialize`;
            `None` on one machine. The first and the last may be `None` on TPUs.

    Returns:
        `Replicas`, `DataParallel`, or `None` for one device.

    Raises:
        ValueError: If the backend has no such strategy, or for many machines with
            another one than `"data_parallel"`.
    """
    several = [job_addresses, num_processes, process_id]
    if name != "data_parallel" and any(value is not None for value in several):
        raise ValueError(
            "Argument `job_addresses` must be None but for strategy='data_parallel', "
            "on JAX: Keras 3 trains on many machines there only. "
            f"Received: job_addresses={job_addresses!r}, num_processes={num_processes}"
            f", process_id={process_id} with strategy={name!r}"
        )
    if name in (None, "none"):
        return None
    backend = keras.backend.backend()
    if BACKENDS.get(name) != backend:
        known = ["none", *(key for key in BACKENDS if BACKENDS[key] == backend)]
        raise ValueError(
            f"Argument `strategy` must be one of {', '.join(known)} on the backend "
            f"{backend}. Received: strategy={name!r}"
        )
    return DataParallel(*several) if name == "data_parallel" else Replicas(name)


def define_flags():
    """Defines the flags that `from_flags` reads."""
    flags.DEFINE_enum("strategy", "none", ["none", *BACKENDS], "For many devices.")
    flags.DEFINE_string("job_addresses", None, "host:port of each process, by commas.")
    flags.DEFINE_integer("num_processes", None, "How many.", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "Which of them this is.", lower_bound=0)


def from_flags():
    """The strategy that the flags ask for, `None` for one device."""
    values = flags.FLAGS
    return get(
        values.strategy, values.job_addresses, values.num_processes, values.process_id
    )


class Replicas:
    """`tf.distribute`, with batches of a known size, as TPUs need them.

    Args:
        name: `"mirrored"` or `"tpu"`.

    Attributes:
        devices: How many replicas there are.
    """

    def __init__(self, name):
        import tensorflow as tf

        if name == "tpu":
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(
                tpu=os.environ.get("TPU_NAME", "local")
            )
            self._strategy = tf.distribute.TPUStrategy(resolver)
        else:
            # CPUs that TensorFlow was told to divide, where there is no GPU.
            gpus = tf.config.list_logical_devices("GPU")
            cpus = tf.config.list_logical_devices("CPU")
            names = [device.name for device in gpus or cpus]
            self._strategy = tf.distribute.MirroredStrategy(names)
        self.devices = self._strategy.num_replicas_in_sync

    def scope(self):
        """Where the model is to be made and compiled."""
        return self._strategy.scope()

    def norm(self, norm):
        """The `recipes.models.norms.Norm` with statistics of all replicas."""
        if norm.layer is None:
            return norm

        def synchronized(channels, name):
            layer = norm.layer(channels, name=name)
            if hasattr(layer, "synchronized"):
                layer.synchronized = True
            return layer

        return dataclasses.replace(norm, layer=synchronized)

    def places(self, name, *directories):
        """Where this process reads and writes the run `name`."""
        return directories

    def distribute(self, source, settings):
        """The batches of `recipes.engine.data.source`, as `fit` is to get them.

        Raises:
            ValueError: If the batch size is no multiple of the number of replicas.
        """
        return _Datasets(source, settings.batch_size, self.devices)


class DataParallel:
    """`keras.distribution.DataParallel` over all devices of JAX, of all processes.

    Args:
        job_addresses, num_processes, process_id: See `get`.

    Attributes:
        devices: How many devices there are.
    """

    def __init__(self, job_addresses=None, num_processes=None, process_id=None):
        several = [job_addresses, num_processes, process_id]
        if any(value is not None for value in several):
            keras.distribution.initialize(*several)
        import jax

        self._distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
        self.devices = jax.device_count()
        self._process, self._processes = jax.process_index(), jax.process_count()

    @contextlib.contextmanager
    def scope(self):
        """Where the model is to be made and compiled; it lasts for `fit`."""
        keras.distribution.set_distribution(self._distribution)
        yield

    def norm(self, norm):
        """The same `Norm`: an array is that of all devices."""
        return norm

    def places(self, name, runs_dir, *others):
        """Where this process reads and writes the run `name`.

        Those are the given directories for process 0. The others get a copy of what it
        has of the run, which nobody reads again.
        """
        if self._processes == 1:
            return runs_dir, *others
        directory = pathlib.Path(runs_dir) / name
        files = sorted(directory.glob("*")) if self._process == 0 else []
        names = _from_process_0("\n".join(file.name for file in files).encode())
        if self._process:
            copies = pathlib.Path(tempfile.mkdtemp())
            directory = copies / name
            directory.mkdir()
            runs_dir, others = copies, [other and copies for other in others]
        for file in names.decode().splitlines():
            path = directory / file
            content = _from_process_0(b"" if self._process else path.read_bytes())
            if self._process:
                path.write_bytes(content)
        return runs_dir, *others

    def distribute(self, source, settings):
        """The part of each batch of `source` that this process has.

        Raises:
            ValueError: If the batch size is no multiple of the number of devices.
        """
        return _Parts(
            source, settings.batch_size, self.devices, self._process, self._processes
        )


class _Parts:
    """What `data.source` returns, with an equal part of each batch a device.

    Test images are divided into batches of one size. Where the devices cannot share
    that, zeros of weight 0 fill a batch up, so that every image counts once.
    """

    def __init__(self, source, batch_size, devices, process=0, processes=1):
        if batch_size % devices:
            raise ValueError(
                "Argument `batch_size` must be a multiple of the number of devices, "
                f"{devices}. Received: batch_size={batch_size}"
            )
        self._source = source
        self._process, self._processes = process, processes
        self.image_shape = source.image_shape
        self.num_classes = source.num_classes
        self.steps = source.steps
        if isinstance(source.test, tuple):
            size, padded = test_batch(len(source.test[1]), devices)
            self.test = _test(source.test, size, padded, process, processes)
        else:
            source.share(process, processes, *test_batch(source.test_count, devices))
            self.test = source.test

    def batches(self, first_epoch=0):
        """This process's part of the training batches from an epoch on, without end."""
        batches = self._source.batches(first_epoch)
        if not isinstance(self._source.test, tuple):
            return batches
        return _PartOfBatches(batches, self._process, self._processes)


class _Datasets(_Parts):
    """The same as `tf.data.Dataset`, with sizes known."""

    def __init__(self, source, batch_size, devices):
        super().__init__(source, batch_size, devices)
        if isinstance(self.test, keras.utils.PyDataset):
            self.test = _dataset(self.test)

    def batches(self, first_epoch=0):
        batches = super().batches(first_epoch)
        if isinstance(batches, keras.utils.PyDataset):
            return _dataset(batches)
        return batches


class _PartOfBatches(keras.utils.PyDataset):
    """The part of each batch that a process has."""

    def __init__(self, batches, process, processes):
        super().__init__()
        self._batches, self._process, self._processes = batches, process, processes

    @property
    def num_batches(self):
        batches = self._batches
        return len(batches) if isinstance(batches, list) else batches.num_batches

    def __getitem__(self, i):
        batch = self._batches[i]
        size = len(batch[0]) // self._processes
        first = self._process * size
        return tuple(array[first : first + size] for array in batch)


def test_batch(count, devices):
    """How many of `count` test images are a batch, and how many with what fills it up.

    The first divides `count`, so that every batch weighs the same in a mean, and the
    second is a multiple of `devices`; they are equal if any size allows.
    """
    sizes = [n for n in range(1, min(count, TEST_BATCH_SIZE) + 1) if count % n == 0]
    shared = [n for n in sizes if n % devices == 0]
    size = max(shared or sizes)
    return size, -(-size // devices) * devices


def _test(test, size, padded, process, processes):
    """The part of a process of the test batches: images, labels and weights."""
    fill = [(0, 0), (0, padded - size)]
    batches = [
        np.pad(a.reshape(-1, size, *a.shape[1:]), fill + [(0, 0)] * (a.ndim - 1))
        for a in (*test, np.ones(len(test[1]), "float32"))
    ]
    return _PartOfBatches(list(zip(*batches)), process, processes)


def _dataset(batches):
    import tensorflow as tf

    count = batches.num_batches
    numbers = itertools.count if count is None else lambda: range(count)
    dataset = tf.data.Dataset.from_generator(
        # Copies: TensorFlow takes the memory, and may write its own results there.
        lambda: (tuple(map(np.array, batches[i])) for i in numbers()),
        output_signature=tuple(tf.TensorSpec(a.shape, a.dtype) for a in batches[0]),
    )
    if count is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    return dataset.prefetch(tf.data.AUTOTUNE)


def _from_process_0(content):
    """The bytes that process 0 has."""
    from jax.experimental import multihost_utils

    size = multihost_utils.broadcast_one_to_all(np.int32(len(content)))
    array = np.zeros(int(size), "uint8")
    if len(content) == len(array):
        array = np.frombuffer(content, "uint8")
    return np.asarray(multihost_utils.broadcast_one_to_all(array), "uint8").tobytes()
