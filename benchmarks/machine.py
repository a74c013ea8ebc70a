"""What a benchmark ran on: processor, versions, cache and copy bandwidth."""

import concurrent.futures
import importlib.metadata
import pathlib
import platform
import time

import keras
import numpy as np

from recipes.engine import workers


def describe():
    """Return machine and versions as a dictionary for a JSON report."""
    versions = {"python": platform.python_version()}
    for package in ("keras", "tensorflow", "jax", "torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "backend": keras.backend.backend(),
        "device": _device(),
        "processor": _processor(),
        "cores": workers.cores(),
        "versions": versions,
    }


def _processor():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def _device():
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
        return ", ".join(d.get("device_name", "GPU") for d in details) or "cpu"
    if backend == "jax":
        import jax

        return jax.devices()[0].device_kind
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def cache_bytes():
    """Return the size of the last-level cache; 0 if it cannot be read."""
    sizes = [0]
    for file in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes) if _device() == "cpu" else 0


def copy_bandwidth(rounds=10):
    """Bytes per second, read plus written, of a large copy by all cores of the host.

    It uses NumPy, to give a machine one figure for all frameworks.
    """
    threads = workers.cores()
    source, target = (
        np.array_split(np.ones(2**26, "float32"), threads) for _ in range(2)
    )
    times = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            start = time.perf_counter()
            list(pool.map(np.copyto, target, source))
            times.append(time.perf_counter() - start)
    return 2 * 4 * 2**26 / min(times)
