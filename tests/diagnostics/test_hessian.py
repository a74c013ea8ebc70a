"""Eigenvalues and trace against the dense Hessian."""

import numpy as np
import pytest

from keras_norms import diagnostics
from tests.support import diagnostics_reference as reference


@pytest.fixture(scope="module")
def hessian(nonlinear):
    return reference.hessian(
        *reference.of_weights(nonlinear.weights, nonlinear.x, nonlinear.y)
    )


def test_eigenvalues_are_those_of_the_dense_hessian(nonlinear, hessian):
    def find(**settings):
        return diagnostics.hessian_eigenvalues(*nonlinear[:3], **settings)

    expected = np.linalg.eigvalsh(hessian)[::-1]
    top = find(count=3, tolerance=1e-6)
    np.testing.assert_allclose(top, expected[:3], rtol=1e-4)
    bottom = find(count=2, which="SA", tolerance=1e-6)
    np.testing.assert_allclose(bottom, expected[-2:], rtol=1e-3)
    largest = find(which="LM")
    assert abs(largest[0]) == pytest.approx(np.max(np.abs(expected)), rel=1e-3)
    nowhere = np.full_like(nonlinear.x, np.nan)
    with pytest.raises(ValueError, match="Hessian of the loss is not finite"):
        diagnostics.hessian_eigenvalues(nonlinear.model, nowhere, nonlinear.y)


def test_trace_is_that_of_the_dense_hessian_within_its_error(nonlinear, hessian):
    found = diagnostics.hessian_trace(*nonlinear[:3], samples=100)
    assert abs(found.trace - np.trace(hessian)) < 4 * found.standard_error
    # Var(v^T H v) = 2 sum of squares off the diagonal.
    off_diagonal = hessian - np.diag(np.diag(hessian))
    expected = np.sqrt(2 * np.sum(off_diagonal**2) / 100)
    assert found.standard_error == pytest.approx(expected, rel=0.3)
    assert found.trace == pytest.approx(np.mean(found.samples))
