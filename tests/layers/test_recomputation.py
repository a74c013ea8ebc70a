"""Gradient checkpointing: the same gradients, and statistics that move once a step."""

import pathlib
import re

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import AMAT, CBN, FusedCBN, LpNorm, NoisyBN
from keras_norms.layers import recomputation
from tests.support.autodiff import MODES, compiled
from tests.support.backend import BACKEND, jax_only, later, numpy, torch_only

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "recomputation.md"
RNG = np.random.default_rng(0)
X = [RNG.normal(i + 1, i + 2, (8, 5)).astype("float32") for i in range(3)]

runs_twice = pytest.mark.skipif(BACKEND == "jax", reason="JAX traces once")


def cbn(**arguments):
    layer = CBN(**arguments)
    layer.set_learning_rate(0.03)
    return layer


NORMS = {
    "cbn": cbn,
    "groups": lambda: cbn(group_size=4),
    "fused": lambda: FusedCBN(layers.Dense(5), cbn()),
    "noisy": lambda: NoisyBN(momentum=0.5, seed=1),
    "lp": lambda: LpNorm(3, momentum=0.5),
}


def block(*names):
    keras.utils.set_random_seed(1)
    norms = [NORMS[name]() for name in names]
    return keras.Sequential([keras.Input((5,)), *norms, layers.Dense(5, "tanh")])


def once(run, remat, x, y, z):
    return run(x) ** 3


def several_inputs(run, remat, x, y, z):
    return run(x) ** 3 * run(y) * run(z)


def equal_inputs(run, remat, x, y, z):
    """Nothing but their order tells these calls apart."""
    return run(x) ** 3 * y + run(x) ** 2


def nested(run, remat, x, y, z):
    return remat(lambda x: run(x) + run(x / 2))(x) ** 3


def gradients(names, loss, remat, mode="eager", repeat=1):
    """Of the weights in the second step, and the state after it."""
    network = block(*names)
    weights = [v.value for v in network.trainable_variables]

    def step(*tensors):
        def value():
            run = remat(lambda x: network(x, training=True))
            return ops.sum(loss(run, remat, *tensors))

        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape(persistent=True) as tape:
                y = value()
            return [tape.gradient(y, weights) for _ in range(repeat)][-1]
        import torch

        y, keep = value(), {"retain_graph": True}
        return [torch.autograd.grad(y, weights, **keep) for _ in range(repeat)][-1]

    step = compiled(step, mode)
    for scale in (1, 2):
        found = step(*(ops.convert_to_tensor(scale * x) for x in X))
    return [numpy(v) for v in (*found, *network.non_trainable_variables)]


def assert_remat_changes_nothing(names, loss, *how):
    plain = gradients(names, loss, lambda function: function, *how)
    for actual, expected in zip(gradients(names, loss, keras.remat, *how), plain):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@runs_twice
@pytest.mark.parametrize(
    ("names", "mode"),
    [(["cbn", "groups", "noisy"], "eager"), *later(*((list(NORMS), m) for m in MODES))],
)
def test_every_layer(names, mode):
    assert_remat_changes_nothing(names, once, mode)


@runs_twice
@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (equal_inputs, ["cbn"]),
        *later((several_inputs, ["noisy"]), (nested, ["cbn", "noisy"])),
    ],
)
def test_several_calls_and_backward_passes(loss, names):
    assert_remat_changes_nothing(names, loss, "eager", 2 if len(names) == 1 else 1)


@runs_twice
def test_more_calls_than_a_layer_remembers(monkeypatch):
    monkeypatch.setattr(recomputation, "_MOST", 2)
    with pytest.raises(ValueError, match="called more than 2 times"):
        gradients(["cbn"], several_inputs, keras.remat)


@torch_only
def test_first_call_in_a_backward_pass():
    layer = cbn()
    x = ops.convert_to_tensor(X[0]).requires_grad_()
    y = x * 2
    y.register_hook(lambda upstream: layer(upstream, training=True))
    with pytest.raises(ValueError, match="in a backward pass, where no forward pass"):
        y.sum().backward()


@torch_only
def test_the_reentrant_checkpoint_of_pytorch():
    from torch.utils.checkpoint import checkpoint

    results = []
    for remat in (False, True):
        network = block("cbn")
        x = ops.convert_to_tensor(X[0]).requires_grad_()

        def call(x, network=network):
            return network(x, training=True)

        call(2 * x)
        y = checkpoint(call, x, use_reentrant=True) if remat else call(x)
        ops.sum(y**3).backward()
        results.append(numpy(x.grad))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


@jax_only
def test_state_leaves_what_jax_traces_by_a_stateless_call_only():
    import jax

    network = block("cbn")
    variables = network.non_trainable_variables
    weights = [v.value for v in network.trainable_variables]
    state = [v.value for v in variables]

    def call(x):
        return network.stateless_call(weights, state, x, training=True)

    expected = jax.tree.leaves(call(X[0]))
    for actual, wanted in zip(jax.tree.leaves(jax.checkpoint(call)(X[0])), expected):
        np.testing.assert_allclose(actual, wanted, rtol=1e-6)
    remat = keras.remat(lambda x: network(x, training=True))
    with pytest.raises(ValueError, match="assign the state that it returns outside"):
        remat(X[0])
    outside = keras.StatelessScope(zip(variables, state))
    with pytest.raises(ValueError, match="that it returns outside"), outside:
        remat(X[0])


def assert_same_training(*makes):
    """The variables of a network after a few steps of `fit`."""
    found = []
    for make in makes:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), layers.Dense(5, "tanh")])
        for layer in make():
            model.add(layer)
        model.add(layers.Dense(5))
        model.compile(keras.optimizers.SGD(0.03), "mse")
        x = np.concatenate(X)
        model.fit(x, x[::-1], batch_size=8, verbose=0, callbacks=[AMAT()])
        found.append([numpy(v) for v in model.variables])
    for actual, expected in zip(*found, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_layers_in_a_scope_of_keras_in_fit():
    def plain():
        return [make() for make in NORMS.values()]

    def scoped():
        with keras.RematScope("full"):
            return plain()

    assert_same_training(scoped, plain)


def test_the_wrapper_of_the_documentation_in_fit():
    names = {}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1], names)

    def plain():
        return [keras.Sequential([CBN(), layers.Dense(6), NoisyBN(seed=2)])]

    assert_same_training(lambda: [names["Recomputed"](*plain())], plain)
