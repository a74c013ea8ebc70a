"""TensorFlow replicas do what one device does with the whole batch."""

import json
import subprocess
import sys

import keras
import pytest

from keras_norms import CBN
from tests.support.device_cases import CASES

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow only"
)


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-m", "tests.programs.replicas"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_as_one_device(found, name):
    for case in found["errors"][name].values():
        assert case["outputs"] < CASES[name].error
        assert case["gradients"] < 1e-5
        assert case["state"] < 1e-5


def test_collectives(found):
    """One each way, where the norm does not need the mean first."""
    for name, cases in found["errors"].items():
        more = name.startswith(("lp 1, centered", "lp 3, centered"))
        expected = 0 if name in ("ws", "cwn", "wn") else 3 if more else 2
        for case in cases.values():
            assert case["collectives"] == expected, name
    assert found["batch_normalization"] > 2


def test_replicas_that_are_not_synchronized_keep_one_average(found):
    errors = found["not_synchronized"]
    assert errors["outputs"] < 1e-5
    assert errors["state"] < 1e-5
    assert errors["drift"] == 0 and errors["apart"] > 0.01


def test_noise_differs_by_replica_and_not_by_the_number_of_them(found):
    noise = found["noise"]
    assert noise["0.1"]["replicas"] > 0.1
    assert noise["0.1"]["device"] < 1e-5  # the first one's
    assert noise["0.0"]["replicas"] < 1e-5  # a channel has the noise of the whole batch


def test_many_workers_are_refused(found):
    assert "under CollectiveAllReduceStrategy" in found["refusal"]
    assert "keras.distribution.DataParallel" in found["refusal"]


def test_parameter_servers_are_refused(monkeypatch):
    import tensorflow as tf

    cls = tf.distribute.ParameterServerStrategy
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: cls.__new__(cls))
    with pytest.raises(ValueError, match="Use tf.distribute.MirroredStrategy"):
        CBN().build((4, 3))
