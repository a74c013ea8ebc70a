"""Sums over replicas one replica at a time; `tests/devices` runs them at once."""

import threading
from concurrent import futures

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms import CBN
from keras_norms.ops import lp_norm, replicas
from tests.support.backend import BACKEND, numpy, tensorflow_only

pytestmark = pytest.mark.skipif(
    BACKEND == "jax", reason="JAX has no replicas: its arrays are those of all devices"
)


def on_each(count, function, monkeypatch):
    """What `function(i)` returns on each of some replicas, threads of this process."""
    replica, sent = threading.local(), [None] * count
    barrier = threading.Barrier(count, timeout=60)

    def all_reduce(operation, x):
        assert operation == "sum"
        sent[replica.replica_id_in_sync_group] = x
        barrier.wait()
        total = sum(sent)
        barrier.wait()
        return total

    def run(i):
        replica.num_replicas_in_sync, replica.replica_id_in_sync_group = count, i
        replica.all_reduce = all_reduce
        return function(i)

    monkeypatch.setattr(replicas, "_context", lambda: replica)
    with futures.ThreadPoolExecutor(count) as pool:
        return [*pool.map(run, range(count))]


PARTS = [(5, 4), (1, 4), (7, 4)]  # elements and channels of each replica
if BACKEND != "torch":  # `keras.ops.max` of nothing has one channel there.
    PARTS.append((0, 4))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", [1, 1.5, 2, np.inf])
@pytest.mark.parametrize(("centered", "masked"), [(False, False), (True, True)])
def test_statistics_are_those_of_all(p, centered, masked, dtype, monkeypatch):
    """The moments, and the norm; where p is 2 and it is centered, a deviation."""
    rng = np.random.default_rng(1)
    parts = [rng.normal(3, 2, shape).astype(dtype) for shape in PARTS]
    masks = [rng.random(shape) < (0.6 if masked else 2) for shape in PARTS]
    for mask in masks:
        mask[:, 3] &= not masked  # which hides a channel

    def function(i):
        mask = ops.convert_to_tensor(masks[i]) if masked else None
        options = {"p": p, "centered": centered, "axis": -1, "mask": mask}
        x = ops.convert_to_tensor(parts[i])
        return lp_norm.lp_statistics(x, dtype, **options, synchronized=True)

    whole = np.concatenate(parts).astype("float64")
    x = np.ma.array(whole, mask=~np.concatenate(masks))
    size = np.abs(x - x.mean(0) if centered else x)
    norm = size.max(0) if p == np.inf else np.mean(size**p, 0) ** (1 / p)
    expected = [np.ma.filled(v, 0) for v in (np.ma.count(x, 0), x.mean(0), norm)]
    for batch in on_each(len(PARTS), function, monkeypatch):
        for actual, wanted in zip(batch[:3], expected, strict=True):
            assert actual.dtype == batch.mean.dtype
            np.testing.assert_allclose(numpy(actual), wanted, rtol=1e-5, atol=1e-6)
        assert keras.backend.standardize_dtype(batch.mean.dtype) == dtype


@tensorflow_only
@pytest.mark.parametrize(
    "name", ["MultiWorkerMirroredStrategy", "ParameterServerStrategy"]
)
def test_strategies_that_keras_cannot_train(name, monkeypatch):
    import tensorflow as tf

    # Not made by its own constructor, which needs a cluster.
    strategy = object.__new__(getattr(tf.distribute, name))
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    message = "MirroredStrategy.*distribution.DataParallel.*: layer 'mine' under"
    with pytest.raises(ValueError, match=message):
        CBN(name="mine").build((4, 3))
