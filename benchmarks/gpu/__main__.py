"""What a training step costs on H100 GPUs, by XLA's GPU compiler, without a GPU.

    python -m benchmarks.gpu                       # ResNet-50 on one GPU, 12 minutes
    python -m benchmarks.gpu --network=efficientnetb0 --topologies=1x1x1,1x1x4

Compiles the whole step of a Keras model (forward, backward, SGD with momentum, moving
statistics) for all GPUs with the batch divided among them, and prints per GPU what the
compiler reports: bytes that the step moves, temporary memory, how many kernels it
starts, how many of these move less than 1 MB, and how many all-reduces. These numbers
do not fluctuate. They are not times: nothing runs. The floor of a normalisation is the
network without any.

Needs JAX, jax-cuda12-plugin, jax-cuda12-pjrt and 4 GB, but no GPU. Prints a table;
--output also writes it as JSON, and the same command continues with what is missing
there.
"""

from benchmarks.gpu import compiler  # isort: skip  # before JAX

import functools
import itertools

import keras
from absl import app, flags

from benchmarks import compare, compiled, networks

_NETWORK = flags.DEFINE_enum(
    "network", "resnet50", sorted(networks.NETWORKS), "Network."
)
_NORMS = compare.define_names(
    "norms", ["none", "bn", "cbn", "fused_cbn"], networks.ALL_NORMS, "To compare."
)
_TOPOLOGIES = flags.DEFINE_list("topologies", ["1x1x1"], "Slices of GPUs: 1x1x4 has 4.")
_SKIP = flags.DEFINE_string(
    "skip", None, "Layers that get no CBN, a regular expression."
)
_BATCH = flags.DEFINE_integer("batch_per_chip", 128, "Images.", lower_bound=1)
_POLICY = flags.DEFINE_string("dtype_policy", "mixed_bfloat16", "Dtype policy.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")


def costs(topology, norm):
    """What the compiler reports for a step."""
    keras.config.set_dtype_policy(_POLICY.value)
    model = networks.build(_NETWORK.value, norm, skip=_SKIP.value)
    chips = compiler.chips(topology)
    step = compiled.compile_step(model, chips, _BATCH.value, loss_last=True)
    return compiler.cost(step)


def main(_):
    settings = {
        "benchmark": "gpu",
        "network": _NETWORK.value,
        "batch_per_chip": _BATCH.value,
        "dtype_policy": _POLICY.value,
        "skip": _SKIP.value,
    }
    steps = (
        ({"gpus": topology, "norm": norm}, functools.partial(costs, topology, norm))
        for topology, norm in itertools.product(_TOPOLOGIES.value, _NORMS.value)
    )
    compare.report_steps(steps, settings, _OUTPUT.value)


if __name__ == "__main__":
    app.run(main)
