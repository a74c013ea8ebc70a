"""LpNorm where maxima tie; second derivatives where a channel has nothing."""

import numpy as np
import pytest
from keras import ops

from tests.support.any_layer import case, example, reference_of
from tests.support.autodiff import MODES, second_derivative, training_step
from tests.support.backend import later, numpy
from tests.support.batch_reference import relative_error
from tests.support.normalizations import in_modes, linear_loss

TIES = np.array(
    [
        # Several maxima of both signs; sums and means are exact in float32.
        [3, -3, 3, 1, 0, -1, 2, -2],
        # The same after the mean, 2, is taken away.
        [5, -1, 5, -1, 2, 2, 1, 3],
        [2, 2, 2, 2, 2, 2, 2, 2],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
).T


INFINITE = ["LpNorm(inf)", "LpNorm(inf, centered)"]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "mode"), in_modes(INFINITE))
def test_maxima_share_the_gradient(name, masked, mode):
    x = TIES.astype("float32")
    if masked:  # Hidden elements are as large as the maxima, and larger.
        x = np.concatenate([x, 3 * x])
    mask = np.broadcast_to(np.arange(len(x))[:, None] < 8, x.shape)
    each = case(name, x.shape, axis=-1, epsilon=0.5)
    each.assign(example(each, 4)[1])
    reference, values = reference_of(each), each.values(x) | {"mask": mask}
    g = np.random.default_rng(4).normal(size=x.shape)
    y = reference.train(values)
    expected = [y, *reference.gradients(g, values).values()]
    step = training_step(each.layer, linear_loss(g), mode)
    found = step(x, **{"mask": mask[:, 0]} if masked else {})
    for value, wanted in zip(found, expected, strict=True):
        assert relative_error(value, wanted) < 1e-5


@pytest.mark.parametrize(
    ("name", "arguments", "masked"),
    [
        ("CBN", {}, True),
        ("LpNorm(2.5, centered)", {}, True),
        *later(("LpNorm(2, no beta)", {}, False), ("LpNorm(1.5)", {"p": 3}, False)),
    ],
)
def test_second_derivative_where_a_channel_has_nothing(name, arguments, masked):
    """It is hidden by a mask, or zero."""
    x, g, direction = np.random.default_rng(0).normal(1, 2, (3, 9, 3)).astype("float32")
    mask = {}
    if masked:
        mask["mask"] = ops.convert_to_tensor(np.tile([True, False, True], (9, 1)))
    else:
        x[:, 1] = 0
    layer = case(name, x.shape, axis=-1, epsilon=0.1, **arguments).layer

    def loss(y):
        return ops.sum(ops.convert_to_tensor(g) * y * y / 2)

    directions = direction, *map(numpy, layer.trainable_variables)
    second = second_derivative(layer, x, loss, directions, MODES[-1], **mask)[0]
    assert np.all(np.isfinite(second))
    assert np.all(second[:, [0, 2]] != 0)
