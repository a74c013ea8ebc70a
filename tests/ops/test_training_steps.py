"""CBN and LpNorm against float64 NumPy: steps, second derivatives, hard inputs."""

import numpy as np
import pytest
from keras import ops

from keras_norms import CBN, LpNorm
from tests.support.autodiff import MODES, second_derivative, training_step
from tests.support.backend import BACKEND, has_float64, numpy
from tests.support.cbn_reference import finite_differences, relative_error
from tests.support.normalizations import (
    CASES,
    FEW,
    INF,
    KERNELS,
    REFERENCES,
    assert_near,
    averages,
    batch,
    built,
    case,
    expected_step,
    in_modes,
    linear_loss,
    quadratic_loss,
    set_rate,
    some,
    train,
)
from tests.support.weight_reference import AsLayer

SHAPE = (8, 3, 4)
# Unknown rates first and last, where the batch normalises and `momentum` averages.
SECOND = ("shift", "coupled_ratio", "l1.5 centered", "l2 input", f"l{INF} centered")
RATES = [-1.0, -1.0, 0.1, 0.05, 0.01, 0.01, 0.001, 0.0, 0.2, 0.03, *[0.005] * 10, -1.0]


@pytest.mark.parametrize(("name", "mode"), in_modes(CASES, FEW))
def test_steps(name, mode):
    """With changing learning rates where the layer knows them, then at inference."""
    rng = np.random.default_rng(0)
    layer, reference, *affine = case(name, SHAPE, rng, momentum=0.8)
    loss, upstream = quadratic_loss(*rng.normal(size=(2, *SHAPE)))
    step = training_step(layer, loss, mode)
    for rate in RATES if isinstance(layer, CBN) else RATES[:4]:
        rate = set_rate(layer, rate)
        x = batch(rng, SHAPE)
        actual = step(x)
        assert_near(actual, expected_step(reference, x, *affine, upstream, rate))
        assert_near(averages(layer), averages(reference))
    x = batch(rng, SHAPE)
    assert_near([layer(x, training=False)], [reference.inference(x, *affine)])


@has_float64
@pytest.mark.parametrize("name", some(CASES, FEW[:4]))
def test_float64_layers_compute_in_float64(name):
    rng = np.random.default_rng(1)
    layer, reference, *affine = case(name, SHAPE, rng, dtype="float64")
    rate = set_rate(layer, 0.02)
    if isinstance(layer, CBN):
        reference.rho = float(numpy(layer.rho))  # TensorFlow rounds it to float32.
    g = rng.normal(size=SHAPE)
    step = training_step(layer, linear_loss(g))
    for _ in range(2):
        x = rng.normal(1, 2, SHAPE)
        expected = expected_step(reference, x, *affine, g, rate)
        assert_near(step(x), expected, 1e-12)


SECOND_MODES = KERNELS if BACKEND == "jax" else MODES[:2]


@pytest.mark.parametrize(("name", "mode"), in_modes(CASES, SECOND, SECOND_MODES))
def test_second_derivative_is_the_derivative_of_the_gradient(name, mode):
    rng = np.random.default_rng(3)
    layer, reference, *affine = case(name, SHAPE, rng)
    rate = set_rate(layer, 0.03)
    loss, upstream = quadratic_loss(*rng.normal(size=(2, *SHAPE)))
    first, x = batch(rng, SHAPE), batch(rng, SHAPE)
    direction = rng.normal(size=SHAPE).astype("float32")
    # At 0 the derivative of |x|^0.5 has no bound.
    assert np.abs(x).min() > 1e-3 and np.abs(x - x.mean((0, 1))).min() > 1e-3
    layer(first, training=True)
    train(reference, first, *affine, rate)
    _, last = train(reference, x, *affine, rate)

    def directional(x):
        y = reference.forward(x, *affine, last)
        dx, _, _ = reference.gradients(upstream(y), x, *affine, last)
        return np.sum(direction * dx)

    expected = finite_differences(directional, x.astype("float64"))
    actual = second_derivative(layer, x, loss, direction, mode)
    # A sum of terms that cancel in part, each with the error of a first derivative.
    assert relative_error(actual, expected) < 2e-5


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

    def call(x):
        state = [v.value for v in layer.non_trainable_variables]
        parameters = [v.value for v in layer.trainable_variables]
        return layer.stateless_call(parameters, state, x, training=True, mask=mask)[0]

    loss, _ = quadratic_loss(np.zeros_like(g), g)
    second = second_derivative(AsLayer(call), x, loss, direction, MODES[-1])
    assert np.all(np.isfinite(second))
    assert np.all(second[:, [0, 2]] != 0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_references_are_finite_differences(name, masked):
    rng = np.random.default_rng(2)
    shape = (5, 2, 3)
    norm, arguments = CASES[name]
    reference = REFERENCES[norm](3, **arguments)
    affine = rng.normal(1, 0.3, 3), rng.normal(0, 0.3, 3)
    mask = rng.random(shape) < 0.7 if masked and norm is LpNorm else None
    train(reference, batch(rng, shape), *affine, 0.05)
    x, g = batch(rng, shape).astype("float64"), rng.normal(size=shape)
    _, last = train(reference, x, *affine, 0.02, mask)
    arguments = [x, *affine]
    for i, gradient in enumerate(reference.gradients(g, *arguments, last)):

        def loss(value, i=i):
            changed = [*arguments[:i], value, *arguments[i + 1 :]]
            return np.sum(g * reference.forward(*changed, last))

        assert relative_error(gradient, finite_differences(loss, arguments[i])) < 1e-7


_NORMAL = np.random.default_rng(6).normal(size=SHAPE[:-1])
EXTREMES = {
    "zeros": 0 * _NORMAL,
    "constant": 0 * _NORMAL + 7.5,
    "mean 1e3": _NORMAL + 1e3,
    "mean -1e3": _NORMAL - 1e3,
    "1e-20": 1e-20 * _NORMAL,
    "1e10": 1e10 * _NORMAL,
    "1e15": 1e15 * _NORMAL,
    "1e20": 1e20 * _NORMAL,
    "nan": np.nan * _NORMAL,
}
HARD = CASES | {
    f"l50 {of}": (LpNorm, {"p": 50, "norm_of": of}) for of in ("input", "centered")
}
FEW_HARD = ("shift", "coupled_ratio", "l1 input", "l3 centered", "l50 centered")


@pytest.mark.parametrize(("name", "mode"), in_modes(HARD, FEW_HARD))
def test_extreme_channels(name, mode):
    rng = np.random.default_rng(7)
    norm, arguments = HARD[name]
    names = list(EXTREMES)
    if norm is CBN or arguments["p"] == 2:  # The square of 1e20 is no float32.
        names.remove("1e20")
    x = np.stack([EXTREMES[name] for name in names], -1).astype("float32")
    layer, reference, *affine = built(x.shape, rng, norm, **arguments)
    g = rng.normal(size=x.shape)
    step = training_step(layer, linear_loss(g), mode)
    for rate in (0.0, 0.02, 1.0) if norm is CBN else (-1.0,):
        rate = set_rate(layer, rate)
        actual = [*step(x), *averages(layer)]
        for value in actual:
            assert np.isfinite(value[..., :-1]).all()
        if rate == 0:  # The reference has no limit of eta = 1 on its first step.
            continue
        expected = expected_step(reference, x, *affine, g, rate)
        expected += averages(reference)
        if norm is CBN:  # Of dbeta, next to nothing is left in a constant channel.
            del actual[3], expected[3]
        for channel, name in enumerate(names[:-1]):
            for value, wanted in zip(actual, expected, strict=True):
                value, wanted = value[..., channel], wanted[..., channel]
                # p = 50 multiplies the rounding of |x| / s_p by 49; a mean of 1e3
                # deviations is rounded by 6e-5 of one at most.
                tolerance = 1e-3 if "mean" in name else 1e-4
                bound = tolerance * (np.abs(wanted).max() or 1)
                # A square of 1e-20 is a denormal number, which XLA takes for 0.
                bound = max(bound, np.finfo("float32").tiny)
                assert np.abs(value - wanted).max() <= bound, name
    assert np.isfinite(numpy(layer(x, training=False))[..., :-1]).all()


def test_zero_learning_rate_from_the_start_averages_all_batches():
    rng = np.random.default_rng(11)
    layer = CBN(center=False)
    layer.build((None, 3))
    layer.set_learning_rate(0.0)
    batches = [batch(rng, (16, 3)) for _ in range(4)]
    for x in batches:
        layer(x, training=True)
    mean = np.mean([x.mean(0, dtype="float64") for x in batches], axis=0)
    assert relative_error(layer.moving_mean, mean) < 1e-5
