"""Programs for slices of TPUs by the TPU compiler, which needs no TPU.

Import it before anything imports JAX. It needs libtpu; what runs uses the CPU.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

from jax.experimental import topologies  # noqa: E402

from benchmarks import compiled  # noqa: E402


def chips(topology):
    """The `Chips` of a slice, by generation and shape, such as `"v5e:16x16"`.

    The two cores of a v4 or v5p chip count as one.
    """
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return compiled.Chips(described.devices)


def cost(program):
    """What the compiler reports for one chip's program, a dict."""
    memory, analysis = program.memory_analysis(), program.cost_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    held -= memory.alias_size_in_bytes
    return {
        "gigaflops": analysis["flops"] / 1e9,
        "gigabytes_moved": analysis["bytes accessed"] / 1e9,
        "temporary_gigabytes": memory.temp_size_in_bytes / 1e9,
        "memory_gigabytes": held / 1e9,
        **compiled.of_collectives(program.as_text()),
    }
