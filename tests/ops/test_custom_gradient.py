"""Gradients by hand, and the ways in which a backend runs a pass over activations."""

import numpy as np
import pytest
from keras import ops

from keras_norms import CBN
from keras_norms.ops import custom_gradient, moments, passes, single_pass
from tests.support.any_layer import FORMS
from tests.support.autodiff import second_derivative, training_step
from tests.support.backend import BACKEND, later, numpy, tensorflow_only, torch_only
from tests.support.normalizations import assert_near
from tests.support.weight_reference import AsLayer

COMPILED = {"tensorflow": "graph", "jax": "jit_compile", "torch": "eager"}[BACKEND]
# Gradients of other functions than the one they are given for: to tell them apart.
square = custom_gradient.custom_gradient(
    lambda x: x * x, lambda upstream, x: (3 * upstream * x,)
)
scaled = custom_gradient.custom_gradient(
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


@torch_only  # On JAX populations of trials are mapped.
def test_mapped_over_examples():
    """The gradient of each, as for the norms of the gradients of examples."""
    from torch.func import grad, vmap

    x = np.array([[1.0, -2.0], [0.5, 4.0], [3.0, 0.0]], "float32")
    tensor = ops.convert_to_tensor(x)
    actual = vmap(grad(lambda x: ops.sum(both(x))))(tensor)
    np.testing.assert_allclose(numpy(actual), 30 * x, rtol=1e-6)
    expected = 2 * x * x + x.sum(1, keepdims=True)
    np.testing.assert_allclose(numpy(vmap(both)(tensor)), expected, rtol=1e-6)


def results(layer, x, g, mode, **mask):
    """The second training step of a new layer."""
    weights = ops.convert_to_tensor(g)

    def loss(y):
        return ops.sum(weights * y * y)

    layer.build(x.shape)
    if isinstance(layer, CBN):
        layer.set_learning_rate(0.03)
    step = training_step(layer, loss, mode, **mask)
    step(x[::-1].copy())
    directions = g, *map(numpy, layer.trainable_variables)
    found = [*step(x), *second_derivative(layer, x, loss, directions, mode, **mask)]
    return found + [numpy(v) for v in layer.non_trainable_variables]


GPU = [("CBN", -1, "graph"), ("LpNorm(1.5)", -1, "eager")]
GPU += [("LpNorm(inf, centered)", -1, "graph")]


@tensorflow_only
@pytest.mark.parametrize(("name", "axis", "mode"), [("CBN", 1, "eager"), *later(*GPU)])
def test_compiled_pass_by_pass_as_on_a_gpu(monkeypatch, name, axis, mode):
    rng = np.random.default_rng(0)
    x, g = rng.normal(1, 2, (2, 8, 3, 5, 4)).astype("float32")
    visible = ops.convert_to_tensor(rng.random((8, 3, 5)) < 0.6)
    mask = {} if name == "CBN" else {"mask": visible}
    expected = results(FORMS[name].make(axis=axis), x, g, mode, **mask)
    monkeypatch.setattr(single_pass, "_has_gpu", lambda: True)
    actual = results(FORMS[name].make(axis=axis), x, g, mode, **mask)
    assert_near(actual, expected)


# `test_passes` has each kernel on each kind of shape.
LARGE = later(((64, 8192), {}, False), ((60, 3, 5, 10, 60), {}, False))


@pytest.mark.parametrize(
    ("shape", "settings", "masked"),
    {
        # Smaller ones have none.
        "tensorflow": [((60, 30, 25, 12), {}, False), *LARGE],
        "torch": [
            ((64, 1024), {}, False),
            ((8, 64, 64, 3), {}, False),
            ((4, 3, 37, 11, 211), {}, False),
            ((8, 24, 20, 20), {"axis": 1}, False),
            ((8, 20, 20, 24), {}, True),
            ((8, 32, 32, 24), {"group_size": 4}, False),
        ],
    }.get(BACKEND, []),
)
def test_kernels_for_the_cpu_equal_the_composition(
    monkeypatch, shape, settings, masked
):
    rng = np.random.default_rng(1)
    x, g = rng.normal(1, 2, (2, *shape)).astype("float32")
    mask = {}
    if masked:
        mask["mask"] = ops.convert_to_tensor(rng.random(shape[:-1]) < 0.6)
    actual = results(CBN(**settings), x, g, COMPILED, **mask)
    names = ("affine", "gradient_sums", "gradient_x")
    functions = [getattr(passes, name) for name in names]
    for function in [moments.mean_and_variance, moments.masked_moments, *functions]:
        monkeypatch.setattr(function, "kernels", [])
    expected = results(CBN(**settings), x, g, COMPILED, **mask)
    assert_near(actual, expected)
    # Equal to the last digit, no kernel would have run.
    assert not np.array_equal(actual[1], expected[1])


@tensorflow_only
@pytest.mark.parametrize("training", [True, False])
def test_inference_can_be_exported_to_where_there_is_no_xla(training):
    import tensorflow as tf

    layer = CBN(axis=1)
    layer.build((None, 4, 64, 64))

    def call(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=training)
        return tape.gradient(y, x) if training else y

    traced = tf.function(call).get_concrete_function(tf.TensorSpec((None, 4, 64, 64)))
    functions = traced.graph.as_graph_def().library.function
    assert any("_XlaMustCompile" in f.attr for f in functions) == training
