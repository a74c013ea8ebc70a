"""The current backend, what it lacks, and which tests can wait."""

import keras
import numpy as np
import pytest

from recipes.engine.precision import precision as precision

BACKEND = keras.backend.backend()

if BACKEND == "jax":
    import jax

if BACKEND == "torch":
    import torch

    # In oneDNN the gradient of a strided 1x1 convolution with few channels, as in the
    # tests' small networks, writes outside its memory:
    # https://github.com/uxlfoundation/oneDNN/issues/6035
    torch.backends.mkldnn.set_flags(False)

tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")
jax_only = pytest.mark.skipif(BACKEND != "jax", reason="JAX only")
torch_only = pytest.mark.skipif(BACKEND != "torch", reason="PyTorch only")
not_torch = pytest.mark.skipif(BACKEND == "torch", reason="PyTorch runs eagerly")
has_float64 = pytest.mark.skipif(
    BACKEND == "jax", reason="float64 is a process-wide switch of JAX"
)
# On a CPU, earlier XLA keeps more and adds up less exactly: docs/results/numerics.md.
has_latest_xla = pytest.mark.skipif(
    BACKEND == "jax" and jax.__version_info__ < (0, 10, 2), reason="JAX before 0.10.2"
)
has_channels_first = pytest.mark.skipif(
    BACKEND == "tensorflow", reason="TensorFlow on a CPU has no NCHW convolutions"
)

thorough = pytest.mark.thorough
# Slow tests that hardly depend on the backend run on the fastest one only.
once = pytest.mark.skipif(BACKEND != "torch", reason="tested with PyTorch")


def later(*values, marks=()):
    """Parameters that are left to `make test-all`: each a value, or a tuple of them."""
    values = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*each, marks=[thorough, *marks]) for each in values]


def some(values, few):
    """Parameters, all but a few of them left to `make test-all`."""
    return [each for v in values for each in ([v] if v in few else later(v))]


def thorough_on(*backends):
    """For `pytestmark`: tests that are left to `make test-all` on these backends."""
    return [thorough] if BACKEND in backends else []


def later_on_jax(test):
    """Decorator of a test that is left to `make test-all` on JAX."""
    return thorough(test) if BACKEND == "jax" else test


def numpy(x):
    """A tensor as an array."""
    return np.asarray(keras.ops.convert_to_numpy(x))
