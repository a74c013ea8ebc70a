"""The C++ of PyTorch's kernels on CUDA, compiled for the CPU that is there.

What is compared is what the functions in `normalize` compute, which other tests compare
with references.
"""

import ctypes
import functools
import itertools
import shutil
import subprocess

import numpy as np
import pytest

from keras_norms.ops import normalize
from keras_norms.ops.moments import Moments
from tests.support.backend import torch_only

COMPILER = shutil.which("c++") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
pytestmark = [torch_only, needs_compiler]
CHANNELS = 12
SETTINGS = [
    normalize.CBNSettings(1e-5, -1, decouple=decouple, momentum=0.9)
    for decouple in (True, False)
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Function of a template, its numbers of inputs and outputs, and settings.

    It returns a function of tensors that calls the kernel for each channel, as a GPU
    does. PyTorch reads the C++ here too; it compiles it where there is a GPU.
    """
    directory, numbers = tmp_path_factory.mktemp("kernels"), itertools.count()

    @functools.cache
    def on_this_cpu(template, inputs, outputs, settings):
        from keras_norms.ops.backend.torch_cuda_vectors import compiled, source

        name = compiled(template, outputs, settings).kernel_name
        arguments = ", ".join(f"data[{i}][channel]" for i in range(inputs + outputs))
        path = directory / f"kernel{next(numbers)}"
        path.with_suffix(".cpp").write_text(
            f"#include <math.h>\n{source(template, settings)}\n"
            f'extern "C" void run(double** data, int channels) {{\n'
            f"    for (int channel = 0; channel < channels; ++channel)\n"
            f"        {name}<double>({arguments});\n}}\n"
        )
        library = path.with_suffix(".so")
        command = COMPILER, "-shared", "-fPIC", path.with_suffix(".cpp"), "-o", library
        subprocess.run(command, check=True)
        run = ctypes.CDLL(library).run

        def call(*tensors):
            found = [np.empty(CHANNELS) for _ in range(outputs)]
            given = [np.broadcast_to(t.numpy(), CHANNELS).copy() for t in tensors]
            pointer = ctypes.POINTER(ctypes.c_double)
            data = [array.ctypes.data_as(pointer) for array in (*given, *found)]
            run((pointer * len(data))(*data), CHANNELS)
            return found

        return call

    return on_this_cpu


def vectors(count):
    import torch

    return torch.tensor(np.random.default_rng(0).normal(size=(count, CHANNELS)))


def scalar(value):
    import torch

    return torch.tensor(value, dtype=torch.float64)


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        b = np.broadcast_to(b.numpy(), CHANNELS)
        np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-300)


@pytest.mark.parametrize("rate", [-1.0, 0.0, 0.03, 0.5])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("case", ["usual", "first", "not finite", "empty"])
def test_the_map_of_a_batch(kernels, rate, settings, case):
    from keras_norms.ops.backend.torch_cuda_vectors import MAP

    mean, variance, beta, old_mean, old_square = vectors(5)
    variance, old_square = variance.square(), old_square.square()
    if case == "not finite":
        mean[0], variance[1] = float("nan"), float("inf")
    count = scalar(0.0 if case == "empty" else 64.0)
    state = normalize.CBNState(
        old_mean, old_square, scalar(0.0 if case == "first" else 0.7)
    )
    batch, rate = Moments(count, mean, variance), scalar(rate)
    expected, after = normalize.map_of_moments.__wrapped__(
        batch, beta, state, scalar(1.0), rate, settings=settings
    )
    run = kernels(MAP, 8, 8, settings)
    *found, weight = run(mean, variance, beta, *state, rate, count)
    center, inverse, offset, square, one, *averages = found
    assert_equal([center, inverse, offset], expected[:3])
    assert_equal([square, one], [expected.square, expected.mean_weight])
    assert_equal([*averages, weight.max()], after)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("count", [64.0, 0.0])
def test_the_vectors_of_its_gradient(kernels, settings, count):
    from keras_norms.ops.backend.torch_cuda_vectors import GRADIENT

    sums, (gamma, inverse, center, mean, square) = vectors(7).split([2, 5])
    square, one = square.square(), np.ones(())
    batch_map = normalize.BatchMap(
        center, inverse, 0 * center, mean, square, one, scalar(count)
    )
    (scale, k, _, through_mean), *others = normalize.gradient_vectors.__wrapped__(
        sums, sums, gamma, batch_map, replicas=1, settings=settings
    )
    run = kernels(GRADIENT, 8, 5, settings)
    given = *sums, gamma, inverse, center, mean, square, scalar(count)
    assert_equal(run(*given), [scale, k, through_mean, *others])
