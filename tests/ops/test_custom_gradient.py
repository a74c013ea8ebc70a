"""The ways in which TensorFlow runs a pass over activations agree."""

import numpy as np
import pytest

from keras_norms import CBN
from keras_norms.ops import custom_gradient, tensorflow_cpu
from tests.autodiff import BACKEND, second_derivative, training_step
from tests.reference import relative_error

pytestmark = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")


def results(x, g, mode, **arguments):
    """Output, gradients and second derivative of the second training step."""
    from keras import ops

    weights = ops.convert_to_tensor(g)

    def loss(y):
        return ops.sum(weights * y * y)

    layer = CBN(**arguments)
    layer.build(x.shape)
    layer.set_learning_rate(0.03)
    step = training_step(layer, loss, mode)
    step(x[::-1].copy())
    return [*step(x), second_derivative(layer, x, loss, g, mode)]


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_compiled_pass_by_pass_as_on_a_gpu(monkeypatch, mode, axis):
    rng = np.random.default_rng(0)
    x, g = rng.normal(1, 2, (2, 16, 6, 5, 4)).astype("float32")
    expected = results(x, g, mode, axis=axis)
    monkeypatch.setattr(custom_gradient, "_has_gpu", lambda: True)
    for actual, wanted in zip(results(x, g, mode, axis=axis), expected):
        assert relative_error(actual, wanted) < 1e-5


@pytest.mark.parametrize(
    "shape", [(64, 4), (8, 6, 5, 4), (4, 3, 5, 2, 4), (4, 9, 4096)]
)
def test_kernels_for_the_cpu_equal_the_composition(monkeypatch, shape):
    rng = np.random.default_rng(1)
    x, g = rng.normal(1, 2, (2, *shape)).astype("float32")
    actual = results(x, g, "graph")
    monkeypatch.setattr(tensorflow_cpu, "apply_to", lambda *_, **__: False)
    for value, wanted in zip(actual, results(x, g, "graph")):
        assert relative_error(value, wanted) < 1e-5


def test_kernels_for_the_cpu_stay_out_of_xla():
    import tensorflow as tf

    applied = []

    def trace(x, vector):
        applied.append(tensorflow_cpu.apply_to(x, vector, axis=-1))
        return x

    arguments = tf.zeros((4, 3)), tf.zeros(3)
    tf.function(trace)(*arguments)
    tf.function(trace, jit_compile=True)(*arguments)

    @tf.function(jit_compile=True)
    def outer(*arguments):
        return tf.function(trace)(*arguments)

    outer(*arguments)
    assert applied == [True, False, False]


def test_statistics_of_many_elements_keep_their_digits():
    import tensorflow as tf

    from keras_norms.ops.moments import moments

    rng = np.random.default_rng(2)
    x = (rng.normal(size=(64, 128, 128, 4)) + 3).astype("float32")
    exact = x.astype("float64")
    batch = moments(tf.constant(x), tf.zeros(4), tf.constant(False), axis=-1)
    assert relative_error(batch.mean, exact.mean((0, 1, 2))) < 1e-6
    assert relative_error(batch.variance, exact.var((0, 1, 2))) < 1e-6
