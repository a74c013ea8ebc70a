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
from tests.support.backend import later_on_jax, not_torch, numpy, precision
from tests.support.diagnostics_networks import flat, relative_error


@pytest.mark.parametrize(
    "layer, side", [(None, "output"), ("hidden", "output"), ("norm", "input")]
)
def test_gradient_and_hessian_are_those_of_a_reference(nonlinear, layer, side):
    model, x, y, weights, dtype = nonlinear
    of = reference.of_weights if layer is None else reference.of_activations
    function, point = of(weights, x, y)
    rounding = 1e-5 if dtype == "float32" else 1e-10

    loss, gradient = diagnostics.value_and_grad(model, x, y, layer=layer, side=side)
    assert loss == pytest.approx(function(point), rel=rounding)
    if layer is None:
        assert [g.shape for g in gradient] == [w.shape for w in weights]
    else:
        assert gradient.shape == (len(x), 4)
    expected = reference.gradient(function, point)
    assert relative_error(flat(gradient), expected) < rounding

    objective = diagnostics.Objective(model, x, y, layer=layer, side=side)
    vector = np.random.default_rng(3).normal(size=point.shape)
    at = {"layer": layer and model.get_layer(layer), "side": side}
    product = diagnostics.hessian_vector_product(
        model, x, y, objective.unflatten(vector), **at
    )
    expected = reference.hessian_vector_product(function, point, vector)
    assert relative_error(flat(product), expected) < max(10 * rounding, 1e-7)


# Of the Hessian over all weights


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


# As in training


def test_mixed_precision():
    x, y = networks.batch()
    wide = networks.build("CBN", run_eagerly=networks.EAGER)
    with precision("mixed_bfloat16"):
        mixed = networks.build("CBN", run_eagerly=networks.EAGER)
    _, expected = diagnostics.value_and_grad(wide, x, y)
    _, gradient = diagnostics.value_and_grad(mixed, x, y)
    assert gradient[0].dtype == "float32"
    assert relative_error(flat(gradient), flat(expected)) < 0.05
    _, activation = diagnostics.value_and_grad(mixed, x, y, layer="hidden")
    assert activation.dtype == "float32" and np.any(activation)


@later_on_jax
def test_float16_gradients_are_scaled_as_in_training():
    with precision("mixed_float16"):
        model = networks.build("BatchNormalization")
    x, y = networks.batch()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def small(y, logits):
        return 1e-7 * loss(y, logits)

    model.compile("sgd", run_eagerly=True, auto_scale_loss=False)
    _, unscaled = diagnostics.value_and_grad(model, x, y, small)
    assert not np.any(unscaled[0])
    _, expected = diagnostics.value_and_grad(model, x, y, loss)
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    model.compile(scaling, small, run_eagerly=True)
    _, scaled = diagnostics.value_and_grad(model, x, y)
    assert relative_error(1e7 * flat(scaled), flat(expected)) < 0.01


def test_inference_mode_uses_the_moving_statistics():
    model = networks.build("BatchNormalization")
    x, y = networks.batch()
    loss, _ = diagnostics.value_and_grad(model, x, y, training=False)
    assert loss == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-6)


def test_several_inputs_and_outputs_with_their_losses_and_weights():
    inputs = {name: keras.Input((5,), name=name) for name in ("left", "right")}
    both = layers.Concatenate()(list(inputs.values()))
    outputs = {name: layers.Dense(2, name=name)(both) for name in ("above", "below")}
    model = keras.Model(inputs, outputs)
    factors = {"above": 1.0, "below": 3.0}
    model.compile("sgd", {"above": "mse", "below": "mae"}, loss_weights=factors)
    left, target = networks.regression_batch()
    x, y = {"left": left, "right": 2 * left}, {"above": target, "below": -target}
    above, below = (numpy(model(x)[name]) for name in ("above", "below"))

    loss = diagnostics.value_and_grad(model, x, y).loss
    expected = np.mean((above - target) ** 2) + 3 * np.mean(np.abs(below + target))
    assert loss == pytest.approx(expected, rel=1e-5)
    two = diagnostics.value_and_grad(model, x, list(y.values()), ["mse", "mse"]).loss
    expected = np.mean((above - target) ** 2) + np.mean((below + target) ** 2)
    assert two == pytest.approx(expected, rel=1e-5)
    assert model.train_on_batch(x, y)[0] == pytest.approx(loss, rel=1e-6)

    short = {"left": left, "right": left[:, :3]}
    for wrong in (short, [left], [left, left[:5]], {"left": left[0]}):
        with pytest.raises(ValueError, match="`x` must .*Received: x"):
            diagnostics.value_and_grad(model, wrong, y)
    y["below"] = target[:3]
    with pytest.raises(ValueError, match="`y` must hold a target for each of the 8"):
        diagnostics.value_and_grad(model, x, y)


def test_a_loss_given_replaces_the_compiled_one_and_keeps_the_regularizers(nonlinear):
    model, x, y, weights, dtype = nonlinear
    value, _ = diagnostics.value_and_grad(model, x, y, "mae")
    predictions = numpy(model(x.astype(dtype), training=True))
    penalty = reference.L2 * np.sum(weights[0] ** 2)
    expected = np.mean(np.abs(predictions - y)) + penalty
    assert value == pytest.approx(expected, rel=1e-5)


# What is kept


def test_an_objective_keeps_its_weights_and_no_model_is_kept():
    model = networks.build("BatchNormalization", run_eagerly=False)
    x, y = networks.batch()
    objective = diagnostics.Objective(model, x, y)
    loss, _ = objective.value_and_grad()
    model.fit(x, y, epochs=2, verbose=0)
    assert objective.value_and_grad()[0] == loss
    assert diagnostics.value_and_grad(model, x, y).loss != loss
    diagnostics.value_and_grad(model, x, y, layer="hidden")
    reference_to_model = weakref.ref(model)
    del model, objective
    keras.backend.clear_session()
    gc.collect()
    assert reference_to_model() is None


class CountsCalls(layers.Layer):
    calls = 0

    def call(self, inputs):
        self.calls += 1
        return inputs


@not_torch
def test_points_and_objectives_share_one_compiled_function():
    counter = CountsCalls()
    model = networks.sequential(layers.Dense(3), counter, run_eagerly=False)
    for seed in range(3):
        objective = diagnostics.Objective(model, *networks.batch(seed=seed))
        for scale in (0.9, 1.1):
            objective.value_and_grad(objective.start * scale)
        if seed == 0:
            calls = counter.calls
    assert counter.calls == calls


def test_many_losses_of_one_model():
    """Functions are kept for some of them, and made again for others."""
    model = networks.sequential(layers.Dense(2), loss="mse")

    def scaled(factor):
        return lambda y, p: factor * keras.ops.mean(keras.ops.square(y - p), -1)

    losses = [scaled(float(i)) for i in range(1, 11)]
    found = [
        diagnostics.value_and_grad(model, *networks.regression_batch(), loss).loss
        for loss in [*losses[::3], *losses, *losses[::3], *losses]
    ]
    expected = found[0] * np.array([1, 4, 7, 10, *range(1, 11)] * 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_compile_and_trainable_change_is_seen():
    model = networks.build("none", run_eagerly=False)
    x, y = networks.batch()
    first, gradient = diagnostics.value_and_grad(model, x, y)
    model.layers[0].trainable = False
    _, fewer = diagnostics.value_and_grad(model, x, y)
    assert len(fewer) == len(gradient) - 2
    np.testing.assert_allclose(fewer[0], gradient[2], rtol=1e-5)
    model.compile("sgd", "mse")
    assert diagnostics.value_and_grad(model, x, y[:, None]).loss != first
    model.trainable = False
    with pytest.raises(ValueError, match="`model` must have trainable weights"):
        diagnostics.value_and_grad(model, x, y)


def test_what_has_no_gradient():
    inputs = keras.Input((5,))
    twice = layers.Dense(5, name="twice")
    total = layers.Add(name="total")([twice(twice(inputs)), inputs])
    model = keras.Model(inputs, total)
    x, y = networks.batch()[0], np.zeros((8, 5))
    with pytest.raises(ValueError, match="`loss` must be given"):
        diagnostics.value_and_grad(model, x, y)
    networks.compiled(model, "mse")
    with pytest.raises(ValueError, match="called once by the model, not 2 times"):
        diagnostics.value_and_grad(model, x, y, layer="twice")
    with pytest.raises(ValueError, match="must have a single tensor as its input"):
        diagnostics.value_and_grad(model, x, y, layer="total", side="input")
    objective = diagnostics.Objective(model, x, y, layer="total")
    with pytest.raises(ValueError, match="has one batch"):
        objective.of_batch(x, y)
    for loss in (None, "mae"):  # the compiled one, and one that is given
        with pytest.raises(ValueError, match="`y` must hold the targets.*: y=None"):
            diagnostics.value_and_grad(model, x, None, loss)
    with pytest.raises(ValueError, match="`y` must hold the targets.*: y=None"):
        diagnostics.gradient_noise(model, [(x, y), (x, None)])
