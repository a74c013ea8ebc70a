"""NoisyBN: batch normalization where it is quiet, and noise that repeats."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms import NoisyBN
from keras_norms.ops import noise
from tests.layers.test_channel_normalization import run
from tests.ops.test_cbn_numerics import batch, quadratic_loss
from tests.support.autodiff import BACKEND, MODES, second_derivative, training_step
from tests.support.batch_reference import BatchNormReference
from tests.support.cbn_reference import finite_differences, relative_error

SHAPE = (8, 3, 4)
QUIET = {"mean_range": 0, "scale_range": 1, "mean_jitter": 0, "scale_jitter": 0}
# A different value for each, and none the default.
LOUD = {"mean_range": 0.7, "scale_range": 1.5, "mean_jitter": 0.2, "scale_jitter": 0.3}

COMPILED = MODES[1:] or MODES
modes = pytest.mark.parametrize("mode", MODES)
compiled_modes = pytest.mark.parametrize("mode", COMPILED)


def numpy(x):
    return ops.convert_to_numpy(ops.convert_to_tensor(x))


def built(layer, rng, shape=SHAPE):
    """The layer with random gamma and beta."""
    layer.build((None, *shape[1:]))
    layer.gamma.assign(rng.normal(1, 0.3, layer.gamma.shape))
    layer.beta.assign(rng.normal(0, 0.3, layer.beta.shape))
    return layer


def linear_loss(g):
    return quadratic_loss(g, np.zeros(g.shape))[0]


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


# Without noise


@compiled_modes
def test_quiet_is_keras_batch_normalization(mode):
    rng = np.random.default_rng(0)
    bn = built(keras.layers.BatchNormalization(momentum=0.8), rng)
    layer = NoisyBN(momentum=0.8, **QUIET)
    layer.build((None, *SHAPE[1:]))
    layer.set_weights(bn.get_weights())
    loss, _ = quadratic_loss(rng.normal(size=SHAPE), rng.normal(size=SHAPE))
    steps = [training_step(one, loss, mode) for one in (layer, bn)]
    for _ in range(4):
        x = batch(rng, SHAPE)
        # Keras subtracts the squared mean from the mean square: a digit of float32.
        assert_near(*(step(x) for step in steps), 2e-5)
        assert_near(layer.get_weights(), bn.get_weights())
    x = batch(rng, SHAPE)
    assert_near([layer(x)], [bn(x)])


def test_inference_with_the_weights_of_keras_batch_normalization():
    """The weights are those of BN, in its order; the noise of training stays out."""
    rng = np.random.default_rng(1)
    bn = built(keras.layers.BatchNormalization(), rng)
    bn.moving_mean.assign(rng.normal(size=4))
    bn.moving_variance.assign(rng.uniform(0.5, 2, 4))
    layer = NoisyBN()
    layer.build((None, *SHAPE[1:]))
    assert [v.name for v in layer.weights] == [v.name for v in bn.weights]
    layer.set_weights(bn.get_weights())
    x = batch(rng, SHAPE)
    assert_near([layer(x), layer(x, training=False)], [bn(x), bn(x)], 1e-6)


@modes
@pytest.mark.parametrize("masked", [False, True])
def test_batch_normalization_in_float64(masked, mode):
    rng = np.random.default_rng(2)
    layer = built(NoisyBN(momentum=0.8, epsilon=0.01, **QUIET), rng)
    gamma, beta = (numpy(v).astype("float64") for v in layer.trainable_weights)
    reference = BatchNormReference(4, momentum=0.8, epsilon=0.01)
    loss, upstream = quadratic_loss(rng.normal(size=SHAPE), rng.normal(size=SHAPE))
    mask = rng.random(SHAPE) < 0.6 if masked else None
    arguments = {"mask": ops.convert_to_tensor(mask)} if masked else {}
    step = training_step(layer, loss, mode, **arguments)
    for _ in range(3):
        x = batch(rng, SHAPE)
        y = reference.train(x, gamma, beta, mask)
        expected = [y, *reference.gradients(upstream(y), x, gamma, beta, mask)]
        assert_near(step(x), expected)
        assert_near(
            [layer.moving_mean, layer.moving_variance],
            [reference.moving_mean, reference.moving_statistic],
        )
    assert_near([layer(x)], [reference.inference(x, gamma, beta)])


@pytest.mark.parametrize("masked", [False, True])
def test_reference_gradients_are_finite_differences(masked):
    rng = np.random.default_rng(3)
    shape = (5, 2, 3)
    reference = BatchNormReference(3)
    x, g = batch(rng, shape).astype("float64"), rng.normal(size=shape)
    mask = rng.random(shape) < 0.7 if masked else None
    arguments = [x, rng.normal(1, 0.3, 3), rng.normal(0, 0.3, 3)]
    for i, gradient in enumerate(reference.gradients(g, *arguments, mask)):

        def loss(value, i=i):
            changed = [*arguments[:i], value, *arguments[i + 1 :]]
            return np.sum(g * reference.forward(*changed, mask))

        assert relative_error(gradient, finite_differences(loss, arguments[i])) < 1e-7


@compiled_modes
def test_second_derivative_is_the_derivative_of_the_gradient(mode):
    rng = np.random.default_rng(4)
    layer = built(NoisyBN(**QUIET), rng)
    gamma, beta = (numpy(v).astype("float64") for v in layer.trainable_weights)
    reference = BatchNormReference(4)
    loss, upstream = quadratic_loss(rng.normal(size=SHAPE), rng.normal(size=SHAPE))
    x, direction = batch(rng, SHAPE), rng.normal(size=SHAPE).astype("float32")

    def directional(x):
        y = reference.forward(x, gamma, beta)
        dx, _, _ = reference.gradients(upstream(y), x, gamma, beta)
        return np.sum(direction * dx)

    expected = finite_differences(directional, x.astype("float64"))
    actual = second_derivative(layer, x, loss, direction, mode)
    # A sum of terms that cancel in part, each with the error of a first derivative.
    assert relative_error(actual, expected) < 2e-5


@compiled_modes
def test_extreme_inputs(mode):
    rng = np.random.default_rng(5)
    normal = rng.normal(size=SHAPE[:-1])
    scales = (0, 1e-20, 1e15, np.nan)
    x = np.stack([*(normal * s for s in scales), 0 * normal + 7.5], -1)
    layer = built(NoisyBN(seed=1), rng, x.shape)
    g = rng.normal(size=x.shape)
    values = training_step(layer, linear_loss(g), mode)(x.astype("float32"))
    for value in (*values, *layer.get_weights()):
        assert np.isfinite(value[..., [0, 1, 2, 4]]).all()


# With noise


@modes
@pytest.mark.parametrize("axis", [-1, 1])
def test_noise_scales_and_shifts_and_is_a_constant_for_the_gradient(axis, mode):
    """The same noise in every mode: here it is drawn again eagerly."""
    rng = np.random.default_rng(6)
    layer = built(NoisyBN(axis=axis, seed=7, **LOUD), rng, SHAPE[:axis] + (4, 4))
    quiet = NoisyBN(axis=axis, **QUIET)
    quiet.build((None, 4, 4))
    quiet.set_weights(layer.get_weights())
    shape = (6, 4, 4)
    g = rng.normal(size=shape).astype("float32")
    step = training_step(layer, linear_loss(g), mode)
    for call in (1, 2):
        x = batch(rng, shape)
        scale, shift = noise_of(7, x, call, axis, **LOUD)
        assert np.abs(scale - 1).max() > 0.2 and np.abs(shift).max() > 0.2
        y, *gradients = step(x)
        y0, *expected = training_step(quiet, linear_loss(scale * g), COMPILED[0])(x)
        assert_near([y, *gradients], [scale * y0 + shift, *expected])
        assert_near(layer.get_weights(), quiet.get_weights())


def test_arguments_reach_the_noise_they_name():
    """With gamma 0 and beta b, y = s * b + m."""
    x = np.zeros((50, 6), "float32")

    def output(beta, **ranges):
        layer = NoisyBN(
            seed=0,
            gamma_initializer="zeros",
            beta_initializer=keras.initializers.Constant(beta),
            **QUIET | ranges,
        )
        return run(layer, x)

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


def test_noise_is_fresh_and_repeats():
    x = np.random.default_rng(8).normal(size=(20, 5)).astype("float32")

    def outputs(**arguments):
        layer = NoisyBN(**arguments)
        return [run(layer, x) for _ in range(2)]

    first, second = outputs(seed=3)
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(outputs(seed=3), [first, second])
    for other in ({"seed": 4}, {}, {}):
        assert np.abs(outputs(**other)[0] - first).max() > 0.1
    unseeded = outputs(), outputs()
    assert np.abs(unseeded[0][0] - unseeded[1][0]).max() > 0.1


def model(**arguments):
    """Two noisy layers in a compiled model."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(5), NoisyBN(**arguments)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    # With jit_compile where there is a compiler.
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=BACKEND != "torch")
    return model


X = np.random.default_rng(9).normal(size=(12, 6)).astype("float32")
Y = X[:, :1]


def fit(model):
    model.fit(X, Y, 4, epochs=2, shuffle=False, verbose=0)
    return [numpy(v) for v in model.weights]


def test_fit_repeats_with_the_same_seed():
    first = fit(model(seed=3))
    for actual, expected in zip(fit(model(seed=3)), first, strict=True):
        np.testing.assert_array_equal(actual, expected)
    for other in (model(seed=4), model(seed=3, **QUIET)):
        assert np.abs(fit(other)[0] - first[0]).max() > 1e-3


def test_a_loaded_model_starts_its_noise_anew(tmp_path):
    """Keras saves no state of a seed generator; Dropout is the same."""
    path, trained = tmp_path / "model.keras", model(seed=3)
    fit(trained)
    trained.save(path)
    loaded = keras.models.load_model(path)
    layer, first = loaded.layers[1], NoisyBN(seed=3)
    first.build((None, 5))
    first.set_weights(layer.get_weights())
    x = X[:, :5]
    outputs = [run(one, x) for one in (layer, first)]
    np.testing.assert_array_equal(*outputs)


def test_inference_is_quiet():
    x = np.random.default_rng(10).normal(size=(20, 5)).astype("float32")
    layer, quiet = NoisyBN(), NoisyBN(**QUIET)
    for training in (False, None):
        np.testing.assert_array_equal(
            numpy(layer(x, training=training)), numpy(quiet(x, training=training))
        )
    layer.trainable = False
    np.testing.assert_array_equal(numpy(layer(x, training=True)), numpy(quiet(x)))


def test_noise_at_inference():
    rng = np.random.default_rng(11)
    x = rng.normal(size=(20, 4)).astype("float32")
    layer = built(NoisyBN(seed=5, noise_at_inference=True, **LOUD), rng, x.shape)
    quiet = built(NoisyBN(**QUIET), rng, x.shape)
    quiet.set_weights(layer.get_weights())
    for call, trainable in ((1, True), (2, True), (3, False)):
        layer.trainable = trainable
        scale, shift = noise_of(5, x, call, **LOUD)
        y = run(layer, x, not trainable)
        assert_near([y], [scale * numpy(quiet(x)) + shift])
    for actual, start in zip(layer.get_weights(), quiet.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, start)


def test_predict_with_noise():
    """A prediction draws anew each time, and still moves no statistic."""
    noisy = model(seed=3, noise_at_inference=True)
    before = noisy.get_weights()
    first, second = (noisy.predict(X, verbose=0) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    for actual, expected in zip(noisy.get_weights(), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


# Arguments


NOT_NUMBERS = [None, "1", [1.0], True, 1j, np.inf, np.nan, np.array([1.0, 2.0])]


@pytest.mark.parametrize(
    "name",
    ["mean_range", "scale_range", "mean_jitter", "scale_jitter", "momentum", "epsilon"],
)
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_numbers_must_be_finite_real_numbers(name, value):
    assert "must be a number" in refusal(name, value)


def refusal(name, value):
    """The message of the ValueError for a constructor argument."""
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        NoisyBN(**{name: value})
    message = str(error.value)
    assert f"Received: {name}={value!r}" in message
    return message


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mean_range", -0.1, "non-negative"),
        ("scale_range", 0.99, "at least 1"),
        ("mean_jitter", -1, "non-negative"),
        ("scale_jitter", -1e-9, "non-negative"),
        ("momentum", 1, "less than 1"),
        ("momentum", -0.1, "non-negative"),
        ("epsilon", 0, "positive"),
        ("epsilon", -1e-3, "positive"),
        ("noise_at_inference", 1, "True or False"),
        ("noise_at_inference", None, "True or False"),
        ("seed", 1.0, "an integer"),
        ("seed", "1", "an integer"),
        ("seed", True, "an integer"),
    ],
)
def test_values_out_of_range(name, value, expected):
    assert expected in refusal(name, value)


@pytest.mark.parametrize("seed", [np.int64(3), 0, 2**31 - 1])
def test_seeds(seed):
    x = np.random.default_rng(12).normal(size=(6, 4)).astype("float32")
    layer = NoisyBN(seed=seed)
    assert type(layer.get_config()["seed"]) is int
    expected = run(NoisyBN(seed=int(seed)), x)
    np.testing.assert_array_equal(run(layer, x), expected)
