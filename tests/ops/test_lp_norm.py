"""LpNorm against float64 NumPy: values, statistics, first and second derivatives."""

import keras
import numpy as np
import pytest

from keras_norms import LpNorm
from keras_norms.ops import custom_gradient
from tests.ops.test_cbn_numerics import batch, quadratic_loss
from tests.support.autodiff import BACKEND, MODES, second_derivative, training_step
from tests.support.batch_reference import LpNormReference
from tests.support.cbn_reference import finite_differences, relative_error

INF = np.inf
SHAPE = (8, 3, 4)
NORMS = [(p, of) for p in (1, 1.5, 2, 3, INF) for of in ("input", "centered")]
norms = pytest.mark.parametrize(("p", "norm_of"), NORMS)
modes = pytest.mark.parametrize("mode", MODES)
# Without modes that run the same kernels: TensorFlow's graph those of eager, JAX's
# eager those of XLA, one by one.
kernels = pytest.mark.parametrize(
    "mode",
    {"tensorflow": ["eager", "jit_compile"], "jax": ["jit_compile"]}.get(
        BACKEND, ["eager"]
    ),
)


def make(channels, shape, rng, **arguments):
    """A built layer with random gamma and beta, and its reference."""
    layer = LpNorm(**arguments)
    layer.build((None, *shape[1:]))
    layer.gamma.assign(rng.normal(1, 0.3, channels))
    layer.beta.assign(rng.normal(0, 0.3, channels))
    affine = (numpy(v).astype("float64") for v in (layer.gamma, layer.beta))
    return layer, LpNormReference(channels, **arguments), *affine


def numpy(x):
    return keras.ops.convert_to_numpy(x)


def linear_loss(g):
    """sum(g * y), in the dtype of y."""
    return lambda y: keras.ops.sum(keras.ops.convert_to_tensor(g, y.dtype) * y)


def assert_near(actual, expected, tolerance=1e-5):
    for value, wanted in zip(actual, expected, strict=True):
        assert relative_error(value, wanted) < tolerance


@modes
@norms
def test_steps(p, norm_of, mode):
    rng = np.random.default_rng(0)
    layer, reference, gamma, beta = make(
        4, SHAPE, rng, p=p, norm_of=norm_of, momentum=0.8
    )
    loss, upstream = quadratic_loss(rng.normal(size=SHAPE), rng.normal(size=SHAPE))
    step = training_step(layer, loss, mode)
    for _ in range(4):
        x = batch(rng, SHAPE)
        y, *gradients = step(x)
        expected = reference.train(x, gamma, beta)
        assert_near([y], [expected])
        assert_near(gradients, reference.gradients(upstream(expected), x, gamma, beta))
        assert_near(
            [layer.moving_mean, layer.moving_norm],
            [reference.moving_mean, reference.moving_statistic],
        )
    x = batch(rng, SHAPE)
    assert_near([layer(x, training=False)], [reference.inference(x, gamma, beta)])


@pytest.mark.parametrize("masked", [False, True])
@norms
def test_reference_gradients_are_finite_differences(p, norm_of, masked):
    rng = np.random.default_rng(1)
    shape = (5, 2, 3)
    _, reference, *affine = make(3, shape, rng, p=p, norm_of=norm_of)
    x = batch(rng, shape).astype("float64")
    mask = rng.random(shape) < 0.7 if masked else None
    g = rng.normal(size=shape)
    arguments = [x, *affine]
    for i, gradient in enumerate(reference.gradients(g, *arguments, mask)):

        def loss(value, i=i):
            changed = [*arguments[:i], value, *arguments[i + 1 :]]
            return np.sum(g * reference.forward(*changed, mask))

        assert relative_error(gradient, finite_differences(loss, arguments[i])) < 1e-7


@pytest.mark.parametrize("mode", MODES[1:] or MODES)
@norms
def test_second_derivative_is_the_derivative_of_the_gradient(p, norm_of, mode):
    rng = np.random.default_rng(3)
    layer, reference, gamma, beta = make(4, SHAPE, rng, p=p, norm_of=norm_of)
    loss, upstream = quadratic_loss(rng.normal(size=SHAPE), rng.normal(size=SHAPE))
    x, direction = batch(rng, SHAPE), rng.normal(size=SHAPE).astype("float32")
    # At 0 the derivative of |x|^0.5 has no bound.
    assert np.abs(x).min() > 1e-3 and np.abs(x - x.mean((0, 1))).min() > 1e-3

    def directional(x):
        y = reference.forward(x, gamma, beta)
        dx, _, _ = reference.gradients(upstream(y), x, gamma, beta)
        return np.sum(direction * dx)

    expected = finite_differences(directional, x.astype("float64"))
    actual = second_derivative(layer, x, loss, direction, mode)
    # A sum of terms that cancel in part, each with the error of a first derivative.
    assert relative_error(actual, expected) < 2e-5


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


@kernels
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm_of", ["input", "centered"])
def test_maxima_share_the_gradient(norm_of, masked, mode):
    rng = np.random.default_rng(4)
    x = TIES.astype("float32")
    mask = None
    if masked:  # Hidden elements are as large as the maxima, and larger.
        x = np.concatenate([x, 3 * x])
        mask = np.arange(16) < 8
    layer, reference, gamma, beta = make(
        4, x.shape, rng, p=INF, norm_of=norm_of, epsilon=0.5
    )
    g = rng.normal(size=x.shape)
    arguments = {} if mask is None else {"mask": keras.ops.convert_to_tensor(mask)}
    actual = training_step(layer, linear_loss(g), mode, **arguments)(x)
    mask = None if mask is None else mask[:, None]
    expected = [reference.train(x, gamma, beta, mask)]
    expected += reference.gradients(g, x, gamma, beta, mask)
    assert_near(actual, expected)


@kernels
@norms
def test_masks(p, norm_of, mode):
    """A mask that differs between channels; outputs of hidden elements count too."""
    rng = np.random.default_rng(5)
    layer, reference, gamma, beta = make(4, SHAPE, rng, p=p, norm_of=norm_of)
    x, g = batch(rng, SHAPE), rng.normal(size=SHAPE)
    mask = rng.random(SHAPE) < 0.6
    mask[..., 3] = False
    unused = ~mask & (rng.random(SHAPE) < 0.5)
    g[unused] = 0
    expected = reference.train(x, gamma, beta, mask)
    expected = [expected, *reference.gradients(g, x, gamma, beta, mask)]
    # Nothing was seen in the last channel: its mean and its norm are 0.
    assert (
        relative_error(expected[0][..., 3], gamma[3] * x[..., 3] / 1e-5 + beta[3])
        < 1e-6
    )
    step = training_step(
        layer, linear_loss(g), mode, mask=keras.ops.convert_to_tensor(mask)
    )
    start = layer.get_weights()
    for hidden in (x, 1e30):  # An element that enters nowhere may be huge.
        layer.set_weights(start)
        actual = list(step(np.where(unused, hidden, x).astype("float32")))
        actual[0] = np.where(unused, expected[0], actual[0])
        for channels in ([0, 1, 2], [3]):
            assert_near(
                [v[..., channels] for v in actual], [v[..., channels] for v in expected]
            )
        moving = numpy(layer.moving_mean), numpy(layer.moving_norm)
        assert_near(moving, [reference.moving_mean, reference.moving_statistic])
        assert moving[0][3] == 0 and moving[1][3] == 1


_NORMAL = np.random.default_rng(6).normal(size=SHAPE[:-1])
EXTREMES = {
    "zeros": 0 * _NORMAL,
    "constant": 0 * _NORMAL + 7.5,
    "1e-20": 1e-20 * _NORMAL,
    "1e10": 1e10 * _NORMAL,
    "1e15": 1e15 * _NORMAL,
    "1e20": 1e20 * _NORMAL,
    "nan": np.nan * _NORMAL,
}


@kernels
@pytest.mark.parametrize("norm_of", ["input", "centered"])
@pytest.mark.parametrize("p", [1, 1.5, 2, 3, 50, INF])
def test_extreme_channels(p, norm_of, mode):
    rng = np.random.default_rng(7)
    names = list(EXTREMES)
    if p == 2:  # The square of 1e20 is no number in float32.
        names.remove("1e20")
    x = np.stack([EXTREMES[name] for name in names], -1).astype("float32")
    layer, reference, gamma, beta = make(len(names), x.shape, rng, p=p, norm_of=norm_of)
    g = rng.normal(size=x.shape)
    actual = training_step(layer, linear_loss(g), mode)(x)
    expected = [reference.train(x, gamma, beta)]
    expected += reference.gradients(g, x, gamma, beta)
    actual += (numpy(layer.moving_norm),)
    expected.append(reference.moving_statistic)
    for channel, name in enumerate(names[:-1]):
        for value, wanted in zip(actual, expected, strict=True):
            value, wanted = value[..., channel], wanted[..., channel]
            # p = 50 multiplies the rounding of |x| / s_p by 49.
            bound = 1e-4 * (np.abs(wanted).max() or 1)
            assert np.abs(value - wanted).max() <= bound, name


@kernels
@pytest.mark.parametrize("norm_of", ["input", "centered"])
@pytest.mark.parametrize("p", [2, 3, INF])
def test_batches_of_one_and_of_none(p, norm_of, mode):
    rng = np.random.default_rng(8)
    for shape in ((1, 3), (0, 3)):
        layer, reference, gamma, beta = make(
            3, shape, rng, p=p, norm_of=norm_of, epsilon=0.5
        )
        x, g = batch(rng, shape), rng.normal(size=shape)
        actual = training_step(layer, linear_loss(g), mode)(x)
        expected = [reference.train(x, gamma, beta)]
        expected += reference.gradients(g, x, gamma, beta)
        expected += [reference.moving_mean, reference.moving_statistic]
        actual += numpy(layer.moving_mean), numpy(layer.moving_norm)
        for value, wanted in zip(actual, expected, strict=True):
            # A batch of one is its mean, exactly, so that many results are 0.
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


@kernels
@norms
def test_large_mean(p, norm_of, mode):
    rng = np.random.default_rng(9)
    layer, reference, gamma, beta = make(4, SHAPE, rng, p=p, norm_of=norm_of)
    g = rng.normal(size=SHAPE)
    x = batch(rng, SHAPE, mean=[1e3, -1e3, 1e3, -1e3], std=1.0)
    actual = training_step(layer, linear_loss(g), mode)(x)
    expected = [reference.train(x, gamma, beta)]
    expected += reference.gradients(g, x, gamma, beta)
    assert_near(actual, expected, 1e-3)


@pytest.mark.skipif(BACKEND == "jax", reason="float64 is a process-wide switch of JAX")
@norms
def test_float64_layers_compute_in_float64(p, norm_of):
    rng = np.random.default_rng(15)
    layer, reference, gamma, beta = make(4, SHAPE, rng, p=p, norm_of=norm_of)
    layer = LpNorm(p, norm_of=norm_of, dtype="float64")
    layer.build(SHAPE)
    layer.gamma.assign(gamma)
    layer.beta.assign(beta)
    g, x = rng.normal(size=SHAPE), rng.normal(1, 2, size=SHAPE)
    actual = training_step(layer, linear_loss(g))(x)
    expected = [reference.train(x, gamma, beta)]
    expected += reference.gradients(g, x, gamma, beta)
    assert_near(actual, expected, 1e-12)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")
@pytest.mark.parametrize(
    ("p", "norm_of", "mode"), [(1.5, "input", "eager"), (INF, "centered", "graph")]
)
def test_compiled_pass_by_pass_as_on_a_gpu(monkeypatch, p, norm_of, mode):
    rng = np.random.default_rng(16)
    x, g = batch(rng, SHAPE), rng.normal(size=SHAPE)
    direction = rng.normal(size=SHAPE).astype("float32")
    loss, _ = quadratic_loss(g, g)
    mask = keras.ops.convert_to_tensor(rng.random(SHAPE[:-1]) < 0.6)
    layer, _, _, _ = make(4, SHAPE, rng, p=p, norm_of=norm_of)
    start = layer.get_weights()

    def results():
        layer.set_weights(start)
        return [
            *training_step(layer, loss, mode)(x),
            *training_step(layer, loss, mode, mask=mask)(x),
            second_derivative(layer, x, loss, direction, mode),
            *layer.get_weights(),
        ]

    expected = results()
    monkeypatch.setattr(custom_gradient, "_has_gpu", lambda: True)
    assert_near(results(), expected)
