"""ReLUs of this package: values, derivatives, files, what surgery does with them."""

import re

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, activations, convert, diagnostics, fold
from tests.support import autodiff
from tests.support import surgery_models as m
from tests.support.backend import has_latest_xla, jax_only, numpy

HIGHEST = {"relu": np.inf, "relu6": 6}


@pytest.mark.parametrize("name", HIGHEST)
@pytest.mark.parametrize("mode", autodiff.MODES)
def test_value_and_gradient(mode, name):
    model = m.model_of((7,), m.apply(layers.Activation, getattr(activations, name)))
    x = np.array([[-2.0, -0.0, 0.0, 1e-30, 3.0, 6.0, 9.0]], "float32")
    step = autodiff.training_step(model, lambda y: keras.ops.sum(y * y), mode)
    y, slope = step(x)
    np.testing.assert_array_equal(y, np.clip(x, 0, HIGHEST[name]))
    passes = (x > 0) & (x < HIGHEST[name])
    np.testing.assert_array_equal(slope, 2 * np.where(passes, x, 0))


@pytest.mark.parametrize("name", HIGHEST)
def test_second_derivatives(name):
    x, y = np.random.default_rng(0).normal(size=(2, 8, 5))
    products = []
    for activation in (name, getattr(activations, name)):
        keras.utils.set_random_seed(0)
        model = m.model_of((5,), m.dense(6, activation), m.dense(5))
        model.compile("sgd", "mse")
        objective = diagnostics.Objective(model, x, y)
        vector = np.linspace(-1, 1, objective.start.size)
        products.append(objective.hessian_vector_product(vector))
    np.testing.assert_allclose(*products, rtol=1e-5, atol=1e-6)


@jax_only
@pytest.mark.parametrize(
    ("name", "platforms"), [("relu", ["cpu", "cuda", "tpu"]), ("relu6", ["cpu", "tpu"])]
)
def test_the_gradient_reads_the_output(name, platforms):
    import jax

    def total(x):
        return getattr(activations, name)(x).sum()

    traced = jax.jit(jax.grad(total)).trace(np.ones(3, "float32"))
    for platform in ("cpu", "cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        read = re.search(r"compare +GT, (%\w+),", text)[1]
        if platform in platforms:
            assert re.search(rf"{read} = \S*optimization_barrier ", text)
        else:
            assert read == "%arg0"


@jax_only
@has_latest_xla
@pytest.mark.parametrize("name", HIGHEST)
def test_training_on_a_cpu_keeps_the_output_alone(name):
    """Of each of four blocks: what the ReLU makes, and what the next kernel reads."""
    import jax

    def temporary_bytes(activation):
        blocks = [[m.apply(layers.Conv2D, 8, 3, activation=activation), m.apply(CBN)]]
        model = m.model_of((16, 16, 8), *sum(4 * blocks, []), m.apply(layers.Flatten))
        model.compile("sgd", "mse")
        state = model.trainable_variables, model.non_trainable_variables

        def loss(weights, rest, x):
            y, _ = model.stateless_call(weights, rest, x, training=True)
            return (y * y).sum()

        arrays = [[v.value for v in variables] for variables in state]
        x = np.ones((32, 16, 16, 8), "float32")
        step = jax.jit(jax.grad(loss)).lower(*arrays, x).compile()
        return step.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(getattr(activations, name)) < 0.8 * temporary_bytes(name)


def own(model):
    """Names of the layers with a function of this package."""
    functions = activations.relu, activations.relu6
    return [e.name for e in model.layers if getattr(e, "activation", None) in functions]


@pytest.mark.parametrize(("norm", "name"), [("cbn", "relu"), (CBN(rho=2), "relu6")])
def test_convert_gives_it_and_fold_and_norms_of_keras_take_it(norm, name, tmp_path):
    active = m.apply(layers.Activation, name)
    convs = [m.apply(layers.Conv2D, 4, 3, activation=a) for a in (None, name, None)]
    model = m.model_of((9, 9, 3), convs[0], m.bn, active, *convs[1:])
    x = m.batch_for(model)
    new = m.quiet(convert, model, norm, data=x)
    path = tmp_path / "model.keras"
    new.save(path)
    loaded = keras.models.load_model(path)
    assert [len(own(each)) for each in (model, new, loaded)] == [0, 2, 2]
    np.testing.assert_array_equal(numpy(loaded(x)), numpy(new(x)))
    for back in (fold(loaded), m.quiet(convert, loaded, "batch_norm")):
        assert not own(back) and "keras_norms" not in str(back.get_config())
        m.assert_same_outputs(back, model, x)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "relu"),
        ({"max_value": 6.0, "dtype": "mixed_bfloat16"}, "relu6"),
        *(({each: 0.5}, None) for each in ("max_value", "negative_slope", "threshold")),
    ],
)
def test_convert_gives_it_to_a_relu_layer(arguments, name):
    relu = m.apply(layers.ReLU, **arguments, name="r")
    model = m.model_of((5,), m.dense(4), m.bn, relu, m.dense(3))
    new = m.quiet(convert, model, "cbn")
    layer, x = new.get_layer("r"), m.batch_for(model)
    assert layer.dtype_policy == model.get_layer("r").dtype_policy
    if name is None:
        assert layer.get_config() == model.get_layer("r").get_config()
    else:
        assert layer.activation is getattr(activations, name)
        back = fold(new).get_layer("r")
        assert back.activation is getattr(keras.activations, name)
    m.assert_same_outputs(fold(new), new, x)


def test_convert_leaves_the_activation_of_what_others_read():
    def steps(x):
        first, second = (layers.Activation("relu", name=f"of_{i}") for i in "ab")
        conv = layers.Conv2D(3, 3, padding="same")(x)
        both = layers.Concatenate()([conv, x])
        sums = layers.Conv2D(6, 1)(first(both)) + both
        return layers.Conv2D(2, 1)(second(sums))

    model = m.model_of((5, 5, 3), steps)
    for fused, expected in ((False, ["of_b"]), (True, ["of_a", "of_b"])):
        new = m.quiet(convert, model, "cbn", fused=fused)
        found = [e.name for e in new.layers if isinstance(e, layers.Activation)]
        assert found == ["of_a", "of_b"] and own(new) == expected
