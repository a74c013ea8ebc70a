"""CBN, NoisyBN and LpNorm against float64 NumPy where inputs are hard."""

import numpy as np
import pytest
from keras import ops

from keras_norms import CBN, LpNorm, NoisyBN
from tests.support.any_layer import QUIET
from tests.support.autodiff import MODES, second_derivative, training_step
from tests.support.backend import numpy
from tests.support.normalizations import (
    CASES,
    averages,
    built,
    case,
    expected_step,
    in_modes,
    linear_loss,
    quadratic_loss,
    set_rate,
    some,
)
from tests.support.weight_reference import AsLayer

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


_NORMAL = np.random.default_rng(6).normal(size=(8, 3))
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
HARD["bn"] = NoisyBN, QUIET
FEW_HARD = ("shift", "coupled_ratio", "bn", "l1 input", "l3 centered", "l50 centered")


@pytest.mark.parametrize(("name", "mode"), in_modes(HARD, FEW_HARD))
def test_extreme_channels(name, mode):
    rng = np.random.default_rng(7)
    norm, arguments = HARD[name]
    names = list(EXTREMES)
    if arguments.get("p", 2) == 2:  # The square of 1e20 is no float32.
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
