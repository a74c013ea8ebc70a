"""The backend that runs, and what it does not have."""

import keras
import numpy as np
import pytest

BACKEND = keras.backend.backend()

tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")
jax_only = pytest.mark.skipif(BACKEND != "jax", reason="JAX only")
torch_only = pytest.mark.skipif(BACKEND != "torch", reason="PyTorch only")
not_torch = pytest.mark.skipif(BACKEND == "torch", reason="PyTorch runs eagerly")
has_float64 = pytest.mark.skipif(
    BACKEND == "jax", reason="float64 is a process-wide switch of JAX"
)
has_channels_first = pytest.mark.skipif(
    BACKEND == "tensorflow", reason="TensorFlow on a CPU has no NCHW convolutions"
)


def thorough_on(*backends):
    """For `pytestmark`: tests that are left to `make test-all` on these backends."""
    return [pytest.mark.thorough] if BACKEND in backends else []


def later_on_jax(test):
    """Decorator of a test that is left to `make test-all` on JAX."""
    return pytest.mark.thorough(test) if BACKEND == "jax" else test


def numpy(x):
    """A tensor as an array."""
    return np.asarray(keras.ops.convert_to_numpy(x))
