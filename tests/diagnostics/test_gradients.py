"""Gradients and Hessian-vector products of a loss, and what they leave alone."""

import functools
import gc
import sys
import weakref

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, diagnostics, freeze
from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference
from tests.support.backend import later_on_jax, not_torch, numpy, precision
from tests.support.diagnostics_networks import flat, relative_error


@pytest.mark.parametrize(
    "layer, side", [(None, "output"), ("hidden", "output"), ("norm", "input")]
)
def test_gradient_and_hessian_are_those_of_a_reference(nonlinear, layer, side):
    model, x, y, weights = nonlinear
    of = reference.of_weights if layer is None else reference.of_activations
    function, point = of(weights, x, y)
    rounding = 1e-5 if model.compute_dtype == "float32" else 1e-10

    at = {"layer": layer and model.get_layer(layer), "side": side}
    loss, gradient = diagnostics.value_and_grad(model, x, y, **at)
    assert loss == pytest.approx(function(point), rel=rounding)
    # The same loss, but given, which keeps the regularizers.
    given = diagnostics.value_and_grad(model, x, y, "mse", **at).loss
    assert given == pytest.approx(loss, rel=1e-5)
    expected = reference.gradient(function, point)
    assert relative_error(flat(gradient), expected) < rounding

    objective = diagnostics.Objective(model, x, y, layer=layer, side=side)
    vector = np.random.default_rng(3).normal(size=point.shape)
    parts = objective.unflatten(vector)
    shapes = [w.shape for w in weights] if layer is None else [(4,)] * 8
    assert [p.shape for p in parts] == [g.shape for g in gradient] == shapes
    product = diagnostics.hessian_vector_product(model, x, y, parts, **at)
    expected = reference.hessian_vector_product(function, point, vector)
    assert relative_error(flat(product), expected) < max(10 * rounding, 1e-7)


def test_a_package_that_is_not_installed_is_named(nonlinear, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(ModuleNotFoundError, match="needs SciPy: pip install scipy"):
        diagnostics.hessian_eigenvalues(*nonlinear[:3])
    with pytest.raises(ModuleNotFoundError, match="`log_dir` needs TensorBoard: pip"):
        diagnostics.LandscapeProbe(nonlinear[1:3], log_dir="logs")


def test_eigenvalues_and_trace_are_those_of_the_dense_hessian(nonlinear):
    model, x, y, weights = nonlinear
    hessian = reference.hessian(*reference.of_weights(weights, x, y))
    expected = np.linalg.eigvalsh(hessian)[::-1]

    def find(x=x, **settings):
        return diagnostics.hessian_eigenvalues(model, x, y, **settings)

    top = find(count=3, tolerance=1e-6)
    np.testing.assert_allclose(top, expected[:3], rtol=1e-4)
    bottom = find(count=2, which="SA", tolerance=1e-6)
    np.testing.assert_allclose(bottom, expected[-2:], rtol=1e-3)
    largest = find(which="LM")
    assert abs(largest[0]) == pytest.approx(np.max(np.abs(expected)), rel=1e-3)
    with pytest.raises(ValueError, match="Hessian of the loss is not finite"):
        find(np.full_like(x, np.nan))

    found = diagnostics.hessian_trace(model, x, y, samples=100)
    assert abs(found.trace - np.trace(hessian)) < 4 * found.standard_error
    # Var(v^T H v) = 2 sum of squares off the diagonal.
    off_diagonal = hessian - np.diag(np.diag(hessian))
    expected = np.sqrt(2 * np.sum(off_diagonal**2) / 100)
    assert found.standard_error == pytest.approx(expected, rel=0.3)
    found = diagnostics.hessian_trace(model, x, y, samples=5)
    expected = np.std(found.samples, ddof=1) / np.sqrt(5)
    assert found.standard_error == pytest.approx(expected)


def test_mixed_precision():
    x, y = networks.batch()
    wide = networks.build("CBN", run_eagerly=networks.EAGER)
    with precision("mixed_bfloat16"):
        mixed = networks.build("CBN", run_eagerly=networks.EAGER)
    for layer in (None, "hidden"):
        _, expected = diagnostics.value_and_grad(wide, x, y, layer=layer)
        _, gradient = diagnostics.value_and_grad(mixed, x, y, layer=layer)
        assert gradient[0].dtype == "float32"
        assert relative_error(flat(gradient), flat(expected)) < 0.05


def test_a_loss_in_bfloat16():
    wide = networks.build("none")
    with precision("bfloat16"):
        narrow = networks.build("none")
    narrow.set_weights(wide.get_weights())
    x, y = networks.batch()
    found, expected = (
        diagnostics.value_and_grad(model, x, y).loss for model in (narrow, wide)
    )
    assert found == pytest.approx(expected, rel=0.02)


@later_on_jax
def test_float16_gradients_are_scaled_as_in_training():
    with precision("mixed_float16"):
        model = networks.build("BatchNormalization")
    loss, (x, y) = model.loss, networks.batch()
    gradients, products = [], []
    for factor, scaled in ((1, True), (1e-7, True), (1e-7, False), (1e4, True)):

        def times(y, logits, factor=factor):
            return factor * loss(y, logits)

        networks.compiled(model, times, auto_scale_loss=scaled)
        objective = diagnostics.Objective(model, x, y)
        gradients.append(objective.value_and_grad()[1] / factor)
        vector = np.ones(objective.start.shape)
        products.append(objective.hessian_vector_product(vector) / factor)
    for found, rounding in ((gradients, 0.01), (products, 0.02)):
        expected, scaled, unscaled, overflowing = found
        assert relative_error(scaled, expected) < rounding
        assert relative_error(unscaled, expected) > 0.5
        # Training takes a smaller scale after steps that overflow.
        assert relative_error(overflowing, expected) < rounding


def test_hessian_of_attention():
    attention = layers.MultiHeadAttention(2, 3)
    inputs = keras.Input((4, 5))
    mixed = layers.Flatten()(attention(inputs, inputs))
    model = networks.compiled(keras.Model(inputs, layers.Dense(2)(mixed)), "mse")
    rng = np.random.default_rng(0)
    x, y, step = rng.normal(size=(8, 4, 5)), rng.normal(size=(8, 2)), 1e-2
    objective = diagnostics.Objective(model, x, y)
    vector = rng.normal(size=objective.start.shape)
    product = objective.hessian_vector_product(vector)
    after, before = (
        objective.value_and_grad(objective.start + s * vector)[1] for s in (step, -step)
    )
    assert relative_error(product, (after - before) / (2 * step)) < 5e-3


def test_several_inputs_and_outputs_with_their_losses_and_weights():
    inputs = {name: keras.Input((5,), name=name) for name in ("left", "right")}
    both = layers.Concatenate()(list(inputs.values()))
    outputs = {name: layers.Dense(2, name=name)(both) for name in ("above", "below")}
    model = keras.Model(inputs, outputs)
    factors = {"above": 1.0, "below": 3.0}
    model.compile("sgd", {"above": "mse", "below": "mae"}, loss_weights=factors)
    left, target = networks.regression_batch()
    x, y = {"left": left, "right": 2 * left}, {"above": target, "below": -target}
    above, below = (numpy(model(x)[name]) - y[name] for name in y)

    loss = diagnostics.value_and_grad(model, x, y).loss
    expected = np.mean(above**2) + 3 * np.mean(np.abs(below))
    assert loss == pytest.approx(expected, rel=1e-5)
    two = diagnostics.value_and_grad(model, x, list(y.values()), ["mse", "mse"]).loss
    assert two == pytest.approx(np.mean(above**2) + np.mean(below**2), rel=1e-5)
    # By name, also where the outputs are a list.
    listed = keras.Model(inputs, list(outputs.values()))
    losses = {"below": "mae", "above": "mse"}
    one = diagnostics.value_and_grad(listed, x, list(y.values()), losses).loss
    assert one == pytest.approx(np.mean(above**2) + np.mean(np.abs(below)), rel=1e-5)

    short = {"left": left, "right": left[:, :3]}
    for wrong in (short, [left], [left, left[:5]], {"left": left[0]}):
        with pytest.raises(ValueError, match="`x` must .*Received: x"):
            diagnostics.value_and_grad(model, wrong, y)


def test_the_first_training_is_the_same_after_a_measurement():
    """`fit` builds the loss itself, for which it reads one batch more."""
    (x, labels), trained = networks.batch(24), []
    y = [x[:, :2], labels]
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for measures in (False, True):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((networks.FEATURES,))
        outputs = layers.Dense(2)(inputs), layers.Dense(networks.CLASSES)(inputs)
        model = keras.Model(inputs, outputs)
        networks.compiled(model, ["mse", cross_entropy])
        before = len(model.metrics_variables)
        if measures:
            diagnostics.value_and_grad(model, x, y)
        assert len(model.metrics_variables) == before
        model.fit(x, y, batch_size=4, verbose=0)  # of shuffled samples
        trained.append(networks.variables(model))
    networks.assert_same(*trained)


def test_an_objective_keeps_its_weights_and_no_model_is_kept():
    model = networks.build("BatchNormalization", run_eagerly=False)
    x, y = networks.batch()
    objective = diagnostics.Objective(model, x, y)
    loss, _ = objective.value_and_grad()
    model.fit(x, y, epochs=2, verbose=0)
    assert objective.value_and_grad()[0] == loss
    assert diagnostics.value_and_grad(model, x, y, layer="hidden").loss != loss
    at_inference = diagnostics.value_and_grad(model, x, y, training=False).loss
    assert at_inference == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-6)
    reference_to_model = weakref.ref(model)
    del model, objective
    keras.backend.clear_session()
    gc.collect()
    assert reference_to_model() is None


@not_torch
def test_points_and_objectives_share_one_compiled_function():
    traced, counts = [], set()
    layer = layers.Lambda(lambda x: traced.append(1) or x)
    model = networks.sequential(layers.Dense(3), layer, run_eagerly=False)
    for seed in range(3):
        objective = diagnostics.Objective(model, *networks.batch(seed=seed))
        for scale in (0.9, 1.1):
            objective.value_and_grad(objective.start * scale)
            counts.add(len(traced))
    assert len(counts) == 1


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


def test_a_frozen_norm_is_seen():
    model, (x, y) = (
        networks.build("BatchNormalization", run_eagerly=False),
        networks.batch(),
    )
    before = diagnostics.value_and_grad(model, x, y).loss
    freeze(model)
    loss = diagnostics.value_and_grad(model, x, y).loss
    assert loss != before
    expected = diagnostics.value_and_grad(model, x, y, training=False).loss
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_a_schedule_that_counts_by_the_optimizer():
    norm = CBN()
    model, (x, y) = networks.sequential(norm, layers.Dense(3)), networks.batch()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.01, 0.02])
    expected = []
    for counted in (False, True):
        norm.follow(schedule, model.optimizer.iterations if counted else None)
        expected.append(diagnostics.value_and_grad(model, x, y).loss)
    np.testing.assert_allclose(*expected, rtol=1e-6)


def test_layers_made_in_a_scope_that_recomputes():
    """At other weights than those of the model, which a second run would read."""
    x, y = np.random.default_rng(0).normal(size=(2, 6, 4)).astype("float32")
    found = []
    for mode in (None, "full"):
        keras.utils.set_random_seed(1)
        with keras.RematScope(mode):
            steps = layers.Dense(5, "tanh"), layers.Dense(4)
        model = keras.Sequential([keras.Input((4,)), *steps])
        objective = diagnostics.Objective(model, x, y, "mse")
        found.append(objective.value_and_grad(2 * objective.start)[1])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-7)


def test_what_has_no_gradient():
    inputs = keras.Input((5,))
    twice = layers.Dense(5, name="twice")
    total = layers.Add(name="total")([twice(twice(inputs)), inputs])
    model = keras.Model(inputs, total)
    x, y = networks.batch()[0], np.zeros((8, 5))
    of = functools.partial(diagnostics.value_and_grad, model, x)
    with pytest.raises(ValueError, match="`loss` must be given"):
        of(y)
    networks.compiled(model, "mse")
    objective = diagnostics.Objective(model, x, y, layer="total")
    for call, message in (
        (lambda: of(y, layer="twice"), "called once by the model, not 2 times"),
        (lambda: of(y, layer="total", side="input"), "a single tensor as its input"),
        (lambda: objective.of_batch(x, y), "cannot change its batch"),
        (lambda: of(None), "`y` must hold the targets.*: y=None"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    ids = keras.Input((5,), dtype="int32")
    model = keras.Model(ids, layers.Embedding(3, 2, name="embedding")(ids))
    networks.compiled(model, "mse")
    given = model, np.ones((8, 5), "int32"), np.zeros((8, 5, 2))
    with pytest.raises(ValueError, match="a single tensor as its input, of floats"):
        diagnostics.value_and_grad(*given, layer="embedding", side="input")
