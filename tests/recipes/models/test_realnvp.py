import keras
import numpy as np
import pytest
from keras import ops

from recipes.engine.precision import available, precision
from recipes.models import flow_steps as steps
from recipes.models.realnvp import RealNVP

BACKEND = keras.backend.backend()
LIMITS = {"float32": 1e-4, "float64": 1e-10}
SMALL = {"scales": 2, "couplings": 1, "width": 4, "blocks": 1}


def array(tensor):
    return np.array(ops.convert_to_numpy(tensor))


def dense_log_det(function, x):
    """log |det| of the Jacobian at one image `x` of what a step or flow returns.

    Every sample of a batch is that image, and its own output one of the sum that is
    differentiated: row i of the Jacobian is the gradient at sample i.
    """
    size = x.size
    batch = ops.convert_to_tensor(np.repeat(x[None], size, 0))
    own = ops.convert_to_tensor(np.eye(size, dtype=x.dtype))

    def diagonal(batch):
        y, _ = function(batch)
        return ops.sum(ops.reshape(y, (size, size)) * own)

    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(batch)
            value = diagonal(batch)
        rows = tape.gradient(value, batch)
    elif BACKEND == "jax":
        import jax

        rows = jax.grad(diagonal)(batch)
    else:
        import torch

        batch = batch.requires_grad_()
        (rows,) = torch.autograd.grad(diagonal(batch), batch)
    return np.linalg.slogdet(array(rows).reshape(size, size).astype("float64"))[1]


def disturb(model, seed=0, deviation=0.2):
    """Gives weights, which start as an identity, and statistics other values."""
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        value, noise = array(variable), rng.normal(size=variable.shape)
        if "variance" in variable.path or "moving_square" in variable.path:
            variable.assign(np.exp(0.5 * noise))
        elif variable.trainable or variable.path.endswith("moving_mean"):
            variable.assign(value + deviation * noise)


def small_network(channels):
    inputs = keras.Input((None, None, channels))
    x = keras.layers.Conv2D(4, 3, padding="same", activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Conv2D(2 * channels, 1)(x))


def step(name, shape):
    """A step of the flow whose weights are not those it starts with."""
    keras.utils.set_random_seed(3)
    mask = (steps.of_channels if "channels" in name else steps.checkerboard)(shape)
    made = {
        "logit": steps.Logit,
        "squeeze": steps.Squeeze,
        "coupling": lambda: steps.Coupling(small_network(shape[-1]), mask),
        "coupling of channels": lambda: steps.Coupling(
            small_network(shape[-1]), 1 - mask
        ),
        "bn": steps.FlowBatchNormalization,
        "layer": lambda: steps.FlowLayerNormalization(1 - mask),
        "layer of channels": lambda: steps.FlowLayerNormalization(mask),
    }[name]()
    made.build((None, *shape))
    disturb(made)
    return made


STEPS = ["logit", "squeeze", "coupling", "coupling of channels", "bn", "layer"]
STEPS += ["layer of channels"]


def images(shape, count=3, seed=0, dtype="float32"):
    return np.random.default_rng(seed).random((count, *shape)).astype(dtype)


@pytest.mark.parametrize("dtype", available())
@pytest.mark.parametrize("name", STEPS)
def test_steps_against_the_dense_jacobian(name, dtype):
    with precision(dtype):
        made = step(name, (4, 2, 2))
        x = images((4, 2, 2), count=2, dtype=dtype)
        y, log_det = made(x)
        back = array(made.inverse(y))
        expected = [dense_log_det(made, image) for image in x]
    limit = LIMITS[dtype]
    np.testing.assert_allclose(array(log_det), expected, rtol=limit, atol=limit)
    np.testing.assert_allclose(back, x, atol=limit)


def test_steps_against_numpy():
    """float64 NumPy, written from the formulas."""
    x = images((4, 2, 2))
    wide = x.astype("float64")
    p = 0.05 + 0.9 * wide
    y, _ = step("logit", (4, 2, 2))(x)
    np.testing.assert_allclose(array(y), np.log(p / (1 - p)), rtol=1e-5, atol=1e-6)

    made = step("bn", (4, 2, 2))
    mean, variance = array(made.moving_mean), array(made.moving_variance)
    y, log_det = made(x)
    expected = (wide - mean) / np.sqrt(variance + steps.EPSILON)
    np.testing.assert_allclose(array(y), expected, rtol=1e-5, atol=1e-6)
    expected = -4 * 2 * 0.5 * np.log(variance + steps.EPSILON).sum()
    np.testing.assert_allclose(array(log_det), [expected] * 3, rtol=1e-5)

    made = step("layer of channels", (4, 2, 2))  # keeps the first channel
    y, log_det = made(x)
    for image, found, change in zip(wide, array(y), array(log_det)):
        kept, other = image[..., 0], image[..., 1]
        deviation = np.sqrt(kept.var() + steps.EPSILON)
        np.testing.assert_allclose(found[..., 0], kept, rtol=1e-6)
        expected = (other - kept.mean()) / deviation
        np.testing.assert_allclose(found[..., 1], expected, rtol=1e-5, atol=1e-6)
        assert change == pytest.approx(-8 * np.log(deviation), rel=1e-5)

    made = step("coupling", (4, 2, 2))
    kept = (np.indices((4, 2, 2))[:2].sum(0) % 2 == 0).astype("float64")
    s, t = np.split(array(made.network(kept.astype("float32") * x)), 2, -1)
    s = np.tanh(s.astype("float64")) * array(made.scale) * (1 - kept)
    y, log_det = made(x)
    expected = kept * wide + (1 - kept) * (wide * np.exp(s) + t)
    np.testing.assert_allclose(array(y), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(array(log_det), s.sum((1, 2, 3)), rtol=1e-5)


def test_squeeze_takes_squares():
    x = np.arange(16, dtype="float32").reshape(1, 4, 4, 1)
    y, _ = steps.Squeeze()(x)
    np.testing.assert_array_equal(array(y)[0, 0, 1], [2, 3, 6, 7])


def test_batch_normalization_in_training():
    made = step("bn", (4, 2, 2))
    before = array(made.moving_mean), array(made.moving_variance)
    x = images((4, 2, 2), count=8)
    wide = x.astype("float64")
    mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
    y, log_det = made(x, training=True)
    np.testing.assert_allclose(array(y).mean((0, 1, 2)), 0, atol=1e-5)
    expected = -4 * np.log(variance + steps.EPSILON).sum()
    np.testing.assert_allclose(array(log_det), [expected] * 8, rtol=1e-5)
    for stored, old, new in zip(
        (made.moving_mean, made.moving_variance), before, (mean, variance)
    ):
        np.testing.assert_allclose(array(stored), 0.9 * old + 0.1 * new, rtol=1e-5)
    # The inverse is that of inference.
    assert np.abs(array(made.inverse(y)) - x).max() > 0.1


def test_layer_normalization_knows_no_batch():
    made = step("layer", (4, 2, 2))
    x = images((4, 2, 2))
    for training in (False, True):
        y, log_det = made(x, training=training)
        for i in range(3):
            alone, change = made(x[i : i + 1], training=training)
            np.testing.assert_allclose(array(alone)[0], array(y)[i], rtol=1e-6)
            assert float(change[0]) == pytest.approx(float(log_det[i]), rel=1e-6)


@pytest.mark.parametrize("norm", ["bn", "layer"])
def test_flow(norm):
    """Likelihood from the dense Jacobian; round trips from images and from z."""
    for dtype in available():
        with precision(dtype):
            keras.utils.set_random_seed(0)
            model = RealNVP((4, 4, 1), norm, **SMALL)
            disturb(model)
            x = images((4, 4, 1), count=1, dtype=dtype)
            z, log_det = model.transform(x)
            found = array(model(x))
            back = array(model.inverse(z))
            again = array(model.transform(back)[0])
            expected = [dense_log_det(model.transform, image) for image in x]
        z, limit = array(z).astype("float64"), LIMITS[dtype]
        assert z.shape == (1, 16)
        np.testing.assert_allclose(array(log_det), expected, rtol=limit, atol=limit)
        log_normal = -0.5 * (z**2 + np.log(2 * np.pi)).sum(1)
        np.testing.assert_allclose(found, log_normal + expected, rtol=limit)
        np.testing.assert_allclose(back, x, atol=limit)
        np.testing.assert_allclose(again, z, rtol=10 * limit, atol=10 * limit)


def test_likelihood_is_a_density():
    """Its integral over images is the share of z that become images."""
    keras.utils.set_random_seed(0)
    model = RealNVP((2, 1, 1), "bn", scales=1, couplings=1, width=4, blocks=1)
    disturb(model, seed=1, deviation=0.4)
    grid = (np.arange(100) + 0.5) / 100
    x = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2, 1, 1).astype("float32")
    integral = np.exp(array(model(x)).astype("float64")).mean()
    z = np.random.default_rng(0).normal(size=(20_000, 2)).astype("float32")
    inside = array(model.inverse(z)).reshape(-1, 2)
    share = ((inside > 0) & (inside < 1)).all(1).mean()
    assert 0.1 < share < 1
    assert integral == pytest.approx(share, abs=0.015)  # 4 deviations of `share`


def test_places_of_norms():
    def between(**arguments):
        model = RealNVP((4, 4, 1), **SMALL, **arguments)
        kinds = (steps.FlowBatchNormalization, steps.FlowLayerNormalization)
        return [sum(isinstance(s, kind) for s in model.steps) for kind in kinds]

    assert between(norm="bn") == [4, 0]
    assert between(norm="layer") == [0, 4]
    assert between(norm="layer", between=False) == [0, 0]
    assert between(norm="cbn") == [0, 0]  # in the networks alone


def test_bad_arguments():
    with pytest.raises(ValueError, match="`image_shape` must have a height"):
        RealNVP((6, 6, 1), scales=3)
    with pytest.raises(ValueError, match="`couplings` must be at least 1"):
        RealNVP((4, 4, 1), couplings=0)
    with pytest.raises(ValueError, match="`norm` must be one of"):
        RealNVP((4, 4, 1), norm="batch")
