"""A function with a gradient of its own, differentiated and mapped over."""

import numpy as np
import pytest
from keras import ops

from keras_norms.ops.custom_gradient import custom_gradient
from tests.support.autodiff import BACKEND, training_step
from tests.support.weight_reference import AsLayer

# Gradients of other functions than the one they are given for: to tell them apart.
square = custom_gradient(lambda x: x * x, lambda upstream, x: (3 * upstream * x,))
scaled = custom_gradient(
    lambda x, factor, constant: factor * x + constant,
    lambda upstream, x, factor, constant: (5 * upstream * factor, None, None),
)


def both(x):
    return scaled(square(x), ops.convert_to_tensor(2.0), ops.sum(x))


def test_the_gradient_is_the_given_one():
    x = np.array([1.0, -2.0, 0.5], "float32")
    y, dx = training_step(AsLayer(both), ops.sum)(x)
    np.testing.assert_allclose(y, 2 * x * x + x.sum(), rtol=1e-6)
    np.testing.assert_allclose(dx, 5 * 2 * 3 * x, rtol=1e-6)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow has no such transform")
def test_mapped_over_examples():
    """The gradient of each, as for the norms of the gradients of examples."""
    if BACKEND == "jax":
        from jax import grad, vmap
    else:
        from torch.func import grad, vmap
    x = np.array([[1.0, -2.0], [0.5, 4.0], [3.0, 0.0]], "float32")
    tensor = ops.convert_to_tensor(x)
    actual = vmap(grad(lambda x: ops.sum(both(x))))(tensor)
    np.testing.assert_allclose(ops.convert_to_numpy(actual), 30 * x, rtol=1e-6)
    actual = ops.convert_to_numpy(vmap(both)(tensor))
    np.testing.assert_allclose(actual, 2 * x * x + x.sum(1, keepdims=True), rtol=1e-6)
