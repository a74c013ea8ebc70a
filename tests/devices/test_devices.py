"""Several devices do what one device does with the whole batch."""

import json
import os

import pytest

from tests.support.backend import BACKEND, later
from tests.support.device_cases import CASES
from tests.support.processes import run

PROGRAM = {"tensorflow": "replicas", "jax": "shards", "torch": "ranks"}[BACKEND]
FEW = ["cbn", "fused, masked", "lp 3, centered, masked", "cbn, groups, masked"]
RUNS = {"tensorflow": later([]), "jax": [FEW, *later([])], "torch": [[]]}
JAX = BACKEND == "jax"


@pytest.mark.parametrize("names", RUNS[BACKEND])
def test_as_one_device(names):
    more = " --xla_force_host_platform_device_count=8" * JAX
    flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + more}
    printed = run("-m", f"tests.programs.{PROGRAM}", *names, **flags)
    found = json.loads(printed.splitlines()[-1])
    assert {row["layer"] for row in found} == {*(names or CASES)}
    for row in found:
        case = CASES[row["layer"]]
        assert row["outputs"] < case.error, row
        assert max(row["gradients"], row["state"]) < 1e-5, row
        if "collectives" in row and not starts_one_for_each_array():
            assert row["collectives"] == case.collectives[JAX], row


def starts_one_for_each_array():
    """As the XLA for CPUs of an old JAX does."""
    if not JAX:
        return False
    import jax

    return jax.__version_info__ < (0, 7)
