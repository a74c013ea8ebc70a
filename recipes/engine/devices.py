r"""One training on many devices, which share each batch.

    none            one device
    mirrored        TensorFlow, all GPUs of a machine, by tf.distribute.MirroredStrategy
    tpu             TensorFlow, the TPU of this machine or the one named by the
                    environment variable TPU_NAME, by tf.distribute.TPUStrategy
    data_parallel   JAX, all devices of all machines, by keras.distribution

    python -m recipes.train --strategy=mirrored
    KERAS_BACKEND=jax python -m recipes.train --strategy=data_parallel

On many machines, the same command on each, with its own number (docs/tpu.md):

    KERAS_BACKEND=jax python -m recipes.train --strategy=data_parallel \
        --job_addresses=10.0.0.1:1234,10.0.0.2:1234 --num_processes=2 --process_id=0

`--batch_size` is for all devices together, and the norms use statistics of the whole
batch (`synchronized=True` on TensorFlow). A run therefore does the same on many devices
as on one, up to rounding. The learning rate is not adapted to a larger batch.

Process 0 writes the files of a run, and the others start from them: whichever process
died, a run continues from the last epoch that process 0 has recorded.
"""

import contextlib
import dataclasses
import io
import itertools
import os
import pathlib
import tempfile

import keras
import numpy as np

from recipes.engine.data import TEST_BATCH_SIZE
from recipes.engine.errors import UserError

BACKENDS = {"mirrored": "tensorflow", "tpu": "tensorflow", "data_parallel": "jax"}


def get(name, job_addresses=None, num_processes=None, process_id=None):
    """Makes a strategy, the argument `strategy` of `recipes.engine.classifier.problem`.

    Args:
        name: A key of `BACKENDS`, `"none"` or `None`.
        job_addresses, num_processes, process_id: See `keras.distribution.initialize`;
            `None` on one machine. The first and the last may be `None` on TPUs.

    Returns:
        `Replicas`, `DataParallel`, or `None` for one device.
    """
    several = [job_addresses, num_processes, process_id]
    if name != "data_parallel" and any(value is not None for value in several):
        raise UserError(
            "Argument `job_addresses` must be None unless strategy='data_parallel', "
            "on JAX: only there Keras 3 trains on many machines. "
            f"Received: job_addresses={job_addresses!r}, num_processes={num_processes}"
            f", process_id={process_id} with strategy={name!r}"
        )
    if name in (None, "none"):
        return None
    backend = keras.backend.backend()
    if BACKENDS.get(name) != backend:
        known = ["none", *(key for key in BACKENDS if BACKENDS[key] == backend)]
        raise UserError(
            f"Argument `strategy` must be one of {', '.join(known)} on the backend "
            f"{backend}. Received: strategy={name!r}"
        )
    return DataParallel(*several) if name == "data_parallel" else Replicas(name)


class Replicas:
    """`tf.distribute`, `"mirrored"` or `"tpu"`, with batches of a known size."""

    def __init__(self, name):
        import tensorflow as tf

        if name == "tpu":
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(
                tpu=os.environ.get("TPU_NAME", "local")
            )
            self._strategy = tf.distribute.TPUStrategy(resolver)
        else:
            # Without a GPU: the logical CPUs that TensorFlow was configured with.
            listed = tf.config.list_logical_devices
            names = [device.name for device in listed("GPU") or listed("CPU")]
            self._strategy = tf.distribute.MirroredStrategy(names)
        self.devices = self._strategy.num_replicas_in_sync

    def scope(self):
        """Where the model is to be made and compiled."""
        return self._strategy.scope()

    def norm(self, norm):
        """The `recipes.models.norms.Norm`, with statistics over all replicas."""
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
        """The batches of `recipes.engine.data.source`, in the form for `fit`."""
        return _Datasets(source, settings.batch_size, self.devices)


class DataParallel:
    """`keras.distribution.DataParallel` over all devices of JAX, of all processes."""

    def __init__(self, *several):
        if any(value is not None for value in several):
            try:
                keras.distribution.initialize(*several)
            except ValueError as error:
                raise UserError(
                    "Arguments `job_addresses`, `num_processes` and `process_id` must "
                    "all be given, except on TPUs. Received: job_addresses={!r}, "
                    "num_processes={}, process_id={} ({})".format(*several, error)
                ) from error
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
        """The same `Norm`: an array already spans all devices."""
        return norm

    def places(self, name, runs_dir, *others):
        """Where this process reads and writes the run `name`.

        For process 0 those are the given directories. The others get a copy of its
        files of the run, which is not read again.
        """
        if self._processes == 1:
            return runs_dir, *others
        directory = pathlib.Path(runs_dir) / name
        if self._process == 0:
            archive, paths = io.BytesIO(), directory.glob("[!.]*")
            files = {path.name: np.fromfile(path, "uint8") for path in paths}
            np.savez(archive, **files)
            _from_process_0(archive.getvalue())
            return runs_dir, *others
        copies = pathlib.Path(tempfile.mkdtemp())
        (copies / name).mkdir()
        with np.load(io.BytesIO(_from_process_0(b""))) as files:
            for file, content in files.items():
                (copies / name / file).write_bytes(content.tobytes())
        return str(copies), *(other and str(copies) for other in others)

    def distribute(self, source, settings):
        """This process's part of each batch of `source`."""
        numbers = self.devices, self._process, self._processes
        return _Parts(source, settings.batch_size, *numbers)


class _Parts:
    """What `data.source` returns, with an equal part of each batch for each device.

    Test images are divided into batches of one size. If the devices cannot share it
    evenly, zeros of weight 0 fill the batch up, and every image counts once.
    """

    def __init__(self, source, batch_size, devices, process=0, processes=1):
        if batch_size % devices:
            raise UserError(
                "Argument `batch_size` must be a multiple of the number of devices, "
                f"{devices}. Received: batch_size={batch_size}"
            )
        self._source = source
        self._process, self._processes = process, processes
        self.image_shape, self.num_classes = source.image_shape, source.num_classes
        self.steps = source.steps
        if isinstance(source.test, tuple):
            self.test = self._mine(_test(source.test, devices))
        else:
            source.share(process, processes, *test_batch(source.test_count, devices))
            self.test = source.test

    def batches(self, first_epoch=0):
        """This process's part of the endless training batches, starting at an epoch."""
        batches = self._source.batches(first_epoch)
        return self._mine(batches) if isinstance(self._source.test, tuple) else batches

    def _mine(self, batches):
        return _PartOfBatches(batches, self._process, self._processes)


class _Datasets(_Parts):
    """The same for one process, as `tf.data.Dataset`, with known sizes."""

    def _mine(self, batches):
        import tensorflow as tf

        finite = isinstance(batches, list)

        def generate():
            for i in range(len(batches)) if finite else itertools.count():
                # Copies: TensorFlow reuses the memory, and may write results there.
                yield tuple(map(np.array, batches[i]))

        specs = tuple(tf.TensorSpec(array.shape, array.dtype) for array in batches[0])
        dataset = tf.data.Dataset.from_generator(generate, output_signature=specs)
        if finite:
            count = tf.data.experimental.assert_cardinality(len(batches))
            dataset = dataset.apply(count)
        return dataset.prefetch(tf.data.AUTOTUNE)


class _PartOfBatches(keras.utils.PyDataset):
    """A process's part of each batch."""

    num_batches = None  # endless, unless `batches` is a list

    def __init__(self, batches, process, processes):
        super().__init__()
        self._batches, self._process, self._processes = batches, process, processes
        if isinstance(batches, list):
            self.num_batches = len(batches)

    def __getitem__(self, i):
        batch = self._batches[i]
        size = len(batch[0]) // self._processes
        mine = slice(self._process * size, (self._process + 1) * size)
        return tuple(array[mine] for array in batch)


def test_batch(count, devices):
    """The number of test images in a batch, and its size once it is filled up.

    The first divides `count`, which gives every batch the same weight in a mean; the
    second is a multiple of `devices`. They are equal if some size allows it.
    """
    sizes = [n for n in range(1, min(count, TEST_BATCH_SIZE) + 1) if count % n == 0]
    shared = [n for n in sizes if n % devices == 0]
    size = max(shared or sizes)
    return size, -(-size // devices) * devices


def _test(test, devices):
    """A list of the test batches: images, labels and weights."""
    size, padded = test_batch(len(test[1]), devices)
    fill = [(0, 0), (0, padded - size)]
    batches = [
        np.pad(a.reshape(-1, size, *a.shape[1:]), fill + [(0, 0)] * (a.ndim - 1))
        for a in (*test, np.ones(len(test[1]), "float32"))
    ]
    return list(zip(*batches))


def _from_process_0(content):
    """The bytes of process 0; the others contribute none."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    size = int(broadcast_one_to_all(np.int32(len(content))))
    array = np.frombuffer(content or bytes(size), "uint8")
    return np.asarray(broadcast_one_to_all(array), "uint8").tobytes()
