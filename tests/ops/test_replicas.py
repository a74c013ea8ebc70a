"""Sums over replicas one replica at a time; `tests/devices` runs them at once."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms.ops import lp_norm, moments, replicas
from tests.support.backend import BACKEND, numpy, tensorflow_only
from tests.support.cbn_reference import relative_error
from tests.support.simulated_replicas import run_on

pytestmark = pytest.mark.skipif(
    BACKEND == "jax", reason="JAX has no replicas: its arrays are those of all devices"
)


def test_one_process_is_one_replica():
    x = ops.convert_to_tensor([1.0, 2.0])
    assert replicas.number_of_replicas() == 1
    assert replicas.replica_number() == 0
    assert replicas.sum_over_replicas(x) is x
    np.testing.assert_array_equal(numpy(replicas.gather_replicas(x)), [[1, 2]])
    batch = moments.Moments(*map(ops.convert_to_tensor, (3.0, [1.0], [2.0])))
    same, other = moments.combine_replicas(batch, x)
    assert same is batch
    np.testing.assert_array_equal(numpy(other), [[1, 2]])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_collectives(dtype, monkeypatch):
    x = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(dtype)

    def function(i):
        mine = ops.convert_to_tensor(x[i])
        return (
            replicas.number_of_replicas(),
            replicas.replica_number(),
            replicas.sum_over_replicas(mine),
            replicas.gather_replicas(mine),
        )

    for i, result in enumerate(run_on(3, function, monkeypatch)):
        assert result[:2] == (3, i)
        dtypes = {keras.backend.standardize_dtype(v.dtype) for v in result[2:]}
        assert dtypes == {dtype}
        assert relative_error(result[2], x.sum(0, dtype="float64")) < 1e-6
        np.testing.assert_array_equal(numpy(result[3]), x)


PARTS = [(5, 4), (1, 4), (7, 4)]  # elements and channels of each replica
if BACKEND != "torch":  # `keras.ops.max` of nothing has one channel there.
    PARTS.append((0, 4))


@pytest.fixture
def parts():
    """Batches and masks of the replicas, tensors of one of them, and all, masked."""
    rng = np.random.default_rng(1)
    x = [rng.normal(3, 2, shape).astype("float32") for shape in PARTS]
    masks = [rng.random(shape) < 0.6 for shape in PARTS]
    for mask in masks:
        mask[:, 3] = False

    def of(i, masked):
        mask = ops.convert_to_tensor(masks[i]) if masked else None
        return ops.convert_to_tensor(x[i]), mask

    whole = np.concatenate(x).astype("float64")
    return of, whole, np.ma.array(whole, mask=~np.concatenate(masks))


def assert_all_have(found, *expected):
    for batch in found:
        for actual, wanted in zip(batch, expected, strict=True):
            wanted = np.ma.filled(wanted, 0)
            np.testing.assert_allclose(numpy(actual), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_moments_are_those_of_all(masked, parts, monkeypatch):
    of, *whole = parts

    def function(i):
        x, mask = of(i, masked)
        return moments.moments(x, "float32", -1, mask, synchronized=True)

    x = whole[masked]
    counts = np.ma.count(x, 0)
    found = run_on(len(PARTS), function, monkeypatch)
    assert_all_have(found, counts, x.mean(0), x.var(0))


@pytest.mark.parametrize(
    ("p", "centered", "masked"),
    [
        (1, False, True),
        (1.5, True, True),
        (2, False, False),
        (3, False, False),
        (np.inf, False, False),
        (np.inf, True, True),
    ],
)
def test_lp_statistics_are_those_of_all(p, centered, masked, parts, monkeypatch):
    of, *whole = parts

    def function(i):
        x, mask = of(i, masked)
        return lp_norm.lp_statistics(
            x, "float32", p=p, centered=centered, axis=-1, mask=mask, synchronized=True
        )[1:]

    x = whole[masked]
    size = np.abs(x - x.mean(0) if centered else x)
    norm = size.max(0) if p == np.inf else np.mean(size**p, 0) ** (1 / p)
    found = run_on(len(PARTS), function, monkeypatch)
    assert_all_have(found, x.mean(0), norm)


@tensorflow_only
@pytest.mark.parametrize(
    "name", ["MultiWorkerMirroredStrategy", "ParameterServerStrategy"]
)
def test_strategies_that_keras_cannot_train(name, monkeypatch):
    import tensorflow as tf

    cls = getattr(tf.distribute, name)
    layer = keras.layers.Layer(name="mine")
    replicas.check_strategy(layer)  # There is none.
    # Not made by its own constructor, which needs a cluster.
    strategy = object.__new__(cls)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    with pytest.raises(ValueError, match="DataParallel.*Received: layer 'mine' under"):
        replicas.check_strategy(layer)
