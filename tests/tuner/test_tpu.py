"""The epoch of a population, compiled for TPUs by the real compiler, without a TPU."""

import json

import pytest

from tests.support.backend import jax_only
from tests.support.processes import run

pytestmark = [pytest.mark.thorough, jax_only]

SCRIPT = """
import json
import jax, numpy as np
from benchmarks.tpu import compiler
from benchmarks.compiled import COLLECTIVES
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from recipes.engine import classifier, population, joint_training

chips = compiler.chips("v5e:2x2")
usual = {"model": "resnet8", "train_size": 256}
runs = [
    classifier.Training(**usual, rho=0.5 + k, omega=5.0 * k, seed=k) for k in range(4)
]
trials = joint_training.of(runs)
mesh = Mesh(chips.by_batch.mesh.devices, ("trial",))

def of(tree, *axes):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
    )

def cost(function, axes, own, shared):
    arguments = *of(own, "trial"), of(shared)
    compiled = population.program_of(function, axes, mesh).lower(*arguments).compile()
    text = compiled.as_text()
    kinds = [kind for kind in COLLECTIVES if f" {kind}" in text]
    return {**compiler.cost(compiled), "collectives": kinds}

current = {key: trials._state[key] for key in population.CURRENT}
epochs = np.zeros(4, "uint32")
own = current, trials._settings, epochs
train = trials._trial.train_epoch, (0, 0, 0, None), own, trials._train_data
test = trials._trial.evaluate, (0, None), (trials._state,), trials._test_data
costs = {"train": cost(*train), "evaluate": cost(*test), "chips": chips.chips}
print(json.dumps(costs))
"""


def test_trials_on_a_slice_exchange_nothing():
    pytest.importorskip("libtpu")
    costs = json.loads(run("-c", SCRIPT).splitlines()[-1])
    assert costs["chips"] == 4
    for name in ("train", "evaluate"):
        assert costs[name]["collectives"] == []
        assert costs[name]["gigaflops"] > 0
