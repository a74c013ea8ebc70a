"""Several devices do what one device does with the whole batch."""

import importlib.metadata
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
# The XLA for CPUs of an old JAX starts a collective for each array.
ONE_AN_ARRAY = JAX and importlib.metadata.version("jax").startswith("0.6.")


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
        if "collectives" in row and not ONE_AN_ARRAY:
            assert row["collectives"] == case.collectives[JAX], row
