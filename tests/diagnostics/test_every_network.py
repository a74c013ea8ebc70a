"""Derivatives of networks with every normalisation, and of models as they also are.

Against training and each other; called by keyword, with names twice, without targets.
"""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, FusedCBN, diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.backend import BACKEND, later_on_jax, numpy, some
from tests.support.diagnostics_networks import assert_same, variables, weights_of

LATER = ["LpNorm(inf)", "LayerNormalization", "none", "CBN without a rate"]
if BACKEND == "jax":  # Where each has three functions to compile.
    LATER += ["BatchNormalization", "WS, CWN, WN", "FusedCBN"]
# Eager on TensorFlow, some are not.
SETTINGS = {"dropout": {"run_eagerly": False}}
if BACKEND == "tensorflow":
    XLA = {"run_eagerly": False, "jit_compile": True}
    SETTINGS["BatchNormalization"] = XLA


@pytest.mark.parametrize(
    "name", some(networks.NETWORKS, networks.NETWORKS.keys() - LATER)
)
def test_every_network(name):
    """The gradient is that of training, the Hessian its change; the model stays."""
    settings = {"run_eagerly": networks.EAGER, **SETTINGS.get(name, {})}
    model = networks.build(name, **settings)
    x, y = networks.batch()
    model.train_on_batch(x, y)
    diagnostics.value_and_grad(model, x, y)  # compiles it
    drawn = []
    for probe in (True, False):  # The generators stay too.
        keras.utils.set_random_seed(1)
        if probe:
            diagnostics.value_and_grad(model, x, y)
        drawn.append(numpy(keras.layers.Dropout(0.5)(x, training=True)))
    assert_same(*drawn)
    model(x)
    left = [numpy(loss) for loss in model.losses]
    before, weights = variables(model), weights_of(model)
    objective = diagnostics.Objective(model, x, y)
    loss, gradient = objective.value_and_grad()

    v, w = np.random.default_rng(3).normal(size=(2, objective.start.size))
    product = objective.hessian_vector_product(v)
    if name in ("CBN", "FusedCBN"):
        # With a rate it holds ratios constant that move with the weights.
        other = objective.hessian_vector_product(w)
        assert w @ product == pytest.approx(v @ other, rel=1e-3)
    else:
        step = 1e-3
        _, ahead = objective.value_and_grad(objective.start + step * v)
        _, behind = objective.value_and_grad(objective.start - step * v)
        assert networks.relative_error(product, (ahead - behind) / (2 * step)) < 1e-2

    again = objective.value_and_grad()
    assert again[0] == loss
    np.testing.assert_array_equal(again[1], gradient)
    noise = diagnostics.gradient_noise(model, iter([(x, y)] * 3))
    assert noise.variance == 0 and noise.signal_to_noise == np.inf
    # So near that a loss with other noise would not be.
    near = {"step_range": (1e-4, 2e-4), "points": 3}
    found, same = (diagnostics.landscape(model, x, y, **near) for _ in range(2))
    np.testing.assert_allclose(found.losses, loss, rtol=1e-3)
    assert_same(found.losses, same.losses)
    assert_same(variables(model), before)
    assert len(left) == (name == "dropout")
    assert_same([numpy(loss) for loss in model.losses], left)

    model.reset_metrics()
    assert model.train_on_batch(x, y) == pytest.approx(loss, rel=1e-6)
    steps = zip(weights, weights_of(model), objective.unflatten(gradient), strict=True)
    for old, new, g in steps:
        np.testing.assert_allclose(new, old - 0.5 * g, rtol=1e-5, atol=1e-6)


X, Y = networks.regression_batch()
X = X.astype("float32")


class ByKeyword(keras.Model):
    """Calls a layer by keyword, and one not at all; takes no argument `training`."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(4, "tanh"), layers.Dense(2)
        self.idle = layers.BatchNormalization(name="idle")
        self.idle.build((None, 4))

    def call(self, x):
        return self.second(inputs=self.first(inputs=x))


@later_on_jax
def test_a_layer_that_is_called_by_keyword_and_one_that_is_not():
    model = networks.compiled(ByKeyword(), "mse")
    outputs = numpy(model(X))
    at = {"layer": model.second, "side": "input"}
    loss, gradient = diagnostics.value_and_grad(model, X, Y, **at)
    assert loss == pytest.approx(np.mean((outputs - Y) ** 2), rel=1e-6)
    expected = 2 * (outputs - Y) @ networks.float64(model.second.kernel).T / Y.size
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="called once by the model, not 0 times"):
        diagnostics.value_and_grad(model, X, Y, layer="idle")
    probe = diagnostics.BatchStatistics(X, every=1)
    with pytest.raises(ValueError, match="does not call layer 'idle'"):
        model.fit(X, Y, verbose=0, callbacks=[probe])


@later_on_jax
def test_a_loss_that_needs_no_targets():
    norm = layers.BatchNormalization(name="norm")
    model = networks.Subclassed([layers.Dense(4), norm, layers.Dense(2)])
    model.compile("sgd", run_eagerly=True)
    outputs = numpy(model(X, training=True))
    loss = diagnostics.value_and_grad(model, X, None).loss
    assert loss == pytest.approx(0.1 * np.mean(outputs**2), rel=1e-5)
    found = diagnostics.blindness(model, X, None)
    assert found.batches == ("mixed",) and found.changes[0, 0, 0] < 1e-3


@later_on_jax
def test_layers_in_blocks_that_share_a_name_go_by_their_paths():
    def block(name):
        pair = layers.Dense(3, name="dense"), layers.BatchNormalization(name="norm")
        return keras.Sequential(pair, name=name)

    inputs = keras.Input((5,))
    top = layers.Dense(2, name="top")(block("two")(block("one")(inputs)))
    model = networks.compiled(keras.Model(inputs, top), "mse")
    with pytest.raises(ValueError, match="name of only one. .*the name of 2 layers"):
        diagnostics.value_and_grad(model, X, Y, layer="norm")
    one = model.get_layer("one").layers[1]
    assert diagnostics.value_and_grad(model, X, Y, layer=one).gradient.shape == (8, 3)
    norms, names = ["one/norm", "two/norm"], ["one/dense", "two/dense", "top"]
    assert list(diagnostics.effective_weights(model, X)) == norms
    assert list(diagnostics.blindness(model, X, Y).layers) == norms
    found = diagnostics.covariate_shift(model, X, Y, layers=names)
    assert list(found.layers) == names
    probe = diagnostics.BatchStatistics(X, every=1)
    model.fit(X, Y, verbose=0, callbacks=[probe])
    ends = ("mean_distance", "variance_distance")
    assert set(probe.channels) == {f"{name}_{end}" for name in norms for end in ends}


@later_on_jax
def test_layers_that_share_a_path_are_counted():
    def encoder():
        inputs = keras.Input((5,))
        hidden = layers.Dense(5, name="dense")(inputs)
        return keras.Model(inputs, layers.BatchNormalization(name="norm")(hidden))

    inputs = keras.Input((5,))
    outputs = layers.Dense(2, name="top")(encoder()(encoder()(inputs)))
    model = networks.compiled(keras.Model(inputs, outputs), "mse")
    names, norms = ("dense", "dense_2", "top"), ["norm", "norm_2"]
    assert diagnostics.covariate_shift(model, X, Y).layers == names
    assert list(diagnostics.effective_weights(model, X)) == norms


@later_on_jax
def test_what_a_mask_hides_does_not_count():
    """The numbers are those of a batch of the visible elements alone."""
    rng = np.random.default_rng(0)
    x = rng.normal(1, 1, size=(6, 4, networks.FEATURES)).astype("float32")
    y, shown = rng.integers(0, networks.CLASSES, (6, 4)), rng.random((6, 4)) < 0.6
    x[~shown] = 0

    def stack():
        yield from (layers.Dense(4), layers.BatchNormalization(name="norm"))
        yield from (FusedCBN(layers.Dense(6)), layers.Dense(networks.CLASSES))

    masked = networks.sequential(layers.Masking(), *stack(), shape=x.shape[1:])
    plain = networks.sequential(*stack())
    found = []
    for model, *batch in ((masked, x, y), (plain, x[shown], y[shown])):
        networks.randomize(model)
        weight = diagnostics.effective_weights(model, batch[0])["norm"]
        terms = diagnostics.lipschitz_terms(model, "norm", *batch)
        passed = diagnostics.blindness(model, *batch)
        changes = passed.changes[:, 0] * len(batch[0])
        ratios = changes, passed.shares[:, 0], passed.shared[:, 0]
        probe = diagnostics.BatchStatistics(batch[0], ["norm"])
        model.fit(*batch, verbose=0, callbacks=[probe])
        found.append([*weight[1:], *terms, *ratios, *probe.channels.values()])
    for of_masked, expected in zip(*found, strict=True):
        np.testing.assert_allclose(of_masked, expected, rtol=1e-3, atol=1e-5)


def test_weights_that_are_not_there():
    layer = CBN(name="own")
    layer.build((None, 3))
    with pytest.raises(ValueError, match="'own' expected the weights .*'gamma'"):
        layer.load_own_variables({"beta": np.zeros(3)})
