import itertools

import keras
import numpy as np
import pytest
from keras import ops

from recipes.engine.precision import available, precision
from recipes.models import flow_steps as steps
from recipes.models.realnvp import RealNVP
from tests.support.autodiff import training_step
from tests.support.backend import numpy, some

LIMITS = {"float32": 1e-4, "float64": 1e-10}
SMALL = {"scales": 2, "couplings": 1, "width": 4, "blocks": 1}
SHAPE = (4, 2, 2)


def dense_log_det(function, x):
    """log |det| of the Jacobian at one image `x` of what a step or flow returns.

    Every sample of a batch is that image, and its own output one of the sum that is
    differentiated: row i of the Jacobian is the gradient at sample i.
    """
    own = ops.eye(x.size, dtype=x.dtype)
    layer = keras.layers.Lambda(lambda x: function(x, training=False)[0])
    layer.build(x.shape)
    step = training_step(layer, lambda y: ops.sum(ops.reshape(y, own.shape) * own))
    _, rows = step(np.repeat(x[None], x.size, 0))
    return np.linalg.slogdet(rows.reshape(own.shape).astype("float64"))[1]


def disturb(model):
    """Gives weights, which start as an identity, and statistics other values."""
    rng = np.random.default_rng(0)
    for variable in model.variables:
        noise = rng.normal(size=variable.shape)
        if "variance" in variable.path or "moving_square" in variable.path:
            variable.assign(np.exp(0.5 * noise))
        elif variable.trainable or variable.path.endswith("moving_mean"):
            variable.assign(numpy(variable) + 0.2 * noise)


def coupling(mask):
    inputs = keras.Input((None, None, 2))
    network = keras.layers.Conv2D(4, 3, padding="same", activation="tanh")(inputs)
    return steps.Coupling(keras.Model(inputs, network), mask)


STEPS = {
    "logit": steps.Logit,
    "squeeze": steps.Squeeze,
    "coupling": lambda: coupling(steps.checkerboard(SHAPE)),
    "coupling of channels": lambda: coupling(1 - steps.of_channels(SHAPE)),
    "bn": steps.FlowBatchNormalization,
    "layer": lambda: steps.FlowLayerNormalization(1 - steps.checkerboard(SHAPE)),
    "layer of channels": lambda: steps.FlowLayerNormalization(steps.of_channels(SHAPE)),
}


def step(name):
    """A step of the flow whose weights are not those it starts with."""
    keras.utils.set_random_seed(3)
    made = STEPS[name]()
    made.build((None, *SHAPE))
    disturb(made)
    return made


def images(shape=SHAPE, count=3, dtype="float32"):
    return np.random.default_rng(0).random((count, *shape)).astype(dtype)


@pytest.mark.parametrize("dtype", available())
@pytest.mark.parametrize("name", STEPS)
def test_steps_against_the_dense_jacobian(name, dtype):
    with precision(dtype):
        made, x = step(name), images(count=2, dtype=dtype)
        y, log_det = made(x)
        back = numpy(made.inverse(y))
        expected = [dense_log_det(made, image) for image in x]
    limit = LIMITS[dtype]
    np.testing.assert_allclose(numpy(log_det), expected, rtol=limit, atol=limit)
    np.testing.assert_allclose(back, x, atol=limit)


def test_outputs_of_steps_against_numpy():
    """float64 NumPy, written from the formulas."""
    x, made = images(), {name: step(name) for name in STEPS}
    wide, expected = x.astype("float64"), {}
    p = 0.05 + 0.9 * wide
    expected["logit"] = np.log(p / (1 - p))
    moving = made["bn"].moving_mean, made["bn"].moving_variance
    mean, variance = (numpy(variable).copy() for variable in moving)
    expected["bn"] = (wide - mean) / np.sqrt(variance + steps.EPSILON)
    kept = wide[..., :1]
    deviation = np.sqrt(kept.var((1, 2, 3), keepdims=True) + steps.EPSILON)
    other = (wide[..., 1:] - kept.mean((1, 2, 3), keepdims=True)) / deviation
    expected["layer of channels"] = np.concatenate([kept, other], -1)
    kept = (np.indices(SHAPE)[:2].sum(0) % 2 == 0).astype("float64")
    s, t = np.split(numpy(made["coupling"].network(kept.astype("float32") * x)), 2, -1)
    s = np.tanh(s.astype("float64")) * numpy(made["coupling"].scale)
    expected["coupling"] = kept * wide + (1 - kept) * (wide * np.exp(s) + t)
    for name, values in expected.items():
        # Of these, batch normalization alone has another output in training.
        y, _ = made[name](x, training=name != "bn")
        np.testing.assert_allclose(numpy(y), values, rtol=1e-5, atol=1e-6)
    y, log_det = made["bn"](x, training=True)
    batch = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
    np.testing.assert_allclose(numpy(y).mean((0, 1, 2)), 0, atol=1e-5)
    expected = -4 * np.log(batch[1] + steps.EPSILON).sum()
    np.testing.assert_allclose(numpy(log_det), [expected] * 3, rtol=1e-5)
    for stored, old, new in zip(moving, (mean, variance), batch):
        np.testing.assert_allclose(numpy(stored), 0.9 * old + 0.1 * new, rtol=1e-5)


FLOWS = [*itertools.product(["bn", "layer"], available())]


@pytest.mark.parametrize("norm, dtype", some(FLOWS, [FLOWS[0], FLOWS[-1]]))
def test_flow(norm, dtype):
    """Likelihood from the dense Jacobian; round trips from images and from z."""
    with precision(dtype):
        keras.utils.set_random_seed(0)
        model = RealNVP((4, 4, 1), norm, True, **SMALL)
        disturb(model)
        x = images((4, 4, 1), count=1, dtype=dtype)
        z, log_det = model.transform(x)
        found, back = numpy(model(x)), numpy(model.inverse(z))
        again = numpy(model.transform(back)[0])
        expected = [dense_log_det(model.transform, image) for image in x]
    z, limit = numpy(z).astype("float64"), LIMITS[dtype]
    assert z.shape == (1, 16)
    np.testing.assert_allclose(numpy(log_det), expected, rtol=limit, atol=limit)
    log_normal = -0.5 * (z**2 + np.log(2 * np.pi)).sum(1)
    np.testing.assert_allclose(found, log_normal + expected, rtol=limit)
    np.testing.assert_allclose(back, x, atol=limit)
    np.testing.assert_allclose(again, z, rtol=10 * limit, atol=10 * limit)


def test_places_of_norms():
    kinds = (steps.FlowBatchNormalization, steps.FlowLayerNormalization)
    cases = {("bn", True): [4, 0], ("layer", True): [0, 4], ("layer", False): [0, 0]}
    cases["cbn", True] = [0, 0]  # in the networks alone
    for (norm, between), expected in cases.items():
        made = RealNVP((4, 4, 1), norm, between, **SMALL).steps
        assert [sum(isinstance(s, kind) for s in made) for kind in kinds] == expected
    with pytest.raises(ValueError, match="`image_shape` must have a height"):
        RealNVP((6, 6, 1), "bn", True, **SMALL | {"scales": 3})
