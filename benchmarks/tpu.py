"""What a training step costs on a slice of TPUs, by the TPU compiler, without a TPU.

    python -m benchmarks.tpu                       # ResNet-50 on v5e:2x2, 10 minutes
    python -m benchmarks.tpu --network=resnet20 --topologies=v6e:1x1,v6e:16x16

Compiles the whole step of a Keras model (forward, backward, SGD with momentum, moving
statistics) for all chips of a slice with the batch divided among them, and prints per
chip what the compiler says: bytes that the step moves, temporary memory, and how many
all-reduces it starts. Those do not wobble. They are no times: nothing runs. The floor
of a normalisation is the network without any.

Needs JAX and libtpu, no TPU. Prints a table; --output also writes it as JSON.
"""

import os
import re

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
from absl import app, flags  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from benchmarks import compare, networks  # noqa: E402

_NETWORK = flags.DEFINE_enum("network", "resnet50", sorted(networks.NETWORKS), "")
_NORMS = flags.DEFINE_list("norms", ["none", "bn", "cbn", "fused_cbn"], "")
_TOPOLOGIES = flags.DEFINE_list("topologies", ["v5e:2x2"], "Slices, as v5e:2x2.")
_BATCH = flags.DEFINE_integer("batch_per_chip", 128, "", lower_bound=1)
_POLICY = flags.DEFINE_string("dtype_policy", "mixed_bfloat16", "")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

HEADER = [
    "slice",
    "norm",
    "moved, GB",
    "temporary, GB",
    "all-reduces",
    "moved / bn",
    "temporary / bn",
    "all-reduces / bn",
    "moved / none",
]


def compile_step(model, topology, batch_per_chip):
    """The compiled training step of a model on a slice."""
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    mesh = Mesh(np.array(devices), ("batch",))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(trainable, others, slots, x, y):
        def forward(trainable):
            logits, updated = model.stateless_call(trainable, others, x, training=True)
            return loss(y, logits), updated

        (value, updated), gradients = jax.value_and_grad(forward, has_aux=True)(
            trainable
        )
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return value, trainable, updated, slots

    def shapes(variables):
        everywhere = NamedSharding(mesh, PartitionSpec())
        return [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=everywhere)
            for v in variables
        ]

    def batch(shape, dtype):
        return jax.ShapeDtypeStruct(
            (batch_per_chip * len(devices), *shape),
            dtype,
            sharding=NamedSharding(mesh, PartitionSpec("batch")),
        )

    return (
        jax.jit(step, donate_argnums=(0, 1, 2))
        .lower(
            shapes(model.trainable_variables),
            shapes(model.non_trainable_variables),
            shapes(optimizer.variables),
            batch(model.input_shape[1:], model.compute_dtype),
            batch((), "int32"),
        )
        .compile()
    )


def cost(compiled):
    """What the compiler says of one chip's program."""
    memory = compiled.memory_analysis()
    return {
        "gigabytes_moved": compiled.cost_analysis()["bytes accessed"] / 1e9,
        "temporary_gigabytes": memory.temp_size_in_bytes / 1e9,
        "all_reduces": len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text())),
    }


def cells(row, rows):
    """A line of the table: costs, and ratios to those of others on the same slice."""

    def ratio(key, norm):
        for other in rows:
            if (other["slice"], other["norm"]) == (row["slice"], norm):
                return f"{row[key] / other[key]:.3f}"
        return ""

    return [
        row["slice"],
        row["norm"],
        f"{row['gigabytes_moved']:.2f}",
        f"{row['temporary_gigabytes']:.2f}",
        row["all_reduces"],
        ratio("gigabytes_moved", "bn"),
        ratio("temporary_gigabytes", "bn"),
        ratio("all_reduces", "bn"),
        ratio("gigabytes_moved", "none"),
    ]


def main(_):
    rows = []
    for topology in _TOPOLOGIES.value:
        for norm in _NORMS.value:
            keras.backend.clear_session()
            keras.config.set_dtype_policy(_POLICY.value)
            model = networks.build(_NETWORK.value, norm)
            compiled = compile_step(model, topology, _BATCH.value)
            rows.append({"slice": topology, "norm": norm, **cost(compiled)})
            print(rows[-1], flush=True)
            if _OUTPUT.value:
                compare.write_report(
                    _OUTPUT.value,
                    "tpu",
                    rows,
                    network=_NETWORK.value,
                    batch_per_chip=_BATCH.value,
                    dtype_policy=_POLICY.value,
                )
    print(compare.table(HEADER, [cells(row, rows) for row in rows]))


if __name__ == "__main__":
    app.run(main)
