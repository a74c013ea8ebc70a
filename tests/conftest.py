"""Settings of all tests.

`--hypothesis-profile=many` tries twenty times as many examples of each property.
"""

import pathlib
import random

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("many", max_examples=2000, deadline=None)

HERE = pathlib.Path(__file__).parent
# Where coverage is measured, which takes as long as tests themselves: those of
# keras_norms, and on JAX those of what it has of its own.
COVERING = "diagnostics layers ops surgery test_amat.py test_public_arguments.py"
COVERING_JAX = """
    diagnostics/test_gradients.py layers/test_fused_cbn.py layers/test_learning_rate.py
    layers/test_recomputation.py ops surgery/test_inline.py surgery/test_recalibrate.py
    test_amat.py
"""
# What JAX compiles fast, not well: networks that run a few times, whose tests are not
# of the last digits. Most of what they take there is LLVM, the optimizer of XLA.
COMPILED_FAST = "diagnostics layers/test_models.py surgery"


def is_in(path, names):
    return any(path.is_relative_to(HERE / name) for name in names.split())


@pytest.fixture(autouse=True, scope="module")
def compiled_fast(request):
    from tests.support.backend import BACKEND

    if BACKEND == "jax":
        import jax

        is_fast = is_in(request.path, COMPILED_FAST)
        jax.config.update("jax_disable_most_optimizations", is_fast)


@pytest.fixture(autouse=True)
def seeds():
    """Each test draws the same numbers in every run, whatever ran before it."""
    random.seed(0)  # of which Keras makes the seeds that nobody gave it
    np.random.seed(0)


def pytest_collection_modifyitems(items):
    # Not by the process that only starts others.
    from tests.support.backend import BACKEND

    names = COVERING_JAX if BACKEND == "jax" else COVERING
    for item in items:
        if not is_in(item.path, names):
            item.add_marker("no_cover")
