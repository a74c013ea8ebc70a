"""What a training step costs on a slice of TPUs, by the TPU compiler, without a TPU.

    python -m benchmarks.tpu                       # ResNet-50 on v5e:2x2, 10 minutes
    python -m benchmarks.tpu --network=resnet20 --topologies=v6e:1x1,v6e:16x16
    python -m benchmarks.tpu --check               # every recipe network, an hour

Compiles the whole step of a Keras model (forward, backward, SGD with momentum, moving
statistics) for all chips of a slice with the batch divided among them, and prints per
chip what the compiler says: bytes that the step moves, temporary memory, and how many
all-reduces it starts. Those do not wobble. They are no times: nothing runs. The floor
of a normalisation is the network without any.

`--check` compiles what `recipes.train` runs, for v4, v5e, v5p and v6e, and predicts
from it how training scales: see `benchmarks/tpu_check.py`.

Needs JAX and libtpu, no TPU, and 4 GB. Prints a table; --output also writes it as JSON,
and the same command goes on with what is missing there.
"""

from benchmarks import tpu_compiler  # isort: skip  # before JAX

import json
import os

import jax
import keras
from absl import app, flags

from benchmarks import compare, networks, tpu_check

_CHECK = flags.DEFINE_bool("check", False, "Whether the recipes compile.")
_NETWORK = flags.DEFINE_enum("network", "resnet50", sorted(networks.NETWORKS), "")
_NETWORKS = flags.DEFINE_list("networks", list(tpu_check.NETWORKS), "Of --check.")
_NORMS = flags.DEFINE_list("norms", None, "none,bn,cbn,fused_cbn; with --check cbn.")
_TOPOLOGIES = flags.DEFINE_list("topologies", None, "Slices, as v5e:2x2.")
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
    chips = tpu_compiler.Slice(topology)
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

    return (
        jax.jit(step, donate_argnums=(0, 1, 2))
        .lower(
            chips.shapes(model.trainable_variables),
            chips.shapes(model.non_trainable_variables),
            chips.shapes(optimizer.variables),
            chips.batch(batch_per_chip, model.input_shape[1:], model.compute_dtype),
            chips.batch(batch_per_chip, (), "int32"),
        )
        .compile()
    )


def cells(row, rows):
    """A line of the table: costs, and ratios to those of others on the same slice."""

    def ratio(key, norm):
        for other in rows:
            if (other["slice"], other["norm"]) == (row["slice"], norm) and other[key]:
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


def steps():
    """The steps to compile: their slice and norm, and what compiles them."""
    for topology in _TOPOLOGIES.value or ["v5e:2x2"]:
        for norm in _NORMS.value or ["none", "bn", "cbn", "fused_cbn"]:

            def compiled(topology=topology, norm=norm):
                keras.config.set_dtype_policy(_POLICY.value)
                model = networks.build(_NETWORK.value, norm)
                return compile_step(model, topology, _BATCH.value)

            yield {"slice": topology, "norm": norm}, compiled


def steps_of_recipes():
    """The same for `--check`."""
    for network in _NETWORKS.value:
        for norm in _NORMS.value or ["cbn"]:
            for topology in _TOPOLOGIES.value or tpu_check.TOPOLOGIES:

                def compiled(network=network, norm=norm, topology=topology):
                    return tpu_check.compile_step(
                        network, norm, topology, _BATCH.value, _POLICY.value
                    )

                yield {"network": network, "slice": topology, "norm": norm}, compiled


def done(settings):
    """The rows of the file to write, if it has some of the same settings."""
    if not _OUTPUT.value or not os.path.exists(_OUTPUT.value):
        return []
    with open(_OUTPUT.value) as file:
        report = json.load(file)
    if any(report.get(key) != value for key, value in settings.items()):
        return []
    return report["rows"]


def main(_):
    settings = {
        "benchmark": "tpu_check" if _CHECK.value else "tpu",
        "network": None if _CHECK.value else _NETWORK.value,
        "batch_per_chip": _BATCH.value,
        "dtype_policy": _POLICY.value,
    }
    rows = done(settings)
    for row, compiled in steps_of_recipes() if _CHECK.value else steps():
        if any(row.items() <= other.items() for other in rows):
            continue
        keras.backend.clear_session()
        row |= tpu_compiler.cost(compiled())
        if _CHECK.value:
            row |= tpu_check.prediction(row)
        rows.append(row)
        print(row, flush=True)
        if _OUTPUT.value:
            compare.write_report(_OUTPUT.value, rows=rows, **settings)
    if _CHECK.value:
        print(compare.table(tpu_check.HEADER, [tpu_check.cells(row) for row in rows]))
    else:
        print(compare.table(HEADER, [cells(row, rows) for row in rows]))


if __name__ == "__main__":
    app.run(main)
