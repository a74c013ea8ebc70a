"""The epoch of a population, compiled for TPUs by the real compiler, without a TPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.test_tpu import ENVIRONMENT

pytestmark = pytest.mark.tpu

SCRIPT = """
import json, re
import jax, keras, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from recipes import data, population, train

TRIALS = 8
rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8, 8, 1)).astype("float32")
y = rng.integers(0, 10, 512).astype("int32")
y[:10] = np.arange(10)
images = data.ImageData(x, y, x[:256], y[:256], 10)
configs = [
    train.complete({"model": "resnet8", "rho": 0.5 + k, "omega": 5.0 * k, "seed": k})
    for k in range(TRIALS)
]
trials = population.of(configs, images)

def costs(topology):
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    mesh = Mesh(np.array(devices), ("trial",))
    by_trial = NamedSharding(mesh, PartitionSpec("trial"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    shape = lambda sharding: lambda a: jax.ShapeDtypeStruct(
        a.shape, a.dtype, sharding=sharding
    )
    found = {}
    for function, axes, state in (
        (trials._trial.train_epoch, (0, 0, 0, None), {
            key: trials._state[key] for key in population.CURRENT
        }),
        (trials._trial.evaluate, (0, None), trials._state),
    ):
        arguments = [jax.tree.map(shape(by_trial), state)]
        if len(axes) == 4:
            arguments.append(jax.tree.map(shape(by_trial), trials._settings))
            epochs = np.zeros(TRIALS, "uint32")
            arguments.append(shape(by_trial)(epochs))
        arguments.append(jax.tree.map(shape(everywhere), trials._train_data))
        program = jax.jit(
            jax.vmap(function, axes), donate_argnums=0, out_shardings=by_trial
        )
        compiled = program.lower(*arguments).compile()
        text = compiled.as_text()
        found[function.__name__] = {
            "devices": len(devices),
            "collectives": len(re.findall(
                r" (all-reduce|all-gather|all-to-all|collective-permute)", text)),
            "flops": compiled.cost_analysis()["flops"],
        }
    return found

print(json.dumps(costs("v5e:2x2"), default=float))
"""


def test_trials_on_a_slice_exchange_nothing():
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    costs = json.loads(done.stdout.splitlines()[-1])
    assert set(costs) == {"train_epoch", "evaluate"}
    for cost in costs.values():
        assert cost["devices"] == 4 and cost["flops"] > 0
        assert cost["collectives"] == 0
