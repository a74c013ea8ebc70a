"""Gradient checkpointing: the same gradients, and statistics that move once a step."""

import pathlib
import re
from functools import partial

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import AMAT, CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from keras_norms.layers import recomputation
from tests.support.autodiff import MODES, compiled
from tests.support.backend import BACKEND, jax_only, later, numpy, torch_only
from tests.support.device_cases import cbn

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "recomputation.md"
RNG = np.random.default_rng(0)
X = [RNG.normal(i + 1, i + 2, (8, 5)).astype("float32") for i in range(2)]

runs_twice = pytest.mark.skipif(BACKEND == "jax", reason="JAX traces once")


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


def once(run, remat, x, y):
    return run(x) ** 3


def equal_inputs(run, remat, x, y):
    """Nothing but their order tells these calls apart."""
    return run(x) ** 3 * y + run(x) ** 2


def nested(run, remat, x, y):
    return remat(lambda x: run(x) + run(y))(x) ** 3


def gradients(names, loss, remat, mode="eager", repeat=1):
    """Of the weights in the second step, and the state after it."""
    network = block(*names)
    weights = [v.value for v in network.trainable_variables]

    def value(tensors):
        run = remat(lambda x: network(x, training=True))
        return ops.sum(loss(run, remat, *tensors))

    def step(*tensors):
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape(persistent=True) as tape:
                y = value(tensors)
            return [tape.gradient(y, weights) for _ in range(repeat)][-1]
        import torch

        y, keep = value(tensors), {"retain_graph": True}
        return [torch.autograd.grad(y, weights, **keep) for _ in range(repeat)][-1]

    step = compiled(step, mode)
    for scale in (1, 2):
        found = step(*(ops.convert_to_tensor(scale * x) for x in X))
    return [numpy(v) for v in (*found, *network.non_trainable_variables)]


@runs_twice
@pytest.mark.parametrize(
    ("loss", "names", "mode"),
    [
        (once, ["cbn", "groups", "noisy"], "eager"),
        (equal_inputs, ["cbn"], "eager"),
        *later(*((once, [*NORMS], mode) for mode in MODES)),
        *later((nested, ["cbn", "noisy"], "eager")),
    ],
)
def test_remat_changes_nothing(loss, names, mode):
    """Neither where two backward passes follow one another."""
    repeat = 2 if len(names) == 1 else 1
    plain = gradients(names, loss, lambda function: function, mode, repeat)
    found = gradients(names, loss, keras.remat, mode, repeat)
    for actual, expected in zip(found, plain, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@runs_twice
def test_more_calls_than_a_layer_remembers(monkeypatch):
    def three(run, remat, x, y):
        return run(x) ** 3 * run(y) * run(x + y)

    monkeypatch.setattr(recomputation, "_MOST", 2)
    with pytest.raises(ValueError, match="called more than 2 times"):
        gradients(["cbn"], three, keras.remat)


@torch_only
def test_a_call_in_a_backward_pass_that_repeats_none():
    x = ops.convert_to_tensor(X[0]).requires_grad_()
    x.register_hook(lambda gradient: cbn()(gradient, training=True))
    with pytest.raises(ValueError, match="no forward pass is known"):
        ops.sum(x * x).backward()


@torch_only
def test_the_reentrant_checkpoint_of_pytorch():
    from torch.utils.checkpoint import checkpoint

    found = []
    for run in (lambda call, x: call(x), partial(checkpoint, use_reentrant=True)):
        call = partial(block("cbn"), training=True)
        x = ops.convert_to_tensor(X[0]).requires_grad_()
        call(2 * x)
        ops.sum(run(call, x) ** 3).backward()
        found.append(numpy(x.grad))
    np.testing.assert_allclose(*found, rtol=1e-5)


@jax_only
def test_state_leaves_what_jax_traces_by_a_stateless_call_only():
    import jax

    network = block("cbn")
    variables = network.trainable_variables, network.non_trainable_variables
    values = [[v.value for v in group] for group in variables]

    def call(x):
        return network.stateless_call(*values, x, training=True)

    for found, expected in zip(
        *map(jax.tree.leaves, (jax.checkpoint(call)(X[0]), call(X[0])))
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    remat = keras.remat(lambda x: network(x, training=True))
    with pytest.raises(ValueError, match="that it returns outside"):
        remat(X[0])


def assert_same_training(*makes):
    """The variables of a network after a few steps of `fit`."""
    found = []
    for make in makes:
        keras.utils.set_random_seed(1)
        first, last = layers.Dense(5, "tanh"), layers.Dense(5)
        model = keras.Sequential([keras.Input((5,)), first, *make(), last])
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


@pytest.mark.parametrize("both", [True, False])
def test_normalised_kernels_in_a_scope_of_keras(both):
    """The second run of the layer inside would have the kernel that is stored."""

    def make(is_scoped):
        inside, outside = (
            keras.RematScope("full" if each else None) for each in is_scoped
        )
        with inside:
            kernels = [layers.Dense(5, "tanh") for _ in range(3)]
        with outside:
            return [cls(k, gain=True) for cls, k in zip((WS, CWN), kernels)] + [
                WN(kernels[2])
            ]

    assert_same_training(partial(make, (True, both)), partial(make, (False, False)))


def test_the_wrapper_of_the_documentation_in_fit():
    names = {}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1], names)

    def plain():
        return [keras.Sequential([CBN(), layers.Dense(6), NoisyBN(seed=2)])]

    assert_same_training(lambda: [names["Recomputed"](*plain())], plain)
