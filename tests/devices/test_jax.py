"""JAX devices do what one device does with the whole batch."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.support.device_cases import CASES

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX only")


@pytest.fixture(scope="module")
def found():
    more = " --xla_force_host_platform_device_count=8"
    flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + more}
    command = [sys.executable, "-m", "tests.programs.shards"]
    done = subprocess.run(
        command, env={**os.environ, **flags}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_as_one_device(found, name):
    for case in found["errors"][name].values():
        assert case["outputs"] < CASES[name].error
        assert case["gradients"] < 1e-5
        assert case["state"] < 1e-5


def test_collectives(found):
    """One each way, where neither the mean nor a maximum is needed first."""
    for dtype, counts in found["collectives"].items():
        counts = {name: count - counts["none"] for name, count in counts.items()}
        for name in ("cbn", "noisy_bn", "lp_norm", "lp_norm 1"):
            assert counts[name] == 2, (dtype, name)
        # The gradient of its kernel goes with that of its shift.
        assert counts["fused_cbn"] <= 2
        for name in ("1, centered", "3", "inf", "inf, centered"):
            assert counts[f"lp_norm {name}"] == 3, (dtype, name)
        assert counts["lp_norm 3, centered"] == 4
        assert counts["bn"] > 2


def test_collectives_with_masks(found):
    for name in ("cbn, masked", "noisy, masked", "lp 2, masked"):
        assert found["errors"][name]["2 devices"]["collectives"] == 2


def test_large_means_from_the_first_step_on(found):
    for name, errors in found["large_means"].items():
        # Half of the last bit of a mean of 1e4.
        assert max(errors) < 5e-4, name


def test_channels_divided_among_devices(found):
    errors = found["model_parallel"]
    assert errors["weights"] < 1e-4
    assert errors["state"] < 1e-4
    assert errors["sharded"] == [True, True, False]


def test_every_test_image_counts_once(found):
    evaluation = found["evaluation"]
    np.testing.assert_allclose(evaluation["together"], evaluation["alone"], rtol=1e-5)


def test_a_batch_that_devices_cannot_share(found):
    assert "evenly divide" in found["uneven"]
