"""Derivatives that are not taken in reverse mode, or not by one tape after another."""

import functools
import importlib
import itertools

import numpy as np
import pytest
from keras import ops

from tests.support.any_layer import case
from tests.support.autodiff import MODES, compiled
from tests.support.backend import BACKEND, numpy, tensorflow_only
from tests.support.batch_reference import relative_error
from tests.support.normalizations import in_modes

# Forward mode: an error in training. All others are right.
STATISTICS = ["CBN", "FusedCBN(dense_of_sequences, no bias)"]
STATISTICS += ["NoisyBN", "LpNorm(1)", "LpNorm(2, no beta)"]
STATISTICS += ["LpNorm(2.5, centered)", "LpNorm(inf)"]
WEIGHTS = ["WS(dense)", "CWN(dense)", "WN(dense)"]
# TensorFlow compiles the smaller one as a whole, and has kernels for the larger one.
SHAPES = [(8, 4), (2, 40, 40, 3)]


def scalar(name, shape, training):
    """A number that the layer makes of a tensor, the tensor, and a direction."""
    rng = np.random.default_rng(0)
    x, direction = rng.normal(1, 2, (2, *shape)).astype("float32")
    each = case(name, shape, **{"axis": -1} if name in STATISTICS else {})
    each.assign({"learning_rate": 0.03})
    variables = each.layer.trainable_variables, each.layer.non_trainable_variables
    values = [[ops.copy(v) for v in group] for group in variables]
    factor = ops.convert_to_tensor(direction)

    def call(x):
        y, _ = each.layer.stateless_call(*values, x, training=training)
        return ops.sum(y * y * (factor if y.shape == x.shape else 1))

    return call, ops.convert_to_tensor(x), factor


def forward(call, x, direction):
    if BACKEND != "tensorflow":
        module = importlib.import_module("jax" if BACKEND == "jax" else "torch.func")
        return module.jvp(call, (x,), (direction,))[1]
    import tensorflow as tf

    with tf.autodiff.ForwardAccumulator(x, direction) as accumulator:
        y = call(x)
    return accumulator.jvp(y)


CASES = [(name, SHAPES[0]) for name in STATISTICS]
CASES += [(name, SHAPES[1]) for name in ("CBN", "LpNorm(2.5, centered)")]


@pytest.mark.parametrize(("of", "mode"), in_modes(CASES, modes=MODES[:2]))
def test_forward_mode_is_refused_in_training(of, mode):
    call, x, direction = scalar(*of, True)
    error, message = NotImplementedError, "Use reverse mode"
    if BACKEND == "jax":
        error, message = TypeError, "forward-mode"
    with pytest.raises(error, match=message):
        compiled(functools.partial(forward, call), mode)(x, direction)


LARGE = (100, 28, 28, 1)  # PyTorch has kernels for it.


@pytest.mark.parametrize(
    ("name", "shape"),
    [*itertools.product(STATISTICS + WEIGHTS, SHAPES[:1]), ("CBN", LARGE)],
)
def test_forward_mode_elsewhere(name, shape):
    call, x, direction = scalar(name, shape, name in WEIGHTS)
    actual = numpy(forward(call, x, direction))
    step = 1e-2 * direction
    expected = float(numpy(call(x + step) - call(x - step))) / 2e-2
    np.testing.assert_allclose(actual, expected, rtol=2e-3)


@tensorflow_only
@pytest.mark.parametrize(
    "of", [("CBN", SHAPES[0]), ("LpNorm(2.5, centered)", SHAPES[1])]
)
def test_gradients_of_a_graph_after_a_tape(of):
    import tensorflow as tf

    call, x, direction = scalar(*of, True)

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
