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
from recipes.engine import classifier, data, population, joint_training

chips = compiler.chips("v5e:2x2")
rng = np.random.default_rng(0)
x = rng.normal(size=(256, 8, 8, 1)).astype("float32")
y = np.arange(256, dtype="int32") % 10
images = data.ImageData(x, y, x, y, 10)
runs = [
    classifier.Training(model="resnet8", rho=0.5 + k, omega=5.0 * k, seed=k)
    for k in range(4)
]
data.images = lambda settings: images
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
