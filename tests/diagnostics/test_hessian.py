"""Eigenvalues and trace against the dense Hessian."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference


def dense_hessian():
    model = networks.reference_network()
    x, y = networks.regression_batch()
    weights = [networks.numpy(v).astype("float64") for v in model.trainable_variables]
    function, point = reference.of_vector(
        lambda values: reference.loss(values, x, y), weights
    )
    return model, x, y, reference.hessian(function, point)


def test_eigenvalues_are_those_of_the_dense_hessian():
    model, x, y, hessian = dense_hessian()
    expected = np.linalg.eigvalsh(hessian)[::-1]
    find = diagnostics.hessian_eigenvalues
    top = find(model, x, y, count=3, tolerance=1e-6)
    np.testing.assert_allclose(top, expected[:3], rtol=1e-4)
    bottom = find(model, x, y, count=2, which="SA", tolerance=1e-6)
    np.testing.assert_allclose(bottom, expected[-2:], rtol=1e-3)
    largest = find(model, x, y, which="LM")
    assert abs(largest[0]) == pytest.approx(np.max(np.abs(expected)), rel=1e-3)


def test_trace_is_that_of_the_dense_hessian_within_its_error():
    model, x, y, hessian = dense_hessian()
    found = diagnostics.hessian_trace(model, x, y, samples=100)
    assert abs(found.trace - np.trace(hessian)) < 4 * found.standard_error
    # Var(v^T H v) = 2 sum of squares off the diagonal.
    off_diagonal = hessian - np.diag(np.diag(hessian))
    expected = np.sqrt(2 * np.sum(off_diagonal**2) / 100)
    assert found.standard_error == pytest.approx(expected, rel=0.3)
    assert found.trace == pytest.approx(np.mean(found.samples))


def test_trace_of_a_diagonal_hessian_is_exact():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, use_bias=False)])
    x = np.diag([1.0, 2.0, 3.0, 4.0])
    found = diagnostics.hessian_trace(model, x, np.ones((4, 1)), "mse", samples=3)
    np.testing.assert_allclose(found.samples, 2 / 4 * 30, rtol=1e-5)
    assert found.standard_error < 1e-4


def test_bad_input():
    model, x, y, _ = dense_hessian()
    with pytest.raises(ValueError, match="`count` must be an integer, positive"):
        diagnostics.hessian_eigenvalues(model, x, y, count=0)
    with pytest.raises(ValueError, match="`count` must be less than the .* weights"):
        diagnostics.hessian_eigenvalues(model, x, y, count=model.count_params())
    with pytest.raises(ValueError, match="`which` must be one of"):
        diagnostics.hessian_eigenvalues(model, x, y, which="BE")
    with pytest.raises(ValueError, match="`samples` must be an integer, at least 2"):
        diagnostics.hessian_trace(model, x, y, samples=1)
    model.trainable_variables[0].assign(np.full((5, 4), np.nan))
    with pytest.raises(ValueError, match="Hessian of the loss is not finite"):
        diagnostics.hessian_eigenvalues(model, x, y)
