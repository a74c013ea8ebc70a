"""Programs for slices of TPUs by the TPU compiler, which needs no TPU.

Import it before anything imports JAX. It takes libtpu, and the CPU for what runs.
"""

import math
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
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "f64": 8}
_OPERATION = re.compile(rf" = (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
_TENSOR = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


class Slice:
    """The chips of a slice, in a mesh with one axis, that of the batch.

    Args:
        topology: Generation and shape, as `"v5e:16x16"`.

    Attributes:
        chips: How many.
        everywhere, by_batch: `jax.sharding.NamedSharding` of what every chip holds
            whole, and of what is divided among them along the first axis.
    """

    def __init__(self, topology):
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=topology
        ).devices
        # Two cores of a v4 or v5p chip are one device.
        self.chips = len(devices)
        mesh = Mesh(np.array(devices), ("batch",))
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.by_batch = NamedSharding(mesh, PartitionSpec("batch"))

    def shapes(self, variables):
        """The shapes of variables that every chip holds, for `jax.jit(...).lower`."""
        return [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=self.everywhere)
            for v in variables
        ]

    def batch(self, per_chip, shape, dtype):
        """The shape of a batch that is divided among the chips."""
        shape = (per_chip * self.chips, *shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.by_batch)


def cost(compiled):
    """What the compiler says of one chip's program, a dict."""
    memory, analysis = compiled.memory_analysis(), compiled.cost_analysis()
    kinds = collectives(compiled.as_text())
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "gigaflops": analysis["flops"] / 1e9,
        "gigabytes_moved": analysis["bytes accessed"] / 1e9,
        "temporary_gigabytes": memory.temp_size_in_bytes / 1e9,
        "memory_gigabytes": (
            held
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes
        )
        / 1e9,
        "all_reduces": sum(kind == "all-reduce" for kind, _ in kinds),
        "collectives": {
            kind: sum(other == kind for other, _ in kinds)
            for kind in sorted({kind for kind, _ in kinds})
        },
        "collective_megabytes": sum(size for _, size in kinds) / 1e6,
    }


def collectives(text):
    """The collectives that each run of a compiled program starts.

    Not those of a branch: the only ones are of sums that are taken once more where a
    batch is far from the moving mean, in float32.

    Args:
        text: The program, as `compiled.as_text()` gives it.

    Returns:
        List of the kind of each, and the bytes of its result on one chip.
    """
    program = text[text.index("\nENTRY ") :]
    return [(kind, _size(result)) for result, kind in _OPERATION.findall(program)]


def _size(result):
    return sum(
        _BYTES.get(dtype, 4) * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape in _TENSOR.findall(re.sub(r"\{[^}]*\}", "", result))
    )
