"""prune: channels that do nothing go, through every layer, and the function stays."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, FusedCBN, convert, prune
from tests.support import planted
from tests.support import surgery_models as m


def chain(padding="same", activation="relu"):
    """Two convolutions and a Dense layer after Flatten."""
    inputs = keras.Input((6, 6, 3), name="image")
    x = m.conv(inputs, 6, "one", activation=activation, padding=padding)
    x = m.conv(x, 5, "two", padding=padding)
    x = layers.Flatten(name="flatten")(x)
    return planted.settled(inputs, layers.Dense(3, name="head")(x))


def plant(model):
    """Two dead channels and one twin in `one`, one of each in `two`."""
    planted.kill(model.get_layer("one_bn"), [0, 4], -0.7)
    planted.kill(model.get_layer("two_bn"), [3], -0.2)
    planted.twin(planted.layers_of(model, "one", "one_bn"), source=2, copy=5)
    planted.twin(planted.layers_of(model, "two", "two_bn"), source=0, copy=1)
    return model


def test_what_was_planted_goes_and_nothing_else():
    model = plant(chain())
    model.compile("sgd", "mse")
    before = m.snapshot(model)
    pruned = prune(model, m.batch_for(model, 16))
    m.assert_unchanged(before, model)
    planted.assert_exact(pruned, model)
    assert planted.removed(pruned) == {"one": [0, 4, 5], "two": [1, 3]}
    assert m.names(pruned.model) == m.names(model)
    assert pruned.model.compiled and pruned.model.name == model.name
    assert not pruned.model.get_layer("one").use_bias  # the norm takes constants


@planted.in_float64
@pytest.mark.parametrize("name", m.MODELS)
def test_float64_shows_that_the_algebra_is_exact(name):
    with planted.float64():
        model = planted.draw_kernels(m.MODELS[name]())
        for layer in m.of_class(model, layers.BatchNormalization):
            if layer.scale and layer.center:
                planted.kill(layer, [0], -0.5)
                planted.kill(layer, [1, 2], 0.4)
        x = m.batch_for(model, 16)
        for gamma, similarity in ((0.0, 1.0), (0.0, None), (None, 1.0)):
            pruned = prune(model, x, gamma, similarity)
            planted.assert_exact(pruned, model, tolerance=1e-12)
        assert pruned.share > 0


def test_constants_at_the_border_are_exact():
    """One of three constants stays, for zero padding does not have their sum."""
    model = chain()
    planted.kill(model.get_layer("one_bn"), [0, 3, 4], 0.8)
    planted.edit(model.get_layer("one_bn").beta, lambda a: a.__setitem__(3, 1.7))
    x = m.batch_for(model, 16)
    pruned = prune(model, x)
    planted.assert_exact(pruned, model)
    assert len(pruned.removed["one"]) == 2 and set(pruned.removed["one"]) < {0, 3, 4}
    # Without merging they all stay; without padding they all go.
    assert "one" not in prune(model, x, similarity=None).removed
    model = chain(padding="valid")
    planted.kill(model.get_layer("one_bn"), [0, 3, 4], 0.8)
    pruned = prune(model, m.batch_for(model, 16), similarity=None)
    planted.assert_exact(pruned, model)
    assert planted.removed(pruned)["one"] == [0, 3, 4]


def test_a_constant_in_a_bias_is_exact_away_from_the_border():
    inputs = keras.Input((9, 9, 2), name="image")
    x = m.conv(inputs, 4, "one")
    x = layers.Conv2D(3, 5, padding="same", name="two")(x)
    model = planted.settled(inputs, x)
    planted.kill(model.get_layer("one_bn"), [2], 0.3)
    planted.edit(model.get_layer("one_bn").beta, lambda a: np.abs(a, out=a))
    data = m.batch_for(model, 16)
    # 5x5 taps at 9x9 positions, 2 pixels of padding: (45 / (45 - 6))^2 - 1 = 0.331
    enough = 0.3 * np.sqrt((45 / 39) ** 2 - 1)
    assert prune(model, data, enough * 0.999, None).removed == {}
    pruned = prune(model, data, enough * 1.001, None)
    assert planted.removed(pruned) == {"one": [2]}
    old, new = (m.numpy(net(data)) for net in (model, pruned.model))
    np.testing.assert_allclose(new[:, 2:-2, 2:-2], old[:, 2:-2, 2:-2], atol=1e-5)
    assert np.max(np.abs(new - old)) > 1e-2
    assert pruned.largest == pytest.approx(
        np.max(np.abs(new - old)) / np.max(np.abs(old)), rel=1e-4
    )


@pytest.mark.parametrize(
    "layer, taps, size",
    [
        (lambda: layers.Conv2D(3, 3, padding="same"), 3, 8),
        (lambda: layers.Conv2D(3, 4, strides=2, padding="same"), 4, 8),
        (lambda: layers.Conv2D(3, 3, dilation_rate=2, padding="same"), 5, 7),
        (lambda: layers.SeparableConv2D(3, 3, padding="same", strides=2), 3, 7),
    ],
)
def test_how_much_padding_counts(layer, taps, size):
    """Against ones that are convolved with ones: what is not 1 was padding."""
    inputs = keras.Input((size, size, 2), name="image")
    x = m.conv(inputs, 4, "one", activation=None)
    x = layer()(x)
    model = planted.settled(inputs, x)
    planted.kill(model.get_layer("one_bn"), [1], 0.5)
    config = {
        key: model.layers[-1].get_config()[key]
        for key in ("kernel_size", "strides", "padding", "dilation_rate")
    }
    ones = layers.Conv2D(1, kernel_initializer="ones", **config)
    counts = m.numpy(ones(np.ones((1, size, size, 1), "float32")))
    taps = np.prod(config["kernel_size"])
    enough = 0.5 * np.sqrt(taps / counts.mean() - 1)
    data = m.batch_for(model, 16)
    assert prune(model, data, enough * 0.999, None).removed == {}
    assert planted.removed(prune(model, data, enough * 1.001, None)) == {"one": [1]}


def test_a_multiple_of_another_channel():
    """relu(2 z) = 2 relu(z), and without an activation a shift as well."""
    for activation, beta in (("relu", 0.0), (None, 1.5)):
        model = chain(activation=activation, padding="valid")
        one = planted.layers_of(model, "one", "one_bn")
        planted.twin(one, source=2, copy=5)
        factor = -2.0 if activation is None else 2.0
        for name in ("gamma", "beta"):
            weight = getattr(one[1], name)
            planted.edit(weight, lambda a, f=factor: a.__setitem__(5, f * a[2]))
        planted.edit(one[1].beta, lambda a, b=beta: a.__setitem__(5, a[5] + b))
        pruned = prune(model, m.batch_for(model, 16), gamma=None)
        planted.assert_exact(pruned, model)
        assert planted.removed(pruned)["one"] in ([2], [5])


# Through other layers


def test_residual_sums_lose_a_channel_everywhere_or_nowhere():
    model = planted.settle(m.residual())
    stream = planted.layers_of(model, "stem_bn", "a2_bn")
    planted.kill(stream[0], [1], -0.5)
    x = m.batch_for(model, 16)
    kept = prune(model, x).removed
    assert "stem" not in kept and "a2" not in kept
    planted.kill(stream[1], [1], -0.25)
    pruned = prune(model, x)
    planted.assert_exact(pruned, model)
    # No nonlinearity follows a2_bn before the sum, which is dead all the same.
    assert 1 in pruned.removed["stem"] and 1 in pruned.removed["a2"]
    assert list(pruned.removed["stem"]) == list(pruned.removed["a2"])


def test_concatenation():
    """Channels of two branches that are the same merge."""
    inputs = keras.Input((6, 6, 3), name="image")
    a, b = (m.conv(inputs, 4, name, size=1) for name in "ab")
    x = layers.Concatenate(name="both")([a, b])
    x = layers.Concatenate(axis=1, name="above")([x, layers.ReLU()(x)])
    x = m.conv(x, 3, "c")
    x = layers.GlobalMaxPooling2D()(x)
    model = planted.settled(inputs, layers.Dense(2, name="head")(x))
    for old, new in zip(*(planted.layers_of(model, n, f"{n}_bn") for n in "ab")):
        for source, target in zip(old.weights, new.weights):
            array = m.numpy(source)
            planted.edit(target, lambda v, a=array: v.__setitem__((..., 3), a[..., 0]))
    planted.kill(model.get_layer("a_bn"), [2], -1)
    pruned = prune(model, m.batch_for(model, 16))
    planted.assert_exact(pruned, model)
    gone = planted.removed(pruned)
    assert 2 in gone["a"] and (0 in gone["a"]) != (3 in gone.get("b", []))


def test_products_and_shapes():
    """Squeeze and excitation: the gate of a channel that goes goes too."""
    inputs = keras.Input((6, 6, 3), name="image")
    x = m.conv(inputs, 6, "one", activation="hard_silu")
    gate = layers.GlobalAveragePooling2D(name="squeeze")(x)
    gate = layers.Reshape((1, 1, 6), name="as_image")(gate)
    gate = layers.Conv2D(3, 1, activation="relu", name="down")(gate)
    gate = layers.Conv2D(6, 1, activation="hard_sigmoid", name="up")(gate)
    x = layers.Multiply(name="excite")([x, gate]) * 2.0 + 0.0
    x = layers.Permute((3, 1, 2), name="first")(x)
    x = layers.Permute((2, 3, 1), name="last")(x)
    x = layers.Conv2D(4, 3, name="two")(layers.UpSampling2D()(x))
    x = layers.Reshape((-1, 4), name="flat")(x)
    x = layers.Dense(3, activation="tanh", name="three")(x)
    x = layers.Dense(2, name="head")(layers.GlobalAveragePooling1D()(x))
    model = planted.settled(inputs, x)
    planted.kill(model.get_layer("one_bn"), [1, 5], 0)
    planted.edit(model.get_layer("two").kernel, lambda a: a[..., 2].fill(0))
    pruned = prune(model, m.batch_for(model, 16))
    planted.assert_exact(pruned, model)
    gone = planted.removed(pruned)
    assert {1, 5} <= set(gone["one"]) and gone["one"] == gone["up"]
    assert 2 in gone["two"]


def test_layers_that_keep_channels_apart():
    inputs = keras.Input((9, 9, 2), name="image")
    x = layers.Conv2D(6, 3, use_bias=False, name="conv")(inputs)
    x = layers.BatchNormalization(name="conv_bn")(x)
    x = layers.PReLU(shared_axes=[1, 2], name="prelu")(x)
    x = layers.ZeroPadding2D(1)(x)
    x = layers.DepthwiseConv2D(3, depth_multiplier=2, name="deep")(x)
    x = layers.LeakyReLU(name="deep_act")(x)
    x = layers.SeparableConv2D(6, 2, activation="relu", name="separable")(x)
    x = layers.AveragePooling2D(2)(layers.SpatialDropout2D(0.5)(x))
    x = layers.Conv2DTranspose(5, 3, 2, padding="same", name="up")(x)
    x = layers.BatchNormalization(name="up_bn")(x)
    x = layers.Cropping2D(1)(layers.Activation("swish")(x))
    x = layers.Dense(3, name="head")(layers.Flatten(name="flatten")(x))
    model = planted.settled(inputs, x)
    planted.kill(model.get_layer("conv_bn"), [4, 5], 0)
    planted.kill(model.get_layer("up_bn"), [3], 0.9)
    separable = model.get_layer("separable")
    planted.edit(separable.pointwise_kernel, lambda a: a[..., 3].fill(0))
    planted.edit(separable.bias, lambda a: a[3:4].fill(-1))
    pruned = prune(model, m.batch_for(model, 16))
    planted.assert_exact(pruned, model)
    gone = planted.removed(pruned)
    assert set(gone["conv"]) >= {4, 5} and 3 in gone["separable"] and 3 in gone["up"]
    channels, multiplier = pruned.model.get_layer("deep").kernel.shape[-2:]
    assert channels == 6 - len(gone["conv"]) and multiplier == 2


@pytest.mark.parametrize("dimensions", [1, 3])
def test_one_and_three_dimensions(dimensions):
    inputs = keras.Input((5,) * dimensions + (2,), name="image")
    kinds = {1: layers.Conv1D, 3: layers.Conv3D}
    x = kinds[dimensions](5, 2, use_bias=False, name="conv")(inputs)
    x = layers.BatchNormalization(name="conv_bn")(x)
    if dimensions == 1:
        x = layers.Conv1D(4, 2, padding="causal", activation="relu", name="up")(x)
    else:
        x = layers.Conv3DTranspose(4, 2, activation="relu", name="up")(x)
    x = layers.Dense(3, name="head")(layers.Flatten(name="flatten")(x))
    model = planted.settled(inputs, x)
    planted.kill(model.get_layer("conv_bn"), [4], 0)
    planted.kill(model.get_layer("conv_bn"), [1, 2], 0.7)  # one of them stays
    planted.twin(planted.layers_of(model, "conv", "conv_bn"), source=0, copy=3)
    planted.edit(model.get_layer("up").kernel, lambda a: a[..., 0].fill(0))
    pruned = prune(model, m.batch_for(model, 16))
    planted.assert_exact(pruned, model)
    assert len(pruned.removed["conv"]) == 3 and 4 in pruned.removed["conv"]


def test_shared_layers():
    model = planted.settle(m.shared())
    planted.kill(model.get_layer("stem_bn"), [3], -1)
    planted.kill(model.get_layer("second_bn"), [0], -1)
    planted.twin(planted.layers_of(model, "second", "second_bn"), source=1, copy=2)
    pruned = prune(model, m.batch_for(model, 16))
    planted.assert_exact(pruned, model)
    assert planted.removed(pruned) == {"stem": [3], "second": [0, 2]}
    assert len(pruned.model.get_layer("second")._inbound_nodes) == 2


def test_nested_models():
    model = planted.draw_kernels(m.nested())
    body = model.get_layer("body")
    planted.kill(body.get_layer("first_bn"), [0], -1)
    planted.kill(body.get_layer("block").get_layer("bn"), [2], 0.7)
    x = m.batch_for(model, 16)
    pruned = prune(model, x)
    m.assert_same_outputs(pruned.model, model, x)
    gone = planted.removed(pruned)
    assert 0 in gone["body/first"] and 2 in gone["block/conv"]
    assert pruned.model.get_layer("body").get_layer("block").input_shape[-1] < 4


def test_several_outputs():
    inputs = keras.Input((6, 6, 3), name="image")
    x = m.conv(inputs, 4, "one")
    y = m.conv(x, 4, "two")
    outputs = {"map": y, "class": layers.Dense(2)(layers.GlobalMaxPooling2D()(x))}
    model = planted.settled(inputs, outputs)
    for name in ("one", "two"):
        planted.kill(model.get_layer(f"{name}_bn"), [1], -1)
    pruned = prune(model, m.batch_for(model, 16))
    planted.assert_exact(pruned, model)
    assert planted.removed(pruned) == {"one": [1]}  # `two` is an output
    assert set(pruned.model.output) == {"map", "class"}


def test_what_mixes_channels_keeps_them():
    inputs = keras.Input((6, 6, 3), name="image")
    x = m.conv(inputs, 4, "grouped", groups=1)
    x = layers.Conv2D(4, 1, groups=2, name="groups")(x)
    x = m.conv(x, 4, "before_layer_norm", activation=None)
    x = layers.LayerNormalization(name="layer_norm")(x)
    x = layers.Conv2D(4, 1, activation="softmax", name="softmax")(x)
    x = layers.Conv2D(4, 1, name="free")(x)
    x = layers.TimeDistributed(layers.Conv1D(2, 1), name="wrapped")(layers.ReLU()(x))
    x = layers.Dense(4, name="hidden")(layers.Flatten()(x))
    model = planted.settled(inputs, layers.Dense(2, name="head")(x))
    for layer in model.layers:
        for weight in layer.weights:
            if weight.name in ("kernel", "gamma", "bias"):
                planted.edit(weight, lambda a: a[..., 1].fill(0))
    pruned = prune(model, m.batch_for(model, 16), similarity=None)
    planted.assert_exact(pruned, model)
    assert planted.removed(pruned) == {"hidden": [1]}


def test_a_layer_keeps_one_channel():
    model = chain()
    planted.kill(model.get_layer("one_bn"), list(range(6)), -1)
    pruned = prune(model, m.batch_for(model, 16))
    planted.assert_exact(pruned, model)
    assert pruned.model.get_layer("one").filters == 1


# Norms


@pytest.mark.parametrize("norm", ["cbn", "noisy_bn", "lp_norm"])
def test_norms_of_this_package(norm):
    model = plant(chain(padding="valid" if norm == "cbn" else "same"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is trained: statistics may be unknown
        model = convert(model, norm)
    pruned = prune(model, m.batch_for(model, 16))
    planted.assert_exact(pruned, model)
    assert {0, 4} <= set(pruned.removed["one"]) and 3 in pruned.removed["two"]
    assert pruned.channels[1] <= 9  # with the twins


def test_fused_cbn_comes_apart():
    model = plant(chain(padding="valid"))
    x = m.batch_for(model, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = convert(model, "cbn", fused=True)
    assert m.of_class(fused, FusedCBN)
    pruned = prune(fused, x)
    m.assert_same_outputs(pruned.model, fused, x)
    assert m.of_class(pruned.model, CBN) and not m.of_class(pruned.model, FusedCBN)
    assert pruned.channels[1] <= 9


# Tolerances, and the report


@pytest.mark.parametrize("gamma, similarity", [(0.4, None), (None, 0.6), (0.3, 0.6)])
def test_nothing_goes_beyond_the_tolerance(gamma, similarity):
    model = chain(padding="valid")
    for name in ("one", "two"):  # channels that correlate by about 0.9
        kernel = model.get_layer(name).kernel
        planted.edit(kernel, lambda a: a[..., 3].__iadd__(2 * a[..., 2]))
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
        if gamma is not None:  # and all that could go as constants went
            others = np.setdiff1d(np.arange(rows.shape[-1]), gone)
            if similarity is None:
                assert np.all(spread[others] > gamma * (1 - 1e-6))


@pytest.mark.parametrize("name", ["residual", "nested", "shared"])
def test_the_report_is_true(name):
    model = planted.draw_kernels(m.MODELS[name]())
    x = m.batch_for(model, 16)
    pruned = prune(model, x, gamma=0.5, similarity=0.7)
    assert 0 < pruned.share < 1
    old, new = (m.outputs(net, x).astype("float64") for net in (model, pruned.model))
    assert pruned.error == pytest.approx(
        np.linalg.norm(new - old) / np.linalg.norm(old), rel=1e-3
    )
    largest = np.max(np.abs(new - old)) / np.max(np.abs(old))
    assert pruned.largest == pytest.approx(largest, rel=1e-3)
    assert pruned.parameters == (model.count_params(), pruned.model.count_params())
    made = [
        sum(
            layer.units if isinstance(layer, layers.Dense) else layer.filters
            for layer in net._flatten_layers()
            if isinstance(layer, layers.Dense | layers.Conv2D)
        )
        for net in (model, pruned.model)
    ]
    assert pruned.channels == tuple(made)
    assert pruned.channels[0] - pruned.channels[1] == sum(
        len(gone) for gone in pruned.removed.values()
    )
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
    assert pruned.macs is not None
    dense = 2 * (8 * 5 + 5 * 8)
    assert pruned.macs[0] == conv + depthwise + separable + transposed + dense


def test_saved_and_trained(tmp_path):
    model = plant(chain())
    model.compile("sgd", "mse")
    x = m.batch_for(model, 16)
    pruned = prune(model, x, gamma=0.3, similarity=0.9).model
    path = tmp_path / "pruned.keras"
    pruned.save(path)
    loaded = keras.saving.load_model(path)
    m.assert_same_outputs(loaded, pruned, x, 1e-6)
    assert loaded.compiled
    assert np.isfinite(loaded.train_on_batch(x, np.zeros((16, 3))))


def test_sizes_that_are_known_only_at_run_time():
    inputs = keras.Input((None, None, 3), name="image")
    x = m.conv(m.conv(inputs, 4, "one"), 4, "two")
    x = layers.Dense(2)(layers.GlobalAveragePooling2D()(x))
    model = m.randomize(keras.Model(inputs, x))
    planted.kill(model.get_layer("one_bn"), [1], -1)
    pruned = prune(model, m.images(16, 7, 9, 3))
    assert 1 in pruned.removed["one"] and pruned.macs is None
    m.assert_same_outputs(pruned.model, model, m.images(2, 6, 5, 3))


@pytest.mark.parametrize("kind", ["pair", "batches", "dataset", "steps"])
def test_kinds_of_data(kind):
    model = plant(chain())
    x = m.batch_for(model, 16)
    data, arguments = x, {}
    if kind == "pair":
        data = (x, np.zeros(16))
    elif kind == "batches":
        data = [x[:5], x[5:]]
    elif kind == "dataset":

        class Batches(keras.utils.PyDataset):
            def __len__(self):
                return 2

            def __getitem__(self, i):
                return x[8 * i : 8 * i + 8], np.zeros(8)

        data = Batches()
    else:
        data, arguments = iter([x] * 100), {"steps": 2}
    pruned = prune(model, data, **arguments)
    assert planted.removed(pruned) == {"one": [0, 4, 5], "two": [1, 3]}


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
    ],
)
def test_bad_arguments(arguments, message):
    model = chain()
    arguments = {"data": m.batch_for(model), **arguments}
    with pytest.raises(ValueError, match=message):
        prune(model, **arguments)


def test_bad_models():
    class Subclassed(keras.Model):
        pass

    x = m.images(2, 6, 6, 3)
    with pytest.raises(ValueError, match="subclassed model cannot be seen"):
        prune(Subclassed(), x)
    with pytest.raises(ValueError, match="must be built"):
        prune(keras.Sequential([layers.Dense(2), layers.Dense(2)]), x)
    with pytest.raises(ValueError, match="Functional or Sequential"):
        prune("model", x)
    only = keras.Sequential([keras.Input((6, 6, 3)), layers.Conv2D(4, 3)])
    with pytest.raises(ValueError, match="must have a channel that could go"):
        prune(only, x)
    softmax = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4), layers.Softmax(), layers.Dense(2)]
    )
    with pytest.raises(ValueError, match="must have a channel that could go"):
        prune(softmax, x[:, 0, 0])
