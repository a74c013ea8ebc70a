"""What a training step costs on a slice of TPUs, by the TPU compiler, without a TPU.

    python -m benchmarks.tpu                       # ResNet-50 on v5e:2x2, 10 minutes
    python -m benchmarks.tpu --network=resnet20 --topologies=v6e:1x1,v6e:16x16
    python -m benchmarks.tpu --check               # every recipe network, an hour

Compiles the whole step of a Keras model (forward, backward, SGD with momentum, moving
statistics) for all chips of a slice with the batch divided among them, and prints per
chip what the compiler reports: bytes that the step moves, temporary memory, and how
many all-reduces it starts. These numbers do not fluctuate. They are not times: nothing
runs. The floor of a normalisation is the network without any.

`--check` compiles a step of each network of `recipes.train` for v4, v5e, v5p and v6e,
and predicts from it how training scales: see `benchmarks/tpu/check.py`.

Needs JAX, libtpu and 4 GB, but no TPU. Prints a table; --output also writes it as JSON,
and the same command continues with what is missing there.
"""

from benchmarks.tpu import compiler  # isort: skip  # before JAX

import functools
import itertools

import keras
from absl import app, flags

from benchmarks import compare, compiled, networks
from benchmarks.tpu import check
from recipes.models import norms as recipe_norms

_CHECK = flags.DEFINE_bool("check", False, "Compile the steps of recipes.")
_NETWORK = flags.DEFINE_enum(
    "network", "resnet50", sorted(networks.NETWORKS), "Network."
)
_NETWORKS = compare.define_names(
    "networks", list(check.NETWORKS), check.NETWORKS, "For --check."
)
_NORMS = flags.DEFINE_list(
    "norms", None, "To compare; cbn with --check, else all four."
)
_TOPOLOGIES = flags.DEFINE_list("topologies", None, "Slices, as v5e:2x2.")
_BATCH = flags.DEFINE_integer("batch_per_chip", 128, "Images.", lower_bound=1)
_GROUP_SIZE = flags.DEFINE_integer(
    "group_size", None, "Of the CBN layers of --check, samples.", lower_bound=1
)
_POLICY = flags.DEFINE_string("dtype_policy", "mixed_bfloat16", "Dtype policy.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")


def costs(topology, norm):
    """What the compiler reports for a step."""
    keras.config.set_dtype_policy(_POLICY.value)
    model = networks.build(_NETWORK.value, norm)
    step = compiled.compile_step(model, compiler.chips(topology), _BATCH.value)
    return compiler.cost(step)


def costs_of_recipe(network, norm, topology):
    """The same for `--check`, and how training scales."""
    options = _BATCH.value, _POLICY.value, _GROUP_SIZE.value
    program = check.compile_step(network, norm, topology, *options)
    row = {"slice": topology, **compiler.cost(program)}
    return row | check.prediction(row)


def steps():
    """The steps to compile: slice and norm, and a function that returns their costs."""
    topologies = _TOPOLOGIES.value or ["v5e:2x2"]
    norms = _NORMS.value or ["none", "bn", "cbn", "fused_cbn"]
    for topology, norm in itertools.product(topologies, norms):
        step = functools.partial(costs, topology, norm)
        yield {"slice": topology, "norm": norm}, step


def steps_of_recipes():
    """The same for `--check`."""
    norms, topologies = _NORMS.value or ["cbn"], _TOPOLOGIES.value or check.TOPOLOGIES
    groups = f", groups of {_GROUP_SIZE.value}" if _GROUP_SIZE.value else ""
    for case in itertools.product(_NETWORKS.value, norms, topologies):
        network, norm, topology = case
        named = {"network": network, "slice": topology, "norm": norm + groups}
        yield named, functools.partial(costs_of_recipe, *case)


def main(_):
    if not _CHECK.value and (_GROUP_SIZE.value or _NETWORKS.present):
        raise app.UsageError("--networks and --group_size are those of --check.")
    known = recipe_norms.NORMS if _CHECK.value else networks.ALL_NORMS
    if not {*(_NORMS.value or ())} <= {*known}:
        raise app.UsageError(f"--norms must be of {', '.join(known)}.")
    generations = {each.partition(":")[0] for each in _TOPOLOGIES.value or ()}
    if _CHECK.value and not generations <= {*check.CHIPS}:
        raise app.UsageError(f"--check knows chips of {', '.join(check.CHIPS)} alone.")
    settings = {
        "benchmark": "tpu_check" if _CHECK.value else "tpu",
        "network": None if _CHECK.value else _NETWORK.value,
        "batch_per_chip": _BATCH.value,
        "dtype_policy": _POLICY.value,
    }
    each = steps_of_recipes() if _CHECK.value else steps()
    compare.report_steps(each, settings, _OUTPUT.value)


if __name__ == "__main__":
    app.run(main)
