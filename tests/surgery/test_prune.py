"""prune: channels that do nothing go, the function stays, and the report is true."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CBN, FusedCBN, convert, prune
from tests.support import planted
from tests.support import surgery_models as m
from tests.support.backend import (
    has_channels_first,
    numpy,
    precision,
    some,
    tensorflow_only,
    thorough_on,
)
from tests.support.surgery_models import apply

pytestmark = thorough_on("jax")


def chain(padding="same", activation="relu"):
    """Two convolutions and a Dense layer after Flatten."""
    one = m.conv(6, "one", activation=activation, padding=padding)
    two = m.conv(5, "two", padding=padding)
    return planted.settle(m.model_of((6, 6, 3), one, two, layers.Flatten(), m.dense(3)))


PLANTED = {"one": [0, 4, 5], "two": [1, 3]}


def plant(model):
    """Two dead channels and one twin in `one`, one of each in `two`."""
    planted.kill(model.get_layer("one_bn"), [0, 4], -0.7)
    planted.kill(model.get_layer("two_bn"), [3], -0.2)
    planted.twin(planted.layers_of(model, "one", "one_bn"), source=2, copy=5)
    planted.twin(planted.layers_of(model, "two", "two_bn"), source=0, copy=1)
    return model


def test_what_was_planted_goes_and_nothing_else(tmp_path):
    model = plant(chain())
    model.compile("sgd", "mse")
    before = m.snapshot(model)
    pruned = planted.check(model)
    assert m.snapshot(model) == before
    assert planted.removed(pruned) == PLANTED
    new = pruned.model
    assert new.compiled and m.names(new) == m.names(model)
    assert not new.get_layer("one").use_bias  # the norm takes constants
    new.save(tmp_path / "pruned.keras")
    loaded = keras.saving.load_model(tmp_path / "pruned.keras")
    m.assert_same_outputs(loaded, new, m.images(16, 6, 6, 3), 1e-6)


def test_the_cheapest_of_the_whole_network_go():
    """By the share of what the layer behind makes, as constants, in float64."""
    steps = m.dense(5, "relu", name="one"), m.dense(6, "relu", name="two")
    model = m.model_of((4,), *steps, m.dense(2, name="head"))
    x, costs = m.images(64, 4), []
    one, two, head = planted.layers_of(model, "one", "two", "head")
    made = x.astype("float64")
    for first, second in ((one, two), (two, head)):
        kernel, bias = (numpy(w).astype("float64") for w in first.weights)
        made = np.maximum(made @ kernel + bias, 0)
        cost = made.var(0) * np.square(numpy(second.kernel).astype("float64")).sum(1)
        costs.append(cost / np.sum(cost))
    cheapest = np.argsort(np.concatenate(costs), kind="stable")
    for count in 1, 4:
        pruned = prune(model, x, similarity=None, ratio=(count + 0.5) / 13)
        expected = np.sort(cheapest[:count])
        found = planted.removed(pruned)
        assert found.get("one", []) == expected[expected < 5].tolist()
        assert found.get("two", []) == (expected[expected >= 5] - 5).tolist()
        assert pruned.channels == (13, 13 - count)


def test_what_a_channel_costs_all_layers_that_read_it():
    """By their answers to one impulse in each channel, as shares, which add up."""
    dense, tanh = layers.Dense(6, name="one"), layers.Activation("tanh")
    readers = (
        layers.SeparableConv1D(3, 2, depth_multiplier=2, use_bias=False),
        layers.Dense(2, use_bias=False),
    )
    model = m.model_of((3, 4), dense, tanh, m.branches(list, *readers))
    m.randomize(model, 1)  # The largest share, or no shares, would have another order.
    x, impulses, costs = m.images(64, 3, 4), np.zeros((6, 3, 6), "float32"), 0
    impulses[:, 1] = np.eye(6)
    for reader in readers:
        answers = np.square(numpy(reader(impulses))).sum((1, 2))
        cost = answers * numpy(tanh(dense(x))).var((0, 1))
        costs += cost / np.sum(cost)
    for count in range(1, 5):
        pruned = prune(model, x, similarity=None, ratio=(count + 0.5) / 11)
        expected = np.sort(np.argsort(costs)[:count])
        assert planted.removed(pruned) == {"one": expected.tolist()}


def test_a_share_of_all_channels():
    """What is free goes first; sums and other layers keep whole blocks."""
    model, x = plant(chain()), m.images(16, 6, 6, 3, seed=3)
    assert planted.removed(planted.check(model, ratio=5 / 14)) == PLANTED
    # Each has 3 left, then 4; two more may go.
    pruned = prune(model, x, ratio=5 / 14, round_to=2)
    sizes = [pruned.model.get_layer(name).filters for name in ("one", "two")]
    assert sizes in ([4, 2], [2, 4]) and pruned.channels == (14, 9)
    with pytest.raises(ValueError, match="`ratio` must be None if.*gamma=0.1"):
        prune(model, x, gamma=0.1, ratio=0.5)


@tensorflow_only
# Of `kinds` nothing can go without an error; test_convolutions_of_all_kinds has them.
@pytest.mark.parametrize(
    "name", some(["residual", "nested", "shared", "sequential"], ["residual"])
)
def test_float64_shows_that_the_algebra_is_exact(name):
    with precision("float64"):
        model = m.MODELS[name]()
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
    # One always stays.
    planted.kill(model.get_layer("one_bn"), list(range(6)), -1)
    assert planted.check(model).model.get_layer("one").filters == 1


def test_a_constant_in_a_bias_is_exact_away_from_the_border():
    """It goes where `gamma` allows its error there, of each tap that reads padding."""
    strided = {"kernel_size": 3, "strides": 2, "padding": "same"}
    steps = m.conv(4, "one", activation=None), layers.SeparableConv2D(3, **strided)
    model = planted.settle(m.model_of((7, 7, 2), *steps))
    planted.kill(model.get_layer("one_bn"), [1], 0.5)
    # Ones convolved with ones: what is missing was padding.
    ones = layers.Conv2D(1, kernel_initializer="ones", **strided)
    counts = numpy(ones(np.ones((1, 7, 7, 1), "float32")))
    enough = 0.5 * np.sqrt(9 / counts.mean() - 1)
    data = m.batch_for(model, 16)
    assert prune(model, data, gamma=enough * 0.999, similarity=None).removed == {}
    pruned = prune(model, data, gamma=enough * 1.001, similarity=None)
    assert planted.removed(pruned) == {"one": [1]}
    changes = np.abs(numpy(pruned.model(data)) - numpy(model(data)))
    assert np.max(changes[:, 1:-1, 1:-1]) < 1e-5 < 1e-2 < np.max(changes)


def test_a_multiple_of_another_channel():
    """relu(2 z) = 2 relu(z), and without an activation a shift as well."""
    for activation, factor, shift in (("relu", 2.0, 0.0), (None, -2.0, 1.5)):
        model = chain(activation=activation, padding="valid")
        one = planted.layers_of(model, "one", "one_bn")
        planted.twin(one, source=2, copy=5)
        for weight, add in ((one[1].gamma, 0), (one[1].beta, shift)):
            planted.put(weight, 5, factor * numpy(weight)[2] + add)
        pruned = planted.check(model, gamma=None)
        assert planted.removed(pruned)["one"] in ([2], [5])


@pytest.mark.parametrize("norm", ["lp_norm", "fused"])
def test_norms_of_this_package(norm):
    fused = norm == "fused"
    model = plant(chain(padding="valid" if fused else "same"))
    # Nothing is trained: statistics may be unknown.
    model = m.quiet(convert, model, "cbn" if fused else norm, fused=fused)
    pruned = planted.check(model)
    found = [bool(m.of_class(x, FusedCBN)) for x in (model, pruned.model)]
    assert found == [fused, False] and bool(m.of_class(pruned.model, CBN)) == fused
    assert {0, 4} <= set(pruned.removed["one"]) and 3 in pruned.removed["two"]
    assert pruned.channels[1] <= 9  # with the twins


@pytest.mark.parametrize("gamma, similarity", [(0.4, None), (None, 0.6), (0.3, 0.6)])
def test_nothing_goes_beyond_the_tolerance(gamma, similarity):
    """Of channels that are read by position; by gamma alone, all go that may."""
    dense = m.dense(24, "tanh", name="one")
    model = m.model_of((3, 2), dense, layers.Flatten(), m.dense(2))
    x = m.images(64, 3, 2)
    gone = prune(model, x, gamma=gamma, similarity=similarity).removed["one"]
    rows = numpy(model.get_layer("one")(x)).astype("float64")
    rows = (rows - rows.mean(0)).reshape(-1, 24)
    kept = np.setdiff1d(np.arange(24), gone)
    alike = np.abs(np.corrcoef(rows.T))[:, kept].max(1)
    rest = rows.std(0)
    if similarity is not None:
        rest[gone] *= np.sqrt(1 - np.square(alike[gone]))
    may_go = rest <= (gamma or 0) * (1 + 1e-6)
    assert np.all(may_go[gone] | (alike[gone] >= (similarity or 2) - 1e-6))
    assert similarity or not np.any(may_go[kept])


@pytest.mark.parametrize("name", some(m.MODELS, ["residual"]))
def test_the_report_is_true(name):
    """Nothing is left of what could go exactly, and more tolerance removes more."""
    model = planted.settle(m.MODELS[name]())
    x, before = m.batch_for(model, 16), m.snapshot(model)
    exact = planted.check(model)
    assert prune(exact.model, x).share == 0
    pruned = prune(model, x, gamma=0.5, similarity=0.9)
    assert m.snapshot(model) == before
    for layer, channels in exact.removed.items():
        assert set(channels) <= set(pruned.removed[layer])
    old, new = (m.outputs(net, x) for net in (model, pruned.model))
    expected = np.linalg.norm(new - old) / np.linalg.norm(old)
    assert pruned.error == pytest.approx(expected, rel=1e-3)
    largest = np.max(np.abs(new - old)) / np.max(np.abs(old))
    assert pruned.largest == pytest.approx(largest, rel=1e-3)
    assert pruned.parameters == (model.count_params(), pruned.model.count_params())
    gone = sum(map(len, pruned.removed.values()))
    assert pruned.channels == (exact.channels[0], exact.channels[0] - gone)
    assert f"{pruned.error:.1e}" in str(pruned)


@has_channels_first
def test_a_convolution_that_reads_the_input_too_keeps_its_channels():
    same = layers.Conv2D(3, 3, padding="same", data_format="channels_first")
    inputs = keras.Input((3, 8, 8))
    x = layers.Dense(5, "relu", name="one")(
        layers.Flatten()(same(ops.relu(same(inputs))))
    )
    model = keras.Model(inputs, layers.Dense(2)(x))
    pruned = prune(model, m.images(4, 3, 8, 8), ratio=0.4)
    assert [*planted.removed(pruned)] == ["one"]


@pytest.mark.parametrize("shared", [layers.BatchNormalization, layers.PReLU])
def test_a_layer_called_twice_has_the_same_channels_in_both_calls(shared):
    one, two = layers.Dense(4, name="one"), layers.Dense(4, name="two")
    same = shared()
    heads = (m.chain(each, same, m.dense(2, "tanh")) for each in (one, two))
    model = m.model_of((6,), m.branches(list, *heads))
    x = m.images(32, 6)
    for dead, gone in (
        ({one: 0, two: 1}, {}),
        ({one: 1}, {"one": [1], "two": [1]}),
    ):
        for layer, unit in dead.items():
            kernel = numpy(layer.kernel).copy()
            kernel[:, unit] = 0
            layer.kernel.assign(kernel)
        pruned = prune(model, x, similarity=None)
        assert planted.removed(pruned) == gone and pruned.error < 1e-6


def test_a_norm_of_positions_takes_no_constants():
    for positions in (5, 3):
        first, norm = m.dense(5, "relu", name="first"), layers.BatchNormalization(1)
        steps = first, m.dense(5, use_bias=False), norm
        model = m.model_of((positions, 6), *steps)
        kernel, bias = model.get_layer("first").weights
        kernel.assign(numpy(kernel) * [0, 1, 1, 1, 1])
        bias.assign([7, 0, 0, 0, 0])
        pruned = prune(model, m.images(32, positions, 6), similarity=None)
        assert planted.removed(pruned) == {"first": [0]} and pruned.error < 1e-6


def test_multiply_accumulates():
    """Each output of a layer is a sum over its kernel."""
    block = keras.Sequential([keras.Input((8,)), layers.Dense(5), layers.Dense(8)])
    model = m.model_of(
        (8, 8, 3),
        layers.Conv2D(4, 3, 2, padding="same", activation="relu"),
        *(layers.DepthwiseConv2D(3), layers.SeparableConv2D(6, 2, depth_multiplier=2)),
        *(layers.Conv2DTranspose(2, 2, 2), layers.Cropping2D(), layers.Flatten()),
        *(block, block),
    )
    conv, depthwise, separable = 16 * 9 * 3 * 4, 4 * 9 * 4, 4 * 4 * 2 + 8 * 6
    transposed, dense = 2 * 2 * 6 * 2, 2 * (8 * 5 + 5 * 8)
    macs = conv + depthwise + separable + transposed + dense
    assert prune(model, m.images(4, 8, 8, 3)).macs[0] == macs


def test_sizes_that_are_known_only_at_run_time():
    convs = layers.Conv2D(4, 3, name="one"), m.bn, m.relu, layers.Conv2D(4, 3)
    model = m.model_of((None, None, 3), *convs, layers.GlobalAveragePooling2D())
    planted.kill(*m.of_class(model, layers.BatchNormalization), [1], -1)
    pruned = prune(model, m.images(16, 7, 9, 3))
    assert 1 in pruned.removed["one"] and pruned.macs is None
    m.assert_same_outputs(pruned.model, model, m.images(2, 6, 5, 3))


def test_bad_arguments():
    model, x = m.model_of((3,), layers.Dense(4), layers.Dense(2)), m.images(6, 3)
    with pytest.raises(ValueError, match="must not both be None"):
        prune(model, x, gamma=None, similarity=None)
    with pytest.raises(ValueError, match="`data` must be an array.*not be empty"):
        prune(model, iter([]))
    dead = m.model_of((3,), layers.Dense(4), apply(layers.Rescaling, 0.0), m.dense(2))
    dead.layers[-1].bias.assign(np.zeros(2))
    assert prune(dead, x).error == prune(dead, x).largest == 0  # of outputs that are 0
    with pytest.raises(ValueError, match="a channel that could go"):
        prune(m.model_of((3,), layers.Dense(4)), x)
    with pytest.raises(ValueError, match="`data` must give outputs that are finite"):
        prune(model, x * np.nan)
