"""What only NoisyBN has: noise, which repeats. Without it: `test_every_layer`."""

import keras
import numpy as np
import pytest

from keras_norms import NoisyBN
from tests.support.any_layer import QUIET, noise_of
from tests.support.autodiff import FAST, MODES, training_step
from tests.support.backend import BACKEND, later, numpy, precision
from tests.support.normalizations import assert_near, built, linear_loss

SHAPE = (8, 3, 4)
RNG = np.random.default_rng(0)
X = RNG.normal(1, 2, SHAPE).astype("float32")
# A different value for each, and none the default.
LOUD = {"mean_range": 0.7, "scale_range": 1.5, "mean_jitter": 0.2, "scale_jitter": 0.3}
JITTED = {"jit_compile": BACKEND != "torch"}  # Where there is a compiler.
other_modes = [m for m in MODES if m != FAST]


def loud_and_quiet(shape, axis=-1, **arguments):
    """A layer with random gamma and beta, and the same without noise."""
    loud, *_ = built(shape, RNG, NoisyBN, axis=axis, **LOUD, **arguments)
    quiet = NoisyBN(axis=axis, **QUIET)
    quiet.build(shape)
    quiet.set_weights(loud.get_weights())
    return loud, quiet


@pytest.mark.parametrize(
    ("axis", "mode"), [(1, FAST), *later(*((-1, mode) for mode in other_modes))]
)
def test_noise_scales_and_shifts_and_is_a_constant_for_the_gradient(axis, mode):
    """The same noise in every mode: here it is drawn again eagerly."""
    shape = (6, 4, 4)
    layer, quiet = loud_and_quiet(shape, axis, seed=7)
    g = RNG.normal(size=shape)
    step = training_step(layer, linear_loss(g), mode)
    for call in (1, 2):
        x = RNG.normal(1, 2, shape).astype("float32")
        scale, shift = noise_of(shape, 7, call, axis, **LOUD)
        assert np.abs(scale - 1).max() > 0.2 and np.abs(shift).max() > 0.2
        y, *gradients = step(x)
        y0, *expected = training_step(quiet, linear_loss(scale * g), FAST)(x)
        assert_near([y, *gradients], [scale * y0 + shift, *expected])
        assert_near(layer.get_weights(), quiet.get_weights())


def test_noise_is_fresh_and_repeats():
    def outputs(**arguments):
        layer = NoisyBN(**arguments)
        return [numpy(layer(X, training=True)) for _ in range(2)]

    first, second = outputs(seed=2**31 - 1)
    np.testing.assert_equal(outputs(seed=2**31 - 1), [first, second])
    other, another = outputs()[0], outputs()[0]
    for a, b in ((first, second), (first, other), (other, another)):
        assert np.abs(a - b).max() > 0.1


def test_noise_at_inference():
    """A prediction draws anew each time, and still moves no statistic."""
    layer, quiet = loud_and_quiet(SHAPE, seed=5, noise_at_inference=True)
    noisy = keras.Sequential([keras.Input(SHAPE[1:]), layer])
    noisy.compile("sgd", "mse", **JITTED)
    for call, trainable in ((1, True), (2, True), (3, False)):
        layer.trainable = trainable
        scale, shift = noise_of(SHAPE, 5, call, **LOUD)
        y = noisy.predict_on_batch(X) if trainable else layer(X, training=True)
        assert_near([numpy(y)], [scale * numpy(quiet(X)) + shift])
    np.testing.assert_equal(layer.get_weights(), quiet.get_weights())


def test_noise_does_not_repeat_where_keras_has_16_bits():
    with precision("float16"):
        layer = NoisyBN(mean_range=0.0, mean_jitter=0.5)
        y = numpy(layer(np.ones((2**16 + 64, 1), "float16"), training=True))
    assert np.mean(y[:64] == y[2**16 :]) < 0.2
