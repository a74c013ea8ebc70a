"""Second derivatives next to a channel that is zero, or that a mask hides."""

import functools

import numpy as np
import pytest
from keras import ops

from keras_norms import CBN, LpNorm
from tests.support.autodiff import MODES, second_derivative
from tests.support.weight_reference import AsLayer

# Whether the channel is hidden, else it is zero.
CASES = {
    "cbn": (CBN, True),
    "lp 2": (LpNorm, False),
    "lp 3": (functools.partial(LpNorm, 3), False),
    "lp 3, centered": (functools.partial(LpNorm, 3, norm_of="centered"), True),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_in_a_channel(name):
    make, masked = CASES[name]
    x, g, direction = np.random.default_rng(0).normal(1, 2, (3, 9, 3)).astype("float32")
    mask = None
    if masked:
        mask = ops.convert_to_tensor(np.tile([True, False, True], (9, 1)))
    else:
        x[:, 1] = 0
    layer = make(epsilon=0.1)
    layer.build(x.shape)
    weights = ops.convert_to_tensor(g)

    def call(x):
        state = [v.value for v in layer.non_trainable_variables]
        parameters = [v.value for v in layer.trainable_variables]
        return layer.stateless_call(parameters, state, x, training=True, mask=mask)[0]

    def loss(y):
        return ops.sum(weights * y * y)

    second = second_derivative(AsLayer(call), x, loss, direction, MODES[-1])
    assert np.all(np.isfinite(second))
    assert np.all(second[:, [0, 2]] != 0)
