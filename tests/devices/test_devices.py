"""Several devices do what one device does with the whole batch."""

import json
import os

import pytest

from tests.support.backend import BACKEND, not_torch, some, torch_only
from tests.support.device_cases import CASES
from tests.support.processes import run

PROGRAMS = {"tensorflow": "replicas", "jax": "shards"}
FEW = ["cbn", "fused, masked", "lp 3, centered, masked"]
FEW += ["cbn, groups, masked"] * (BACKEND == "jax")


@not_torch
@pytest.mark.parametrize(
    "names", some([FEW, []], [FEW] if BACKEND == "jax" else []), ids=["few", "all"]
)
def test_as_one_device(names):
    flags = {}
    if BACKEND == "jax":
        more = " --xla_force_host_platform_device_count=8"
        flags["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + more
    printed = run("-m", f"tests.programs.{PROGRAMS[BACKEND]}", *names, **flags)
    found = json.loads(printed.splitlines()[-1])
    assert [*found] == (names or [*CASES])
    for name, sizes in found.items():
        for size, case in sizes.items():
            assert case["outputs"] < CASES[name].error, (name, size, case)
            assert case["gradients"] < 1e-5, (name, size, case)
            assert case["state"] < 1e-5, (name, size, case)
            expected = CASES[name].collectives[BACKEND == "jax"]
            if BACKEND == "jax" and jax_version() < (0, 7):
                continue  # Its XLA for CPUs starts one for each array.
            assert case["collectives"] == expected, (name, size, case)


def jax_version():
    import jax

    return jax.__version_info__


@torch_only
def test_processes_of_torch_are_as_one():
    found = json.loads(run("-m", "tests.programs.ranks").splitlines()[-1])
    assert [*found] == [*CASES]
    for name, errors in found.items():
        assert errors["outputs"] < CASES[name].error, (name, errors)
        assert max(errors["gradients"], errors["state"]) < 1e-5, (name, errors)
