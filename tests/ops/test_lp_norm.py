"""The maximum of `LpNorm("inf", norm_of="centered")`, where a mean is rounded."""

import numpy as np

from keras_norms import LpNorm
from keras_norms.ops import lp_norm
from tests.support.autodiff import training_step
from tests.support.backend import numpy
from tests.support.batch_reference import relative_error
from tests.support.normalizations import linear_loss


def test_where_the_maximum_is_does_not_depend_on_rounding(monkeypatch):
    """A compiler may round x - mean otherwise in the gradient than for the norm."""
    x, g = np.random.default_rng(0).normal(3, 1, (2, 16, 64)).astype("float32")
    statistics = lp_norm.lp_statistics

    def rounded_otherwise(*args, **kwargs):
        batch = statistics(*args, **kwargs)
        return batch._replace(mean=batch.mean * (1 + 2.0**-23))

    def gradient():
        layer = LpNorm("inf", norm_of="centered")
        layer.build(x.shape)
        return training_step(layer, linear_loss(g))(x)[1]

    expected = gradient()
    monkeypatch.setattr(lp_norm, "lp_statistics", rounded_otherwise)
    assert relative_error(gradient(), expected) < 1e-5


def test_a_norm_that_is_not_finite_is_seen():
    """And no average takes it."""
    x = np.random.default_rng(0).normal(3, 1, (64, 1)).astype("float32")
    x[5] = np.nan
    for p in 1, 2, 3, "inf":
        layer = LpNorm(p)
        assert np.isnan(numpy(layer(x, training=True))).all()
        assert numpy(layer.moving_mean) == 0 and numpy(layer.moving_norm) == 1
    # Squares that are too large for float32 are no norm of 0.
    layer = LpNorm(momentum=0.0)
    x = 1e30 * np.random.default_rng(0).normal(3, 1, (64, 1)).astype("float32")
    assert not (np.abs(numpy(layer(x, training=True))) > 10).any()
    assert numpy(layer.moving_norm) > 0
