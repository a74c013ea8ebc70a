"""Programs for H100 GPUs by XLA's GPU compiler, which needs no GPU.

Import it before anything imports JAX. It needs jax-cuda12-plugin and jax-cuda12-pjrt,
but no driver; what runs uses the CPU.
"""

import os
import pathlib
import re

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import keras  # noqa: E402

# JAX has no public way to get a program's costs for a device that is not present.
from jax._src.lib import _jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from benchmarks import compiled  # noqa: E402

_TARGET = pathlib.Path(__file__).with_name("h100.txtpb")
_SMALL = 1e6  # bytes of the operands and results of a kernel
_INSTRUCTION = re.compile(
    r"^  (?:ROOT )?%(?P<name>\S+) = (?P<result>.*?) "
    r"(?P<kind>[a-z][a-z-]*)\((?P<operands>.*)$",
    re.MULTILINE,
)
_OPERAND = re.compile(r"%([\w.-]+)")
# Operations that start no kernel.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "conditional",
    "while",
    "call",
    *compiled.COLLECTIVES,
}


def chips(topology):
    """The `Chips` of H100 GPUs, by how many, as `"1x1x4"`."""
    described = topologies.get_topology_desc(
        platform="cuda", target_config=_TARGET.read_text(), topology=topology
    )
    # This tells layers that devices share a batch.
    shared = keras.distribution.DataParallel(devices=["cpu:0"])
    several = len(described.devices) > 1
    keras.distribution.set_distribution(shared if several else None)
    return compiled.Chips(described.devices)


def kernels(text):
    """The kernels that each run of a compiled program starts.

    Args:
        text: The program, as `compiled.as_text()` gives it.

    Returns:
        List of the kind of each, such as "fusion" or "custom-call", and the bytes of
        its operands and results.
    """
    program = text[text.index("\nENTRY ") :]
    found = list(_INSTRUCTION.finditer(program))
    sizes = {each["name"]: compiled.size(each["result"]) for each in found}
    result = []
    for each in found:
        kind = each["kind"].removesuffix("-start")
        if kind in _FREE or kind.endswith("-done"):
            continue
        operands = each["operands"].partition(")")[0]
        read = sum(sizes.get(name, 0) for name in _OPERAND.findall(operands))
        result.append((kind, read + sizes[each["name"]]))
    return result


def cost(program):
    """What the compiler reports for one GPU's program, a dict.

    Bytes are those of operands and results of every kernel, as if there were no cache;
    XLA counts custom calls, such as every convolution of cuDNN, as nothing. The memory
    does not include what cuDNN itself needs.
    """
    memory, text = program.memory_analysis(), program.as_text()
    module = program.runtime_executable().hlo_modules()[0]
    analysis = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    started = kernels(text)
    calls = [size for kind, size in started if kind == "custom-call"]
    moved = analysis["bytes accessed"] + sum(calls) + len(calls)
    return {
        "gigabytes_moved": moved / 1e9,
        "temporary_gigabytes": memory.temp_size_in_bytes / 1e9,
        "kernels": len(started),
        "small_kernels": sum(size < _SMALL for _, size in started),
        **compiled.of_collectives(text),
    }
