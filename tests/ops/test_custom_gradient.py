"""The ways in which a backend runs a pass over activations agree."""

import importlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms import CBN
from keras_norms.ops import custom_gradient
from keras_norms.ops.moments import moments
from tests.support.autodiff import BACKEND, second_derivative, training_step
from tests.support.cbn_reference import relative_error

tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")
COMPILED = {"tensorflow": "graph", "jax": "jit_compile", "torch": "eager"}[BACKEND]


def kernels():
    """The module of this backend's passes for a CPU."""
    return importlib.import_module(f"keras_norms.ops.{BACKEND}_cpu")


def results(x, g, mode, **arguments):
    """Output, gradients and second derivative of the second training step."""
    weights = ops.convert_to_tensor(g)

    def loss(y):
        return ops.sum(weights * y * y)

    layer = CBN(**arguments)
    layer.build(x.shape)
    layer.set_learning_rate(0.03)
    step = training_step(layer, loss, mode)
    step(x[::-1].copy())
    return [*step(x), second_derivative(layer, x, loss, g, mode)]


@tensorflow_only
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
    "shape",
    {
        # TensorFlow compiles smaller samples as a whole.
        "tensorflow": [(64, 4096), (8, 30, 25, 4), (4, 3, 5, 40, 4), (4, 9, 4096)],
        "torch": [(64, 1024), (8, 64, 64, 3), (4, 3, 37, 11, 211)],
    }.get(BACKEND, []),
)
def test_kernels_for_the_cpu_equal_the_composition(monkeypatch, shape):
    rng = np.random.default_rng(1)
    x, g = rng.normal(1, 2, (2, *shape)).astype("float32")
    actual = results(x, g, COMPILED)
    monkeypatch.setattr(kernels(), "apply_to", lambda *_, **__: False)
    expected = results(x, g, COMPILED)
    for value, wanted in zip(actual, expected):
        assert relative_error(value, wanted) < 1e-5
    # Equal to the last digit, no kernel would have run.
    assert not np.array_equal(actual[1], expected[1])


@tensorflow_only
def test_kernels_for_the_cpu_stay_out_of_xla():
    import tensorflow as tf

    applied = []

    def trace(x, vector):
        applied.append(kernels().apply_to(x, vector, axis=-1))
        return x

    arguments = tf.zeros((4, 3)), tf.zeros(3)
    tf.function(trace)(*arguments)
    tf.function(trace, jit_compile=True)(*arguments)

    @tf.function(jit_compile=True)
    def outer(*arguments):
        return tf.function(trace)(*arguments)

    outer(*arguments)
    assert applied == [True, False, False]


@tensorflow_only
def test_xla_compiles_on_a_cpu_where_shapes_are_few():
    import tensorflow as tf

    def compiles(xla, *shape):
        return custom_gradient._compiles(xla, [tf.TensorSpec(shape), tf.TensorSpec(())])

    assert compiles(True, None, 32, 32, 64)
    assert not compiles(True, None, None, 64)
    assert not compiles(False, None, 64)
    assert compiles("small", None, 64)
    assert not compiles("small", None, 32, 32, 64)


@tensorflow_only
@pytest.mark.parametrize("training", [True, False])
def test_inference_can_be_exported_to_where_there_is_no_xla(training):
    import tensorflow as tf

    layer = CBN(axis=1)
    layer.build((None, 4, 8, 8))
    traced = tf.function(lambda x: layer(x, training=training)).get_concrete_function(
        tf.TensorSpec((None, 4, 8, 8))
    )
    functions = traced.graph.as_graph_def().library.function
    assert any("_XlaMustCompile" in f.attr for f in functions) == training


@tensorflow_only
def test_sizes_known_only_at_run_time():
    import tensorflow as tf

    rng = np.random.default_rng(3)
    x, g = rng.normal(1, 2, (2, 6, 7, 40, 16)).astype("float32")
    layer = CBN()
    layer.build(x.shape)

    def gradients(x, g):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, x, output_gradients=g)

    unknown = tf.TensorSpec((None, None, None, 16))
    expected = tf.function(gradients)(tf.constant(x), tf.constant(g))
    actual = tf.function(gradients, input_signature=[unknown] * 2)(x, g)
    for value, wanted in zip(actual, expected):
        assert relative_error(value, wanted) < 1e-5


@pytest.mark.parametrize("mean", [3, 1000])
def test_statistics_of_many_elements_keep_their_digits(mean):
    rng = np.random.default_rng(2)
    x = (rng.normal(size=(64, 128, 128, 4)) + mean).astype("float32")
    exact = x.astype("float64")
    batch = moments(ops.convert_to_tensor(x), "float32", axis=-1)
    actual_mean, actual_variance = map(
        keras.ops.convert_to_numpy, (batch.mean, batch.variance)
    )
    assert relative_error(actual_mean, exact.mean((0, 1, 2))) < 1e-6
    assert relative_error(actual_variance, exact.var((0, 1, 2))) < 4e-6
