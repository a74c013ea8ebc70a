"""Gradients and Hessian-vector products of a loss, and what they leave alone."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference
from tests.support.diagnostics_networks import (
    BACKEND,
    assert_same,
    numpy,
    relative_error,
    weights_of,
)

rng = np.random.default_rng(3)


@pytest.fixture(params=networks.PRECISIONS)
def rounding(request):
    """How near a gradient comes to the reference; models are made in this precision."""
    with networks.precision(request.param):
        yield 1e-5 if request.param == "float32" else 1e-10


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


# Against NumPy


def test_gradient_and_hessian_over_weights_are_those_of_a_reference(rounding):
    model = networks.reference_network()
    x, y = networks.regression_batch()
    weights = weights_of(model)
    function, point = reference.of_vector(
        lambda values: reference.loss(values, x, y), weights
    )
    loss, gradient = diagnostics.value_and_grad(model, x, y)
    assert loss == pytest.approx(function(point), rel=rounding)
    assert [g.shape for g in gradient] == [w.shape for w in weights]
    assert (
        relative_error(flat(gradient), reference.gradient(function, point)) < rounding
    )

    vector = [rng.normal(size=w.shape) for w in weights]
    product = diagnostics.hessian_vector_product(model, x, y, vector)
    expected = reference.hessian_vector_product(function, point, flat(vector))
    assert relative_error(flat(product), expected) < max(10 * rounding, 1e-7)


@pytest.mark.parametrize("layer, side", [("hidden", "output"), ("norm", "input")])
def test_gradient_and_hessian_over_activations_are_those_of_a_reference(
    layer, side, rounding
):
    model = networks.reference_network()
    x, y = networks.regression_batch()
    weights = weights_of(model)
    h = reference.hidden(weights, x)
    function, point = reference.of_vector(
        lambda values: reference.loss_of_hidden(weights, values[0], y), [h]
    )
    loss, gradient = diagnostics.value_and_grad(model, x, y, layer=layer, side=side)
    assert loss == pytest.approx(function(point), rel=rounding)
    assert gradient.shape == h.shape
    assert (
        relative_error(gradient.ravel(), reference.gradient(function, point)) < rounding
    )

    vector = rng.normal(size=h.shape)
    product = diagnostics.hessian_vector_product(
        model, x, y, vector, layer=model.get_layer(layer), side=side
    )
    expected = reference.hessian_vector_product(function, point, vector.ravel())
    assert relative_error(product.ravel(), expected) < max(10 * rounding, 1e-7)


# As in training


@pytest.mark.parametrize("kind", ["Functional", "Subclassed"])
def test_any_kind_of_model(kind):
    model = networks.build("dropout", kind)
    x, y = networks.batch()
    loss, gradient = diagnostics.value_and_grad(model, x, y)
    before = weights_of(model)
    assert model.train_on_batch(x, y) == pytest.approx(loss, rel=1e-6)
    for old, new, g in zip(before, weights_of(model), gradient, strict=True):
        np.testing.assert_allclose(new, old - 0.5 * g, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name, dtype", [("CBN", "mixed_bfloat16"), ("BatchNormalization", "mixed_float16")]
)
def test_mixed_precision(name, dtype):
    x, y = networks.batch()
    _, expected = diagnostics.value_and_grad(networks.build(name), x, y)
    model = networks.build(name, dtype=dtype)
    _, gradient = diagnostics.value_and_grad(model, x, y)
    assert gradient[0].dtype == "float32"
    assert relative_error(flat(gradient), flat(expected)) < 0.05
    _, activation = diagnostics.value_and_grad(model, x, y, layer="hidden")
    assert activation.dtype == "float32" and np.any(activation)


def test_float16_gradients_are_scaled_as_in_training():
    model = networks.build("none", dtype="mixed_float16")
    x, y = networks.batch()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def small(y, logits):
        return 1e-7 * loss(y, logits)

    bare = keras.Model(model.inputs, model.outputs)
    _, unscaled = diagnostics.value_and_grad(bare, x, y, small)
    assert not np.any(unscaled[0])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), small)
    _, scaled = diagnostics.value_and_grad(model, x, y)
    _, expected = diagnostics.value_and_grad(model, x, y, loss)
    assert relative_error(1e7 * flat(scaled), flat(expected)) < 0.01


def test_inference_mode_uses_the_moving_statistics():
    model = networks.build("BatchNormalization")
    x, y = networks.batch()
    loss, _ = diagnostics.value_and_grad(model, x, y, training=False)
    assert loss == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-6)


def test_several_inputs_and_outputs_with_their_losses_and_weights():
    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    first = layers.Dense(1, name="first")(layers.Concatenate()([a, b]))
    second = layers.Dense(2, name="second")(b)
    model = keras.Model({"a": a, "b": b}, {"first": first, "second": second})
    x = {"a": rng.normal(size=(6, 2)), "b": rng.normal(size=(6, 3))}
    y = {"first": rng.normal(size=(6, 1)), "second": rng.normal(size=(6, 2))}
    losses = {"first": "mse", "second": "mae"}
    model.compile("sgd", losses, loss_weights={"first": 1.0, "second": 3.0})
    value, _ = diagnostics.value_and_grad(model, x, y)
    assert value == pytest.approx(model.train_on_batch(x, y)[0], rel=1e-6)
    fresh = keras.Model(model.inputs, model.outputs)
    value, _ = diagnostics.value_and_grad(fresh, x, list(y.values()), ["mse", "mse"])
    outputs = [numpy(v) for v in fresh([x["a"], x["b"]])]
    expected = sum(np.mean((o - t) ** 2) for o, t in zip(outputs, y.values()))
    assert value == pytest.approx(expected, rel=1e-5)


def test_a_loss_given_replaces_the_compiled_one_and_keeps_the_regularizers():
    model = networks.reference_network()
    x, y = networks.regression_batch()
    value, _ = diagnostics.value_and_grad(model, x, y, "mae")
    predictions = numpy(model(x.astype("float32"), training=True))
    penalty = reference.L2 * np.sum(numpy(model.layers[0].kernel) ** 2)
    expected = np.mean(np.abs(predictions - y)) + penalty
    assert value == pytest.approx(expected, rel=1e-5)


# What stays as it is


def test_random_numbers_that_follow_are_the_same():
    model = networks.build("dropout")
    x, y = networks.batch()

    def draw(probe):
        keras.utils.set_random_seed(1)
        if probe:
            diagnostics.value_and_grad(model, x, y)
        return numpy(keras.random.normal((4,))), numpy(
            layers.Dropout(0.5)(x, training=True)
        )

    draw(False)  # The probe of `draw(True)` is not the first to be compiled.
    assert_same(draw(True), draw(False))


def test_losses_that_a_call_left_for_its_caller_stay():
    model = networks.build("none", "Subclassed")
    x, y = networks.batch()
    model(x)
    left = [numpy(loss) for loss in model.losses]
    diagnostics.value_and_grad(model, x, y)
    assert len(left) == 1
    assert_same([numpy(loss) for loss in model.losses], left)


def test_an_objective_keeps_the_weights_it_was_made_with():
    model = networks.build("BatchNormalization")
    x, y = networks.batch()
    objective = diagnostics.Objective(model, x, y)
    loss, _ = objective.value_and_grad()
    model.fit(x, y, epochs=2, verbose=0)
    assert objective.value_and_grad()[0] == loss
    assert diagnostics.value_and_grad(model, x, y).loss != loss


# Compiled once


class CountsCalls(layers.Layer):
    calls = 0

    def call(self, inputs):
        self.calls += 1
        return inputs


@pytest.mark.skipif(BACKEND == "torch", reason="Keras does not compile there")
def test_points_and_objectives_share_one_compiled_function():
    counter = CountsCalls()
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3), counter])
    model.compile("sgd", "sparse_categorical_crossentropy")
    for seed in range(3):
        objective = diagnostics.Objective(model, *networks.batch(seed=seed))
        for scale in (0.9, 1.1):
            objective.value_and_grad(objective.start * scale)
        if seed == 0:
            calls = counter.calls
    assert counter.calls == calls


@pytest.mark.skipif(BACKEND != "tensorflow", reason="as the others always do")
def test_a_model_for_xla_is_compiled_by_xla():
    x, y = networks.batch()
    results = []
    for jit_compile in (False, True):
        model = networks.build("BatchNormalization", jit_compile=jit_compile)
        objective = diagnostics.Objective(model, x, y)
        gradient = objective.value_and_grad()[1]
        results.append((gradient, objective.hessian_vector_product(gradient)))
    for plain, by_xla in zip(*results):
        assert relative_error(by_xla, plain) < 1e-4


def test_what_compile_and_trainable_change_is_seen():
    model = networks.build("none")
    x, y = networks.batch()
    first, gradient = diagnostics.value_and_grad(model, x, y)
    model.layers[0].trainable = False
    _, fewer = diagnostics.value_and_grad(model, x, y)
    assert len(fewer) == len(gradient) - 2
    np.testing.assert_allclose(fewer[0], gradient[2], rtol=1e-5)
    model.compile("sgd", "mse")
    assert diagnostics.value_and_grad(model, x, y[:, None]).loss != first


def test_a_model_can_be_forgotten():
    model = networks.build("CBN")
    model.train_on_batch(*networks.batch())
    diagnostics.value_and_grad(model, *networks.batch())
    diagnostics.value_and_grad(model, *networks.batch(), layer="hidden")
    reference_to_model = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert reference_to_model() is None


# Bad input


def test_a_model_that_is_not_built():
    model = keras.Sequential([layers.Dense(3)])
    with pytest.raises(ValueError, match="`model` must be a keras.Model that is built"):
        diagnostics.value_and_grad(model, *networks.batch(), "mse")


def test_a_model_without_a_loss():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    with pytest.raises(ValueError, match="`loss` must be given"):
        diagnostics.value_and_grad(model, *networks.batch())


def test_a_model_without_trainable_weights():
    model = networks.build("none")
    model.trainable = False
    with pytest.raises(ValueError, match="`model` must have trainable weights"):
        diagnostics.value_and_grad(model, *networks.batch())


def test_an_empty_batch():
    x, y = networks.batch()
    with pytest.raises(ValueError, match="`x` must be a batch of at least one sample"):
        diagnostics.value_and_grad(networks.build("none"), x[:0], y[:0])


def test_a_layer_that_is_not_there():
    model, (x, y) = networks.build("none"), networks.batch()
    with pytest.raises(ValueError, match="`layer` must be a layer of model.*conv9"):
        diagnostics.value_and_grad(model, x, y, layer="conv9")
    with pytest.raises(ValueError, match="`layer` must be a layer of model"):
        diagnostics.value_and_grad(model, x, y, layer=layers.Dense(2))


def test_a_layer_that_is_called_twice_or_has_several_tensors():
    inputs = keras.Input((5,))
    twice = layers.Dense(5, name="twice")
    total = layers.Add(name="total")([twice(twice(inputs)), inputs])
    model = keras.Model(inputs, total)
    x, y = networks.batch()[0], np.zeros((12, 5))
    with pytest.raises(ValueError, match="called once by the model, not 2 times"):
        diagnostics.value_and_grad(model, x, y, "mse", layer="twice")
    with pytest.raises(ValueError, match="must have a single tensor as its input"):
        diagnostics.value_and_grad(model, x, y, "mse", layer="total", side="input")


def test_a_vector_of_another_shape():
    model, (x, y) = networks.build("none"), networks.batch()
    with pytest.raises(ValueError, match="`vector` must have the shapes"):
        diagnostics.hessian_vector_product(model, x, y, [np.zeros(3)])
