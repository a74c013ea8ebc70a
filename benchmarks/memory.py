"""Peak memory of a training step of whole networks, with each normalisation.

    python -m benchmarks.memory                     # TensorFlow, resident memory
    KERAS_BACKEND=jax python -m benchmarks.memory   # JAX, as the compiler allots it

On JAX the training step of `fit` is compiled and not run. The peak is what the program
allocates: temporary memory, arguments, and outputs that do not reuse an argument's
memory. It is exact, on a CPU and on a GPU.

On TensorFlow and PyTorch each candidate trains for a few steps of `fit` in its own
process. On a GPU the peak is that of the framework's allocator. On a CPU it is the
process's highest resident memory after the first steps, minus what was resident before
the model was made. This is an upper bound, because a page stays resident as long as
anything on it does. Large blocks are returned to the system at once
(`MALLOC_MMAP_THRESHOLD_`), and so count only while they live. What the framework itself
takes to trace and hold a graph counts too: some 100 MB, and more for a graph of more
operations. Therefore each candidate also trains with half of the images; the difference
gives the memory per image, of its activations alone. Linux only.

The ratio to BatchNormalization is that of the memory per image if it was measured, else
that of the peak; the floor is `none`, without any normalisation.

Prints a table; --output also writes it as JSON with versions and machine.
"""

import ast
import json
import os
import re
import subprocess
import sys

import keras
from absl import app, flags

from benchmarks import compare, networks, training

STEPS = 3


def compile_step(model, batch):
    """The compiled training step of `fit`, on JAX."""
    import jax

    model.optimizer.build(model.trainable_variables)
    x, y = next(training.endless_batch(model, batch))
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([v.value for v in part] for part in variables)
    step = jax.jit(model.train_step, donate_argnums=0)
    return step.lower(state, (x, y)).compile()


def allotted(compiled):
    """Bytes that a compiled program takes."""
    memory = compiled.memory_analysis()
    return {
        "peak_bytes": memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def by_the_compiler(network, norm, policy):
    """Peak and temporary bytes, on JAX."""
    keras.config.set_dtype_policy(policy)
    name, size, batch = networks.parse(network)
    model = training.compile_model(networks.build(name, norm, size))
    return allotted(compile_step(model, batch))


def of_this_process(network, norm, policy, jit_compile="auto"):
    """Peak bytes of a few steps, on TensorFlow and PyTorch."""
    keras.config.set_dtype_policy(policy)
    name, size, batch = networks.parse(network)
    meter = _meter()
    before = meter.now()
    model = networks.build(name, norm, size)
    training.compile_model(model, jit_compile)
    data = training.endless_batch(model, batch)
    callbacks = training.callbacks_for(model)
    training.seconds_per_step(model, data, 1, callbacks)
    meter.reset()
    training.seconds_per_step(model, data, STEPS, callbacks)
    return {"peak_bytes": meter.peak() - before}


class Resident:
    """Resident memory of this process, as counted by Linux."""

    def now(self):
        return self._read("VmRSS")

    def peak(self):
        return self._read("VmHWM")

    def reset(self):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def _read(self, key):
        with open("/proc/self/status") as file:
            return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", file.read())[1])


class TensorFlowGPU:
    """Memory of TensorFlow's allocator."""

    def __init__(self):
        import tensorflow as tf

        memory, gpu = tf.config.experimental, "GPU:0"
        self.now = lambda: memory.get_memory_info(gpu)["current"]
        self.peak = lambda: memory.get_memory_info(gpu)["peak"]
        self.reset = lambda: memory.reset_memory_stats(gpu)


class TorchGPU:
    """Memory of PyTorch's allocator."""

    def __init__(self):
        import torch

        self.now = torch.cuda.memory_allocated
        self.peak = torch.cuda.max_memory_allocated
        self.reset = torch.cuda.reset_peak_memory_stats


def _meter():
    if keras.backend.backend() == "torch":
        import torch

        return TorchGPU() if torch.cuda.is_available() else Resident()
    import tensorflow as tf

    return TensorFlowGPU() if tf.config.list_physical_devices("GPU") else Resident()


def in_a_process(*arguments):
    """`of_this_process` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", f"--alone={arguments}"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**18)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def of_an_image(network, norm, *settings):
    """Peak bytes, and how they grow with the batch."""
    name, size, batch = networks.parse(network)
    if batch < 2:
        raise ValueError(f"Two images or more are needed. Received: {network}")
    half = batch // 2
    peak, less = (
        in_a_process(f"{name}:{size}:{images}", norm, *settings)["peak_bytes"]
        for images in (batch, half)
    )
    return {"peak_bytes": peak, "bytes_per_image": (peak - less) / (batch - half)}


def measure(network, norms, policy="float32", jit_compile="auto"):
    """Measure one network with every norm. Returns a list of rows.

    Args:
        network: For example `"resnet20:32:128"`.
        norms: Names in `networks.NORMS`, `"bn"` among them.
        policy: Name of the dtype policy.
        jit_compile: Argument of `compile`; not for JAX, which compiles the step anyway.
    """
    rows = []
    for norm in norms:
        if keras.backend.backend() == "jax":
            result = by_the_compiler(network, norm, policy)
        else:
            result = of_an_image(network, norm, policy, jit_compile)
        rows.append({"network": network, "norm": norm, **result})
        print(rows[-1], flush=True)
        keras.utils.clear_session(free_memory=True)
    key = "bytes_per_image" if "bytes_per_image" in rows[0] else "peak_bytes"
    base = rows[[*norms].index(networks.YARDSTICK)][key]
    return [{**row, "ratio": row[key] / base} for row in rows]


def define_flags():
    networks.define_flags()
    flags.DEFINE_string("alone", None, "For the processes that this one starts.")


def main(_):
    values = flags.FLAGS
    if values.alone:
        print(json.dumps(of_this_process(*ast.literal_eval(values.alone))))
        return
    jit_compile = "auto" if values.jit_compile is None else values.jit_compile
    rows = []
    for network in values.networks:
        rows += measure(network, values.norms, values.dtype_policy, jit_compile)
    settings = {"dtype_policy": values.dtype_policy, "jit_compile": jit_compile}
    compare.report(values.output, "memory", rows, **settings)


if __name__ == "__main__":
    define_flags()
    app.run(main)
