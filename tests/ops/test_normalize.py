"""CBN where a mask or a batch leaves nothing, and where a mean is 0."""

import numpy as np
import pytest
from keras import ops

from tests.support.autodiff import training_step
from tests.support.cbn_reference import CBNReference, relative_error
from tests.support.normalizations import (
    FORMS,
    assert_near,
    averages,
    case,
    expected_step,
    in_modes,
    linear_loss,
    set_rate,
)


@pytest.mark.parametrize(("form", "mode"), in_modes(["shift", "coupled_ratio"]))
def test_a_mask_that_leaves_a_channel_nothing(form, mode):
    """That channel is normalised with what was stored, which stays as it is."""
    rng = np.random.default_rng(0)
    shape = (12, 3)
    layer, _, gamma, beta = case(form, shape, rng)
    alone = [CBNReference(1, **FORMS[form]) for _ in range(3)]
    rate = set_rate(layer, 0.03)
    g = rng.normal(size=shape)
    for hidden in (None, 1):
        mask = rng.random(shape) < 0.7
        if hidden is not None:
            mask[:, hidden] = False
        visible = mask | (np.arange(3) == hidden)
        x = rng.normal(1, 2, shape).astype("float32")
        before, mask = averages(layer), ops.convert_to_tensor(mask)
        step = training_step(layer, linear_loss(g * visible), mode, mask=mask)
        y, *actual = step(x)
        for c, reference in enumerate(alone):
            kept, a, b = visible[:, c], gamma[c : c + 1], beta[c : c + 1]
            xc, gc = x[kept, c : c + 1], g[kept, c : c + 1]
            if c == hidden:
                expected = reference.inference(xc, a, b)
                slope = a / (0.7 * np.sqrt(reference.square + 1e-5))
                decoupled = FORMS[form].get("decouple", True)
                dgamma = np.sum(gc * (expected - (0 if decoupled else b)) / a)
                dbeta = np.sum(slope * gc if decoupled else gc)
                gradients = slope * gc, dgamma, dbeta
                for value, old in zip(averages(layer), before):
                    assert value[c] == old[c]
                # The weight of the average, which all channels share, moves on.
                eta = 1 - reference.omega * rate
                reference.weight = eta * reference.weight + 1 - eta
            else:
                expected, *gradients = expected_step(reference, xc, a, b, gc, rate)
            assert relative_error(y[kept, c : c + 1], expected) < 1e-5
            dx, dgamma, dbeta = gradients
            assert relative_error(actual[0][kept, c : c + 1], dx) < 1e-5
            np.testing.assert_allclose(actual[1][c], np.squeeze(dgamma), 1e-4, 1e-5)
            np.testing.assert_allclose(actual[2][c], np.squeeze(dbeta), 1e-4, 1e-5)
        for reference in alone:
            assert relative_error(layer.average_weight, reference.weight) < 1e-5


@pytest.mark.parametrize(("form", "mode"), in_modes(["shift", "coupled"]))
def test_batches_of_none(form, mode):
    rng = np.random.default_rng(1)
    layer, *_ = case(form, (4, 3), rng)
    layer.set_learning_rate(0.03)
    layer(rng.normal(size=(4, 3)).astype("float32"), training=True)
    before = layer.get_weights()
    step = training_step(layer, ops.sum, mode)
    y, dx, dgamma, dbeta = step(np.zeros((0, 3), "float32"))
    assert y.shape == dx.shape == (0, 3)
    assert np.all(dgamma == 0) and np.all(dbeta == 0)
    for value, start in zip(layer.get_weights(), before):
        np.testing.assert_array_equal(value, start)


@pytest.mark.parametrize(("form", "mode"), in_modes(["ratio", "coupled_ratio"]))
def test_the_ratio_where_a_mean_is_0_and_where_it_is_not(form, mode):
    rng = np.random.default_rng(2)
    shape, means = (16, 6), [0, 0, 1, -1, 1e-3, -0.5]
    layer, reference, *affine = case(form, shape, rng)
    rate = set_rate(layer, 0.03)
    g = rng.normal(size=shape)
    step = training_step(layer, linear_loss(g), mode)
    half = rng.integers(-8, 9, (2, 8, 6)) / 4  # whose sums are exact
    for mean, part in zip((np.array([0, 1, -2, 0.5, 2, 2]), np.array(means)), half):
        x = (np.concatenate([part, -part]) + mean).astype("float32")
        actual = step(x)
        expected, constants = reference.train(x, *affine, rate)
        wanted = reference.gradients(g, x, *affine, constants)
        assert_near(actual, [expected, *wanted])
    # Bounded where the mean is next to 0, and 1 where it is 0.
    np.testing.assert_allclose(constants.mean_weight[[0, 1, 4]], [1, 1, 10])
