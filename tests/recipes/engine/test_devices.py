import keras
import numpy as np
import pytest

from recipes.engine import classifier, data, devices, joint_training
from recipes.models import norms
from tests.support.backend import BACKEND, tensorflow_only

SETTINGS = classifier.Training(train_size=40, batch_size=12, augment=True)


def test_what_a_backend_does_not_have_is_refused(monkeypatch):
    assert devices.get(None) is None and devices.get("none") is None
    for name in ("mirrored", "tpu", "data_parallel", "of my own"):
        if devices.BACKENDS.get(name) != BACKEND:
            with pytest.raises(ValueError, match=f"of none.* the backend {BACKEND}"):
                devices.get(name)
    with pytest.raises(ValueError, match="many machines. Received: job"):
        devices.get("mirrored", "10.0.0.1:1234,10.0.0.2:1234", 2, 0)
    if BACKEND == "jax":

        def refuse(*several):
            raise ValueError("coordinator_address should be defined.")

        monkeypatch.setattr(keras.distribution, "initialize", refuse)
        with pytest.raises(ValueError, match="must all be given.*process_id=1"):
            devices.get("data_parallel", process_id=1)
    else:
        with pytest.raises(ValueError, match="KERAS_BACKEND=jax.*Received: backend"):
            joint_training.train([classifier.Saved()])


def test_test_batches():
    """Of one size; with what fills them up, a multiple of the number of devices."""
    assert devices.test_batch(10_000, 8) == (400, 400)
    assert devices.test_batch(10_000, 256) == (500, 512)
    assert devices.test_batch(360, 8) == (360, 360)
    assert devices.test_batch(7, 3) == (7, 9)


def test_processes_share_each_batch():
    whole = data.source(SETTINGS)
    parts = [devices._Parts(data.source(SETTINGS), 12, 6, i, 3) for i in range(3)]
    for i in (0, 4):
        together = zip(*(part.batches(1)[i] for part in parts))
        for mine, expected in zip(together, whole.batches(1)[i], strict=True):
            np.testing.assert_array_equal(np.concatenate(mine), expected)
    # 360 images in one batch, without any to fill it up.
    tests = zip(*(part.test[0] for part in parts))
    images, labels, weights = map(np.concatenate, tests)
    np.testing.assert_array_equal(images, whole.test[0])
    np.testing.assert_array_equal(labels, whole.test[1])
    assert parts[0].test.num_batches == 1 and weights.sum() == 360
    # What fills a test batch up has no weight.
    images, labels, weights = devices._Parts(data.source(SETTINGS), 84, 7).test[0]
    assert len(images) == len(labels) == 364
    np.testing.assert_array_equal(weights, [1] * 360 + [0] * 4)
    np.testing.assert_array_equal(images[:360], whole.test[0])
    with pytest.raises(ValueError, match="multiple of the number of devices, 8. Rec"):
        devices._Parts(data.source(SETTINGS), 12, 8)


@tensorflow_only
def test_replicas():
    strategy = devices.get("mirrored")
    source = strategy.distribute(data.source(SETTINGS), SETTINGS)
    expected = data.source(SETTINGS).batches(2)[0]
    images, _ = next(iter(source.batches(2)))
    np.testing.assert_array_equal(images, expected[0])
    assert source.test.element_spec[0].shape == (360, 8, 8, 1)
    assert int(source.test.cardinality()) == 1
    for _ in range(2):  # TensorFlow may reuse the memory of what it was given
        for _, _, weights in source.test:
            np.testing.assert_array_equal(weights, np.ones(360))
    made = {}
    for name in ("cbn", "bn", "layer", "wn"):
        norm = strategy.norm(norms.get(name, 0.5))
        made[name] = norm.layer and norm.layer(4, name="norm")
    assert made["cbn"].synchronized and made["cbn"].initial_rho == 0.5
    assert made["bn"].synchronized and made["wn"] is None
    assert not norms.get("cbn").layer(4, name="norm").synchronized
