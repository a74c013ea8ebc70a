"""CBN compiled for TPUs by the real compiler, which needs no TPU."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.tpu

ENVIRONMENT = {
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

SCRIPT = """
import json, re, sys
import jax, keras, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras_norms import CBN, FusedCBN

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
mesh = Mesh(np.array(topology.devices), ("batch",))
by_batch = NamedSharding(mesh, PartitionSpec("batch"))
everywhere = NamedSharding(mesh, PartitionSpec())
shape, dtype = (512, 32, 32, 128), "bfloat16"

def cost(layer):
    layer.build(shape)

    def step(trainable, state, x, g):
        def forward(trainable, x):
            return layer.stateless_call(trainable, state, x, training=True)

        y, pullback, state = jax.vjp(forward, trainable, x, has_aux=True)
        return y, state, pullback(g)

    def replicated(variables):
        return [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=everywhere)
            for v in variables
        ]

    x = jax.ShapeDtypeStruct(shape, dtype, sharding=by_batch)
    compiled = jax.jit(step).lower(
        replicated(layer.trainable_variables),
        replicated(layer.non_trainable_variables), x, x,
    ).compile()
    # Counted where they run in every step, not in the branch of the first one.
    every_step = compiled.as_text().split("ENTRY")[1]
    return {
        "bytes": compiled.cost_analysis()["bytes accessed"],
        "all_reduces": len(re.findall(r" all-reduce(?:-start)?\\(", every_step)),
    }

keras.config.set_dtype_policy("mixed_bfloat16")
cbn = CBN()
cbn.set_learning_rate(0.01)
fused = FusedCBN(keras.layers.Conv2D(128, 3, padding="same"), CBN())
fused.norm.set_learning_rate(0.01)
candidates = {"cbn": cbn, "fused": fused, "bn": keras.layers.BatchNormalization()}
costs = {name: cost(layer) for name, layer in candidates.items()}
print(json.dumps(costs, default=float))
"""


@pytest.fixture(scope="module")
def costs():
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_moves_fewer_bytes_than_batch_normalization(costs):
    assert costs["cbn"]["bytes"] < costs["bn"]["bytes"]


def test_takes_one_collective_each_way(costs):
    assert costs["cbn"]["all_reduces"] == 2
    # The gradient of the kernel too; and nothing of it waits for the statistics.
    assert costs["fused"]["all_reduces"] == 1
    assert costs["bn"]["all_reduces"] > 2
