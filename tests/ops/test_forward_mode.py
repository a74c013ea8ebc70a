"""Derivatives that are not taken in reverse mode, or not by one tape after another."""

import functools
import importlib

import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from tests.support.autodiff import MODES, compiled
from tests.support.backend import BACKEND, numpy, tensorflow_only
from tests.support.cbn_reference import relative_error
from tests.support.normalizations import in_modes

# Forward mode: an error in training. All others are right.
STATISTICS = {
    "cbn": CBN,
    "fused": lambda: FusedCBN(layers.Dense(3)),
    "noisy": functools.partial(NoisyBN, seed=1),
    "lp 1": functools.partial(LpNorm, 1),
    "lp 2": LpNorm,
    "lp 3": functools.partial(LpNorm, 3, norm_of="centered"),
    "lp inf": functools.partial(LpNorm, "inf"),
}
WEIGHTS = {
    "ws": lambda: WS(layers.Dense(3)),
    "cwn": lambda: CWN(layers.Dense(3)),
    "wn": lambda: WN(layers.Dense(3)),
}
# TensorFlow compiles the smaller one as a whole, and has kernels for the larger one.
SHAPES = [(8, 3), (2, 40, 40, 3)]


def scalar(layer, shape, training):
    """A number that the layer makes of a tensor, the tensor, and a direction."""
    rng = np.random.default_rng(0)
    x, direction = rng.normal(1, 2, (2, *shape)).astype("float32")
    layer.build(shape)
    if isinstance(layer, CBN):
        layer.set_learning_rate(0.03)
    weights = [ops.copy(v) for v in layer.trainable_variables]
    state = [ops.copy(v) for v in layer.non_trainable_variables]
    factor = ops.convert_to_tensor(direction)

    def call(x):
        y, _ = layer.stateless_call(weights, state, x, training=training)
        return ops.sum(factor * y * y)

    return call, ops.convert_to_tensor(x), factor


def forward(call, x, direction):
    if BACKEND != "tensorflow":
        jvp = importlib.import_module(
            {"jax": "jax", "torch": "torch.func"}[BACKEND]
        ).jvp
        return jvp(call, (x,), (direction,))[1]
    import tensorflow as tf

    with tf.autodiff.ForwardAccumulator(x, direction) as accumulator:
        y = call(x)
    return accumulator.jvp(y)


def difference(call, x, direction, step=1e-2):
    ends = [call(x + sign * step * direction) for sign in (1, -1)]
    above, below = (float(ops.convert_to_numpy(end)) for end in ends)
    return (above - below) / (2 * step)


LARGE = [f"large {name}" for name in STATISTICS]
FEW = [*STATISTICS, "large cbn", "large lp 3"]


@pytest.mark.parametrize(
    ("name", "mode"), in_modes([*STATISTICS, *LARGE], FEW, MODES[:2])
)
def test_forward_mode_is_refused_in_training(name, mode):
    layer = STATISTICS[name.removeprefix("large ")]()
    call, x, direction = scalar(layer, SHAPES["large" in name], True)
    error, message = NotImplementedError, "Use reverse mode"
    if BACKEND == "jax":
        error, message = TypeError, "forward-mode"
    with pytest.raises(error, match=message):
        compiled(functools.partial(forward, call), mode)(x, direction)


@pytest.mark.parametrize("name", [*STATISTICS, *WEIGHTS])
def test_forward_mode_elsewhere(name):
    make = {**STATISTICS, **WEIGHTS}[name]
    call, x, direction = scalar(make(), SHAPES[0], name in WEIGHTS)
    actual = ops.convert_to_numpy(forward(call, x, direction))
    np.testing.assert_allclose(actual, difference(call, x, direction), rtol=2e-3)


@tensorflow_only
def test_forward_mode_with_respect_to_a_weight_is_refused():
    import tensorflow as tf

    layer = CBN()
    layer.build(SHAPES[0])
    gamma = layer.gamma.value
    refused = pytest.raises(NotImplementedError, match="Use reverse mode")
    with refused, tf.autodiff.ForwardAccumulator(gamma, tf.ones(3)):
        layer(np.ones(SHAPES[0], "float32"), training=True)


@tensorflow_only
@pytest.mark.parametrize(("name", "shape"), [("cbn", SHAPES[0]), ("lp 3", SHAPES[1])])
def test_gradients_of_a_graph_after_a_tape(name, shape):
    import tensorflow as tf

    call, x, direction = scalar(STATISTICS[name](), shape, True)

    def by_tape(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x)
        return tf.reduce_sum(direction * tape.gradient(y, x))

    actual = tf.function(lambda x: tf.gradients(by_tape(x), x)[0])(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        first = by_tape(x)
    assert relative_error(actual, numpy(tape.gradient(first, x))) < 1e-4
