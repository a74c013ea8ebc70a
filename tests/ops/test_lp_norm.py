"""LpNorm where maxima tie and where a mask hides elements; channels with nothing."""

import numpy as np
import pytest
from keras import ops

from keras_norms import LpNorm
from tests.support.autodiff import MODES, second_derivative, training_step
from tests.support.backend import some
from tests.support.cbn_reference import relative_error
from tests.support.normalizations import (
    CASES,
    FEW,
    INF,
    assert_near,
    averages,
    batch,
    built,
    case,
    expected_step,
    in_modes,
    linear_loss,
)
from tests.support.weight_reference import AsLayer

SHAPE = (8, 3, 4)
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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("norm_of", "mode"), in_modes(["input", "centered"]))
def test_maxima_share_the_gradient(norm_of, masked, mode):
    rng = np.random.default_rng(4)
    x, mask, arguments = TIES.astype("float32"), None, {}
    if masked:  # Hidden elements are as large as the maxima, and larger.
        x = np.concatenate([x, 3 * x])
        mask = np.arange(16)[:, None] < 8
        arguments["mask"] = ops.convert_to_tensor(mask[:, 0])
    layer, reference, *affine = built(
        x.shape, rng, LpNorm, p=INF, norm_of=norm_of, epsilon=0.5
    )
    g = rng.normal(size=x.shape)
    actual = training_step(layer, linear_loss(g), mode, **arguments)(x)
    assert_near(actual, expected_step(reference, x, *affine, g, mask=mask))


NAMES = [name for name, (layer, _) in CASES.items() if layer is LpNorm]


@pytest.mark.parametrize(("name", "mode"), in_modes(NAMES, FEW[2:]))
def test_masks(name, mode):
    """A mask that differs between channels; outputs of hidden elements count too."""
    rng = np.random.default_rng(5)
    layer, reference, gamma, beta = case(name, SHAPE, rng)
    x, g = batch(rng, SHAPE), rng.normal(size=SHAPE)
    mask = rng.random(SHAPE) < 0.6
    mask[..., 3] = False
    unused = ~mask & (rng.random(SHAPE) < 0.5)
    g[unused] = 0
    expected = expected_step(reference, x, gamma, beta, g, mask=mask)
    # Nothing was seen in the last channel: its mean and its norm are 0.
    unseen = gamma[3] * x[..., 3] / 1e-5 + beta[3]
    assert relative_error(expected[0][..., 3], unseen) < 1e-6
    tensor = ops.convert_to_tensor(mask)
    step = training_step(layer, linear_loss(g), mode, mask=tensor)
    # An element that enters nowhere may be huge.
    actual = list(step(np.where(unused, 1e30, x).astype("float32")))
    actual[0] = np.where(unused, expected[0], actual[0])
    for part in ([0, 1, 2], [3]):
        assert_near([v[..., part] for v in actual], [v[..., part] for v in expected])
    moving = averages(layer)
    assert_near(moving, averages(reference))
    assert moving[0][3] == 0 and moving[1][3] == 1


@pytest.mark.parametrize(("name", "mode"), in_modes(NAMES[4:], FEW[4:]))
def test_batches_of_one_and_of_none(name, mode):
    rng = np.random.default_rng(8)
    for shape in ((1, 3), (0, 3)):
        layer, reference, *affine = case(name, shape, rng, epsilon=0.5)
        x, g = batch(rng, shape), rng.normal(size=shape)
        actual = training_step(layer, linear_loss(g), mode)(x)
        expected = expected_step(reference, x, *affine, g)
        pairs = zip((*actual, *averages(layer)), (*expected, *averages(reference)))
        for value, wanted in pairs:
            # A batch of one is its mean, exactly, so that many results are 0.
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


# Whether a channel is hidden by a mask, else it is zero.
NOTHING = {"shift": True, "l2 input": False, "l3 input": False, "l3 centered": True}


@pytest.mark.parametrize("name", some(NOTHING, ["shift", "l3 centered"]))
def test_second_derivative_where_a_channel_has_nothing(name):
    rng = np.random.default_rng(0)
    x, g, direction = rng.normal(1, 2, (3, 9, 3)).astype("float32")
    mask = None
    if NOTHING[name]:
        mask = ops.convert_to_tensor(np.tile([True, False, True], (9, 1)))
    else:
        x[:, 1] = 0
    layer, *_ = case(name, x.shape, rng, epsilon=0.1)
    parameters, state = (
        [v.value for v in variables]
        for variables in (layer.trainable_variables, layer.non_trainable_variables)
    )

    def call(x):
        return layer.stateless_call(parameters, state, x, training=True, mask=mask)[0]

    def loss(y):
        return ops.sum(ops.convert_to_tensor(g) * y * y / 2)

    second = second_derivative(AsLayer(call), x, loss, direction, MODES[-1])
    assert np.all(np.isfinite(second))
    assert np.all(second[:, [0, 2]] != 0)
