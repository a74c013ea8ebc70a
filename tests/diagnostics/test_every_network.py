"""Derivatives of networks with every normalisation, against training and each other."""

import keras
import numpy as np
import pytest

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.backend import BACKEND, numpy, some
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
