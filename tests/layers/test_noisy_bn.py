"""NoisyBN: batch normalization where it is quiet, and noise that repeats."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms import NoisyBN
from keras_norms.ops import noise
from tests.support.any_layer import QUIET
from tests.support.autodiff import FAST, MODES, training_step
from tests.support.backend import BACKEND, numpy
from tests.support.cbn_reference import relative_error

SHAPE = (8, 3, 4)
RNG = np.random.default_rng(0)
X = RNG.normal(1, 2, SHAPE).astype("float32")
G, H = RNG.normal(size=(2, *SHAPE)).astype("float32")
# A different value for each, and none the default.
LOUD = {"mean_range": 0.7, "scale_range": 1.5, "mean_jitter": 0.2, "scale_jitter": 0.3}
JITTED = {"jit_compile": BACKEND != "torch"}  # Where there is a compiler.
other_modes = [m for m in MODES if m != FAST]


def built(layer, shape=SHAPE):
    """The layer with random gamma and beta."""
    layer.build((None, *shape[1:]))
    layer.gamma.assign(RNG.normal(1, 0.3, layer.gamma.shape))
    layer.beta.assign(RNG.normal(0, 0.3, layer.beta.shape))
    return layer


def loss_of(g, h):
    def loss(y):
        linear, square = (ops.convert_to_tensor(v, "float32") for v in (g, h))
        return ops.sum(linear * y + square * y * y / 2)

    return loss


def noise_of(seed, x, calls=1, axis=-1, **ranges):
    """Scale and shift that a layer with this seed draws in its last of some calls."""
    generator = keras.random.SeedGenerator(seed)
    for _ in range(calls):
        pair = noise.scale_and_shift(
            ops.convert_to_tensor(x), generator, "float32", axis=axis, **ranges
        )
    return [numpy(value) for value in pair]


def assert_near(actual, expected, tolerance=1e-5):
    for value, wanted in zip(actual, expected, strict=True):
        assert relative_error(value, numpy(wanted)) < tolerance


def assert_equal(actual, expected):
    for value, wanted in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(numpy(value), numpy(wanted))


# Without noise


def test_quiet_is_keras_batch_normalization():
    """The weights are those of BN, in its order; at inference it is always quiet."""
    bn = built(keras.layers.BatchNormalization(momentum=0.8))
    layer, noisy = NoisyBN(momentum=0.8, **QUIET), NoisyBN()
    for each in (layer, noisy):
        each.build((None, *SHAPE[1:]))
        each.set_weights(bn.get_weights())
        assert [v.name for v in each.weights] == [v.name for v in bn.weights]
    steps = [training_step(each, loss_of(G, H), FAST) for each in (layer, bn)]
    for x in (X, 2 * X - 1):
        # Keras subtracts the squared mean from the mean square: a digit of float32.
        assert_near(*(step(x) for step in steps), 2e-5)
        assert_near(layer.get_weights(), bn.get_weights())
    noisy.set_weights(bn.get_weights())
    expected = bn(X)
    for training in (False, None):
        assert_near([noisy(X, training=training)], [expected], 1e-6)
    noisy.trainable = False
    assert_near([noisy(X, training=True)], [expected], 1e-6)


def test_extreme_inputs():
    normal = RNG.normal(size=SHAPE[:-1])
    scales = (0, 1e-20, 1e15, np.nan)
    x = np.stack([*(normal * s for s in scales), 0 * normal + 7.5], -1)
    layer = built(NoisyBN(seed=1), x.shape)
    loss = loss_of(RNG.normal(size=x.shape), np.zeros(x.shape))
    values = training_step(layer, loss, FAST)(x.astype("float32"))
    for value in (*values, *layer.get_weights()):
        assert np.isfinite(value[..., [0, 1, 2, 4]]).all()


# With noise


@pytest.mark.parametrize(
    ("axis", "mode"),
    [(1, FAST)]
    + [pytest.param(-1, mode, marks=pytest.mark.thorough) for mode in other_modes],
)
def test_noise_scales_and_shifts_and_is_a_constant_for_the_gradient(axis, mode):
    """The same noise in every mode: here it is drawn again eagerly."""
    shape = (6, 4, 4)
    layer = built(NoisyBN(axis=axis, seed=7, **LOUD), shape)
    quiet = NoisyBN(axis=axis, **QUIET)
    quiet.build(shape)
    quiet.set_weights(layer.get_weights())
    g, h = RNG.normal(size=shape), np.zeros(shape)
    step = training_step(layer, loss_of(g, h), mode)
    for call in (1, 2):
        x = RNG.normal(1, 2, shape).astype("float32")
        scale, shift = noise_of(7, x, call, axis, **LOUD)
        assert np.abs(scale - 1).max() > 0.2 and np.abs(shift).max() > 0.2
        y, *gradients = step(x)
        y0, *expected = training_step(quiet, loss_of(scale * g, h), FAST)(x)
        assert_near([y, *gradients], [scale * y0 + shift, *expected])
        assert_near(layer.get_weights(), quiet.get_weights())


def test_arguments_reach_the_noise_they_name():
    """With gamma 0 and beta b, y = s * b + m."""
    x = np.zeros((50, 6), "float32")

    def output(beta, **ranges):
        initializer = keras.initializers.Constant(beta)
        layer = NoisyBN(seed=0, beta_initializer=initializer, **QUIET | ranges)
        layer.build(x.shape)
        layer.gamma.assign(np.zeros(6))
        return numpy(layer(x, training=True))

    for beta, channel, element in (
        (0, {"mean_range": 2}, {"mean_jitter": 2}),
        (1, {"scale_range": 2}, {"scale_jitter": 1}),
    ):
        assert np.all(output(beta) == beta)
        of_channel, of_element = output(beta, **channel), output(beta, **element)
        assert np.ptp(of_channel, 0).max() == 0 and np.unique(of_channel).size == 6
        assert np.unique(of_element).size > 290
        others = {**channel, **element}.keys()
        for name in LOUD.keys() - others:
            changed = np.any(output(beta, **{name: LOUD[name]}) != beta)
            assert changed == (beta == 1)  # shifts show at any beta, scales at 1


@pytest.mark.parametrize("seed", [3, np.int64(3), 0, 2**31 - 1])
def test_noise_is_fresh_and_repeats(seed):
    def outputs(**arguments):
        layer = NoisyBN(**arguments)
        return [numpy(layer(X, training=True)) for _ in range(2)]

    first, second = outputs(seed=seed)
    assert np.abs(first - second).max() > 0.1
    assert_equal(outputs(seed=int(seed)), [first, second])
    for other in ({"seed": 4}, {}):
        assert np.abs(outputs(**other)[0] - first).max() > 0.1
    unseeded = outputs(), outputs()
    assert np.abs(unseeded[0][0] - unseeded[1][0]).max() > 0.1


def model(**arguments):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(5), NoisyBN(**arguments)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", **JITTED)
    return model


def fit(model):
    x = X[:, 0]
    model.fit(x, x[:, :1], 4, epochs=2, shuffle=False, verbose=0)
    return [numpy(v) for v in model.weights]


def test_fit_repeats_and_a_loaded_model_starts_its_noise_anew(tmp_path):
    """Keras saves no state of a seed generator; Dropout is the same."""
    trained = model(seed=3)
    first = fit(trained)
    assert_equal(fit(model(seed=3)), first)

    trained.save(tmp_path / "model.keras")
    layer = keras.models.load_model(tmp_path / "model.keras").layers[1]
    new = NoisyBN(seed=3)
    new.build((None, 5))
    new.set_weights(layer.get_weights())
    x = RNG.normal(size=(6, 5)).astype("float32")
    assert_equal(*([each(x, training=True)] for each in (layer, new)))


def test_noise_at_inference():
    """A prediction draws anew each time, and still moves no statistic."""
    layer = built(NoisyBN(seed=5, noise_at_inference=True, **LOUD))
    quiet = NoisyBN(**QUIET)
    quiet.build(SHAPE)
    quiet.set_weights(layer.get_weights())
    for call, trainable in ((1, True), (2, True), (3, False)):
        layer.trainable = trainable
        scale, shift = noise_of(5, X, call, **LOUD)
        y = layer(X, training=not trainable)
        assert_near([y], [scale * numpy(quiet(X)) + shift])
    assert_equal(layer.get_weights(), quiet.get_weights())

    noisy = keras.Sequential([keras.Input(SHAPE[1:]), layer])
    noisy.compile("sgd", "mse", **JITTED)
    first, second = (noisy.predict_on_batch(X) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    assert_equal(layer.get_weights(), quiet.get_weights())
