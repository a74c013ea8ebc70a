"""prune: channels that do nothing go, the function stays, and the report is true."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, FusedCBN, convert, prune
from tests.support import planted
from tests.support import surgery_models as m
from tests.support.backend import numpy, tensorflow_only, thorough_on

pytestmark = thorough_on("jax")
thorough = pytest.mark.thorough


def chain(padding="same", activation="relu"):
    """Two convolutions and a Dense layer after Flatten."""
    inputs = keras.Input((6, 6, 3), name="image")
    x = m.conv(inputs, 6, "one", activation=activation, padding=padding)
    x = m.conv(x, 5, "two", padding=padding)
    x = layers.Flatten(name="flatten")(x)
    return planted.settled(inputs, layers.Dense(3, name="head")(x))


PLANTED = {"one": [0, 4, 5], "two": [1, 3]}


def plant(model):
    """Two dead channels and one twin in `one`, one of each in `two`."""
    planted.kill(model.get_layer("one_bn"), [0, 4], -0.7)
    planted.kill(model.get_layer("two_bn"), [3], -0.2)
    planted.twin(planted.layers_of(model, "one", "one_bn"), source=2, copy=5)
    planted.twin(planted.layers_of(model, "two", "two_bn"), source=0, copy=1)
    return model


def test_what_was_planted_goes_and_nothing_else(tmp_path):
    model, data = plant(chain()), m.images(16, 6, 6, 3, seed=3)
    model.compile("sgd", "mse", run_eagerly=True)
    before = m.snapshot(model)
    pruned = planted.check(model)
    m.assert_unchanged(before, model)
    assert planted.removed(pruned) == PLANTED
    new = pruned.model
    assert m.names(new) == m.names(model)
    assert new.compiled and new.name == model.name
    assert not new.get_layer("one").use_bias  # the norm takes constants
    new.save(tmp_path / "pruned.keras")
    loaded = keras.saving.load_model(tmp_path / "pruned.keras")
    m.assert_same_outputs(loaded, new, data, 1e-6)
    assert loaded.compiled
    assert np.isfinite(new.train_on_batch(data, np.zeros((16, 3))))


@tensorflow_only
@pytest.mark.parametrize("name", m.some_later(m.MODELS, set(m.MODELS) - {"residual"}))
def test_float64_shows_that_the_algebra_is_exact(name):
    with planted.float64():
        model = planted.draw_kernels(m.MODELS[name]())
        for layer in m.of_class(model, layers.BatchNormalization):
            if layer.scale and layer.center:
                planted.kill(layer, [0], -0.5)
                planted.kill(layer, [1, 2], 0.4)
        for options in ({}, {"similarity": None}, {"gamma": None}):
            pruned = planted.check(model, 1e-12, **options)
        assert pruned.share > 0


def test_constants_at_the_border_are_exact():
    """One of three constants stays, for zero padding does not have their sum."""
    model = chain()
    planted.kill(model.get_layer("one_bn"), [0, 3, 4], 0.8)
    planted.put(model.get_layer("one_bn").beta, 3, 1.7)
    x = m.batch_for(model, 16)
    pruned = planted.check(model)
    assert len(pruned.removed["one"]) == 2 and set(pruned.removed["one"]) < {0, 3, 4}
    # Without merging they all stay; without padding they all go.
    assert "one" not in prune(model, x, similarity=None).removed
    model = chain(padding="valid")
    planted.kill(model.get_layer("one_bn"), [0, 3, 4], 0.8)
    pruned = planted.check(model, similarity=None)
    assert planted.removed(pruned)["one"] == [0, 3, 4]


@pytest.mark.parametrize(
    "cls, options, size",
    [
        (layers.Conv2D, {"kernel_size": 5}, 9),
        (layers.SeparableConv2D, {"kernel_size": 3, "strides": 2}, 7),
        pytest.param(
            layers.Conv2D, {"kernel_size": 4, "strides": 2}, 8, marks=thorough
        ),
        pytest.param(
            layers.Conv2D, {"kernel_size": 3, "dilation_rate": 2}, 7, marks=thorough
        ),
    ],
)
def test_a_constant_in_a_bias_is_exact_away_from_the_border(cls, options, size):
    """It goes where `gamma` allows its error there, of each tap that reads padding."""
    inputs = keras.Input((size, size, 2), name="image")
    x = m.conv(inputs, 4, "one", activation=None)
    model = planted.settled(inputs, cls(3, padding="same", **options)(x))
    planted.kill(model.get_layer("one_bn"), [1], 0.5)
    # Ones convolved with ones: what is missing was padding.
    ones = layers.Conv2D(1, padding="same", kernel_initializer="ones", **options)
    counts = numpy(ones(np.ones((1, size, size, 1), "float32")))
    enough = 0.5 * np.sqrt(options["kernel_size"] ** 2 / counts.mean() - 1)
    data = m.batch_for(model, 16)
    assert prune(model, data, enough * 0.999, None).removed == {}
    pruned = prune(model, data, enough * 1.001, None)
    assert planted.removed(pruned) == {"one": [1]}
    old, new = (numpy(net(data)) for net in (model, pruned.model))
    inside = slice(1, -1) if "strides" in options else slice(2, -2)
    inside = (slice(None), inside, inside)
    np.testing.assert_allclose(new[inside], old[inside], atol=1e-5)
    assert np.max(np.abs(new - old)) > 1e-2


@pytest.mark.parametrize(
    "activation, factor, shift", [("relu", 2.0, 0.0), (None, -2.0, 1.5)]
)
def test_a_multiple_of_another_channel(activation, factor, shift):
    """relu(2 z) = 2 relu(z), and without an activation a shift as well."""
    model = chain(activation=activation, padding="valid")
    one = planted.layers_of(model, "one", "one_bn")
    planted.twin(one, source=2, copy=5)
    for weight, add in ((one[1].gamma, 0), (one[1].beta, shift)):
        planted.put(weight, 5, factor * numpy(weight)[2] + add)
    pruned = planted.check(model, gamma=None)
    assert planted.removed(pruned)["one"] in ([2], [5])


def test_a_layer_keeps_one_channel():
    model = chain()
    planted.kill(model.get_layer("one_bn"), list(range(6)), -1)
    pruned = planted.check(model)
    assert pruned.model.get_layer("one").filters == 1


@pytest.mark.parametrize(
    "norm", m.some_later(["cbn", "noisy_bn", "lp_norm", "fused"], ["cbn", "noisy_bn"])
)
def test_norms_of_this_package(norm):
    fused = norm == "fused"
    model = plant(chain(padding="valid" if fused or norm == "cbn" else "same"))
    # Nothing is trained: statistics may be unknown.
    model = m.quiet(convert, model, "cbn" if fused else norm, fused=fused)
    assert bool(m.of_class(model, FusedCBN)) == fused
    pruned = planted.check(model)
    assert not m.of_class(pruned.model, FusedCBN)
    assert bool(m.of_class(pruned.model, CBN)) == (fused or norm == "cbn")
    assert {0, 4} <= set(pruned.removed["one"]) and 3 in pruned.removed["two"]
    assert pruned.channels[1] <= 9  # with the twins


# Tolerances, and the report


@pytest.mark.parametrize("gamma, similarity", [(0.4, None), (None, 0.6), (0.3, 0.6)])
def test_nothing_goes_beyond_the_tolerance(gamma, similarity):
    model = chain(padding="valid")
    for name in ("one", "two"):  # channels that correlate by about 0.9
        kernel = model.get_layer(name).kernel
        array = numpy(kernel)
        planted.put(kernel, (..., 3), array[..., 3] + 2 * array[..., 2])
    x = m.batch_for(model, 16)
    pruned = prune(model, x, gamma, similarity)
    assert pruned.removed
    for name, gone in pruned.removed.items():
        tensor = model.get_layer(f"{name}_act").output
        rows = planted.values_of(model, tensor, x)
        spread = planted.deviations(rows)
        if name == "two":  # read by position
            rows = rows.reshape(16, -1, rows.shape[-1])
            rows = (rows - rows.mean(0)).reshape(-1, rows.shape[-1])
            spread = planted.deviations(rows)
        kept = np.setdiff1d(np.arange(rows.shape[-1]), gone)
        for channel in gone:
            is_constant = gamma is not None and spread[channel] <= gamma * (1 + 1e-6)
            alike = np.max(np.abs(np.corrcoef(rows.T)[channel, kept]))
            rest = spread[channel] * np.sqrt(1 - alike**2)
            is_alike = similarity is not None and (
                alike >= similarity - 1e-6 or rest <= (gamma or 0) * (1 + 1e-6)
            )
            assert is_constant or is_alike
        if similarity is None:  # and all that could go as constants went
            assert np.all(spread[kept] > gamma * (1 - 1e-6))


@pytest.mark.parametrize(
    "name", m.some_later(["residual", "nested", "shared"], ["residual", "shared"])
)
def test_the_report_is_true(name):
    model = planted.draw_kernels(m.MODELS[name]())
    x = m.batch_for(model, 16)
    pruned = prune(model, x, gamma=0.5, similarity=0.7)
    assert 0 < pruned.share < 1
    old, new = (m.outputs(net, x) for net in (model, pruned.model))
    error = np.linalg.norm(new - old) / np.linalg.norm(old)
    assert pruned.error == pytest.approx(error, rel=1e-3)
    largest = np.max(np.abs(new - old)) / np.max(np.abs(old))
    assert pruned.largest == pytest.approx(largest, rel=1e-3)
    assert pruned.parameters == (model.count_params(), pruned.model.count_params())
    made = [
        sum(
            layer.units if isinstance(layer, layers.Dense) else layer.filters
            for layer in m.of_class(net, layers.Dense | layers.Conv2D)
        )
        for net in (model, pruned.model)
    ]
    assert pruned.channels == tuple(made)
    assert made[0] - made[1] == sum(len(gone) for gone in pruned.removed.values())
    assert f"{pruned.error:.1e}" in str(pruned)


def test_multiply_accumulates():
    """Each output of a layer is a sum over its kernel."""
    inputs = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(4, 3, 2, padding="same", activation="relu")(inputs)
    x = layers.DepthwiseConv2D(3)(x)
    x = layers.SeparableConv2D(6, 2, depth_multiplier=2)(x)
    x = layers.Conv2DTranspose(2, 2, 2)(x)
    block = keras.Sequential([keras.Input((8,)), layers.Dense(5), layers.Dense(8)])
    x = block(block(layers.Flatten()(layers.Cropping2D()(x))))
    pruned = prune(keras.Model(inputs, x), m.images(4, 8, 8, 3))
    conv, depthwise = 16 * 9 * 3 * 4, 4 * 9 * 4
    separable = 1 * (4 * 4 * 2 + 8 * 6)
    transposed = 1 * 2 * 2 * 6 * 2
    dense = 2 * (8 * 5 + 5 * 8)
    assert pruned.macs[0] == conv + depthwise + separable + transposed + dense


def test_sizes_that_are_known_only_at_run_time():
    inputs = keras.Input((None, None, 3), name="image")
    x = m.conv(m.conv(inputs, 4, "one"), 4, "two")
    x = layers.Dense(2)(layers.GlobalAveragePooling2D()(x))
    model = m.randomize(keras.Model(inputs, x))
    planted.kill(model.get_layer("one_bn"), [1], -1)
    pruned = prune(model, m.images(16, 7, 9, 3))
    assert 1 in pruned.removed["one"] and pruned.macs is None
    m.assert_same_outputs(pruned.model, model, m.images(2, 6, 5, 3))


# Errors


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"gamma": -0.1}, "`gamma` must be a number, non-negative"),
        ({"gamma": float("nan")}, "`gamma` must be a number, non-negative"),
        ({"gamma": "small"}, "`gamma` must be a number"),
        ({"gamma": True}, "`gamma` must be a number"),
        ({"similarity": 0}, "`similarity` must be a number, positive"),
        ({"similarity": 1.1}, "`similarity` must be a number, positive and at most 1"),
        ({"gamma": None, "similarity": None}, "must not both be None"),
        ({"steps": 0}, "`steps` must be an integer, positive"),
        ({"batch_size": 2.5}, "`batch_size` must be an integer, positive"),
        ({"data": None}, "`data` must be an array"),
        ({"data": []}, "`data` must be an array.*not be empty"),
        ({"data": iter([])}, "`data` must be an array.*not be empty"),
        ({"model": "model"}, "Functional or Sequential"),
        ({"model": keras.Sequential([layers.Dense(2)])}, "must be built"),
    ],
)
def test_bad_arguments(arguments, message):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(2)])
    with pytest.raises(ValueError, match=message):
        prune(**{"model": model, "data": m.images(6, 3), **arguments})


@pytest.mark.parametrize(
    "steps",
    [[layers.Dense(4)], [layers.Dense(4), layers.Softmax(), layers.Dense(2)]],
)
def test_models_without_a_channel_that_could_go(steps):
    model = keras.Sequential([keras.Input((3,)), *steps])
    with pytest.raises(ValueError, match="must have a channel that could go"):
        prune(model, m.images(2, 3))


def test_subclassed_models_without_a_call():
    class Subclassed(keras.Model):
        pass

    with pytest.raises(ValueError, match="subclassed model cannot be seen"):
        prune(Subclassed(), m.images(2, 3))
