"""Hard inputs: no layer is less exact than BatchNormalization on the same ones."""

import numpy as np
import pytest

from tests import numerics
from tests.autodiff import BACKEND

# Largest errors of an output and of a gradient in a dtype; of float32, that of all
# tests of layers. TensorFlow comes to 2e-6 on a CPU, the others to 5e-7.
ROUNDING = {"float32": 1e-5, "mixed_float16": 2e-3, "mixed_bfloat16": 2e-2}
ROUNDING["float64"] = 1e-5 if BACKEND == "jax" else 1e-12


# The squares of 1e18, added up, are no float32.
@pytest.mark.parametrize("case", sorted(numerics.CASES.keys() - {"deviation 1e18"}))
@pytest.mark.parametrize("layer", sorted(numerics.LAYERS.keys() - {numerics.KERAS}))
def test_errors(layer, case):
    found = numerics.errors(layer, case).max(0)
    keras_errors = numerics.errors(numerics.KERAS, case).max(0)
    bound = ROUNDING[numerics.CASES[case][1]]
    # PyTorch's BatchNormalization is not finite where means are large.
    allowed = np.where(np.isfinite(keras_errors), 2 * keras_errors, 1e-3)
    assert np.all(found <= np.maximum(allowed, bound))
