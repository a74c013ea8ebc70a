"""convert to CBN: where it stands, and that the function stays."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, WN, convert, fold
from keras_norms.layers.channel_affine import ChannelAffine
from tests.support import surgery_models as m
from tests.support.backend import numpy, thorough_on
from tests.support.surgery_models import apply, bn, dense, quiet, relu

pytestmark = thorough_on("jax")


def readers(model, name):
    """The names of what calls on the output of a layer."""
    return [n.operation.name for n in model.get_layer(name)._outbound_nodes]


def test_cbn_stands_before_every_linear_layer_but_the_first():
    model = convert(m.residual(), "cbn", preserve=False)
    assert not m.norms_in(model)
    # The sum reads the tensor before the norm of a1; b0 and b1 share theirs.
    cbns = [f"{name}_cbn" for name in ("a1", "a2", "b1", "b2", "logits")]
    assert sorted(m.norms_in(model, CBN)) == cbns
    assert readers(model, "stem_act") == ["a1_cbn", "sum_a"]
    assert sorted(readers(model, "b1_cbn")) == ["b0", "b1_pad"]
    assert readers(model, "b1_pad") == ["b1"]
    # Not after Dropout, whose noise would be in the statistics.
    assert readers(model, "logits_cbn") == ["drop"]
    for name in ("stem", "a1", "a2", "b0", "b1", "b2"):
        assert model.get_layer(name).use_bias


def test_the_raw_input_is_not_normalised():
    inputs = keras.Input((8, 8, 3), name="image")
    x = layers.Normalization(name="standard")(layers.Rescaling(1 / 255)(inputs))
    x = layers.ZeroPadding2D()((layers.RandomFlip()(x) - 0.5) * 2.0)
    y = layers.Permute((2, 1, 3))(layers.Concatenate()([x, x]))
    normalised = layers.Dense(2, name="four")(bn(x))
    x = layers.Conv2D(3, 3, name="one")(x)
    y = layers.DepthwiseConv2D(3, name="two")(y)
    z = layers.Dense(2, name="three")(layers.Flatten()(layers.Add()([x, x])))
    model = m.randomize(keras.Model(inputs, [x, y, z, normalised]))
    model.get_layer("standard").adapt(m.images(4, 8, 8, 3))
    new = m.check_convert(model, data=m.images(4, 8, 8, 3))
    assert sorted(m.norms_in(new, CBN)) == ["four_cbn", "three_cbn"]


def test_nested_and_shared_layers():
    new = m.check_convert(m.nested())
    assert sorted(m.norms_in(new, CBN)) == ["conv_cbn", "head_cbn"]
    block = new.get_layer("body").get_layer("block")
    assert isinstance(block, keras.Sequential)
    assert m.names(block) == ["conv_cbn", "conv", "conv_act"]
    new = m.check_convert(m.shared())
    assert m.norms_in(new, CBN) == ["second_cbn", "head_cbn"]
    assert len(new.get_layer("second_cbn")._inbound_nodes) == 2


def test_padding_that_others_read_stays_before_the_norm():
    pad = layers.ZeroPadding2D(name="pad")
    read = layers.Conv2D(3, 3, name="conv"), layers.MaxPooling2D(3, 1, name="max")
    steps = layers.Conv2D(3, 3), relu, pad, m.branches(list, *read)
    new = m.check_convert(m.model_of((8, 8, 3), *steps))
    assert sorted(readers(new, "pad")) == ["conv_cbn", "max"]


def test_a_template_gives_its_configuration():
    model = m.sequential()
    template = CBN(axis=1, rho=2.0, omega=3.0, epsilon=1e-3, name="mine")
    new = m.check_convert(model, template, data=m.batch_for(model))
    for each in new, quiet(convert, model, CBN):
        assert m.norms_in(each, CBN) == ["two_cbn", "head_cbn"]
    for layer in m.of_class(new, CBN):
        config = layer.get_config()
        found = [config[name] for name in ("rho", "omega", "epsilon", "axis")]
        assert found == [2, 3, 1e-3, -1]


@pytest.mark.parametrize("decouple", [True, False])
def test_statistics_of_data_hold_in_training(decouple):
    """The first training step on the same batch sees the function it started from."""
    model, x = m.sequential(), m.images(64, 8, 8, 3)
    new = convert(model, CBN(decouple=decouple, rho=0.5), data=[x[:20], x[20:]])

    def until(net, name):
        return keras.Model(net.inputs[0], net.get_layer(name).output)

    layer, mean = new.get_layer("two_cbn"), numpy(until(model, "one_act")(x))
    mean = mean.mean((0, 1, 2))
    np.testing.assert_allclose(numpy(layer.moving_mean), mean, rtol=1e-4, atol=1e-5)
    assert float(numpy(layer.average_weight)) == 1
    # Dropout would change it.
    actual, expected = (until(net, "two_act") for net in (new, model))
    actual, expected = numpy(actual(x, training=True)), numpy(expected(x))
    np.testing.assert_allclose(actual, expected, atol=2e-4)


def test_statistics_without_data():
    """A norm before its layer hands them over; others are empty, and it says so."""
    norm = apply(layers.BatchNormalization, name="bn")
    convs = layers.Conv2D(4, 3, activation="relu"), layers.Conv2D(4, 3, 1, "same")
    model = m.model_of((8, 8, 3), convs[0], norm, convs[1])
    cbn = m.check_convert(model, says="").layers[-2]
    mean = numpy(model.get_layer("bn").moving_mean)
    np.testing.assert_array_equal(numpy(cbn.moving_mean), mean)
    assert float(numpy(cbn.average_weight)) == 1
    new = m.check_convert(m.sequential(), says="'two_cbn', 'head_cbn'")
    assert float(numpy(new.get_layer("two_cbn").average_weight)) == 0
    # A channel of a norm that is dead, or all but dead, stays exact.
    for scale in (0.0, 1e-20):
        model.get_layer("bn").gamma.assign([1.0, scale, -1.0, 2.0])
        for decouple in (True, False):
            m.check_convert(model, CBN(decouple=decouple))


@pytest.mark.parametrize("norm, names", [("cbn", ["one"]), ("none", ["one", "two"])])
def test_layers_get_a_bias_also_where_it_is_zero(norm, names):
    one, two = (layers.Dense(4, use_bias=False, name=name) for name in ("one", "two"))
    norms = layers.BatchNormalization(), layers.ReLU(), layers.BatchNormalization()
    new = quiet(convert, keras.Sequential([keras.Input((4,)), one, *norms, two]), norm)
    assert [x.name for x in m.of_class(new, layers.Dense) if x.use_bias] == names


def test_maps_that_no_layer_takes_stay_trainable_if_they_were():
    for trainable in (True, False):
        norm = apply(layers.BatchNormalization, trainable=trainable, name="bn")
        new = quiet(convert, m.model_of((6,), relu, norm, relu), "cbn")
        (affine,) = m.of_class(new, layers.EinsumDense)
        assert affine.name == "bn_affine"
        assert len(affine.trainable_weights) == 2 * trainable


def test_the_map_of_an_axis_where_all_have_the_same_size():
    """On TensorFlow `ops.add` would take it for the last axis."""
    layer = ChannelAffine("abcd,b->abcd", (4, 4, 4), bias_axes="b")
    x, (scale, shift) = m.images(2, 4, 4, 4), m.images(2, 4, 1, 1, seed=1)
    layer(x)
    layer.set_weights([scale.ravel(), shift])
    np.testing.assert_allclose(numpy(layer(x)), x * scale + shift, atol=1e-6)


def test_layers_with_constraints_take_no_map():
    """The first step of training would undo it."""
    first = apply(
        layers.SeparableConv2D, 4, 3, pointwise_constraint="non_neg", name="a"
    )
    model = m.model_of((6, 6, 3), first, bn, apply(layers.Conv2D, 2, 3))
    new = m.check_convert(model)
    kernels = [numpy(net.get_layer("a").pointwise_kernel) for net in (model, new)]
    np.testing.assert_array_equal(*kernels)
    first = dense(4, kernel_constraint="non_neg", name="first")
    model = m.model_of((6,), first, bn, relu, dense(2))
    new = m.check_convert(model)
    kernels = [numpy(net.get_layer("first").kernel) for net in (model, new)]
    np.testing.assert_array_equal(*kernels)
    assert m.of_class(new, ChannelAffine) and not m.norms_in(quiet(fold, model))


def test_quantized_layers():
    steps = dense(), bn, relu, dense(name="quantized"), bn, dense(2)
    model = m.model_of((6,), *steps)
    model.get_layer("quantized").quantize("int8")
    new = quiet(convert, model, "cbn", data=m.batch_for(model))
    assert new.get_layer("quantized").quantization_mode == "int8"
    assert new.get_layer("quantized_cbn").compute_dtype == "float32"
    m.assert_same_outputs(new, model, m.batch_for(model))


def test_what_cannot_be_preserved_is_named():
    model = m.sequential()
    several = apply(layers.EinsumDense, "ab,bcd->acd", (3, 4), name="several")
    for net, norm, names in (
        (model, CBN(scale=False), "two_cbn"),
        (model, CBN(center=False), "two_cbn"),
        (model, "ws", "'one', 'two'"),
        (m.model_of((5,), several, bn), "ws", "'several'"),
    ):
        with pytest.warns(UserWarning, match=f"could not be preserved.*{names}"):
            convert(net, norm, data=m.batch_for(net))


def test_norms_in_the_place_of_which_nothing_normalises_are_named():
    """Those that only recurrent layers read; who reads the last one is not known."""
    lstm = apply(layers.LSTM, 4, return_sequences=True)
    norms = [apply(layers.BatchNormalization, name=name) for name in ("lost", "read")]
    prelu = apply(layers.PReLU)  # Its weights are no kernel.
    steps = lstm, norms[0], relu, lstm, norms[1], prelu, dense(2), bn
    model = m.model_of((5, 3), *steps)
    for preserve in True, False:
        with pytest.warns(UserWarning, match=r"No CBN replaces .*\['lost'\]"):
            convert(model, "cbn", preserve, data=m.images(8, 5, 3))
    with m.saying(""):
        convert(model, "cbn", data=m.images(8, 5, 3), skip="lost")


def test_a_cbn_that_is_there_is_enough():
    conv, pool, flatten = layers.Conv2D, layers.MaxPooling2D, layers.Flatten
    steps = (
        apply(conv, 4, 3),
        relu,
        apply(CBN, name="a"),
        apply(pool),
        apply(conv, 4, 1),
    )
    steps += relu, apply(CBN, name="b"), apply(flatten), dense(3)
    model = m.model_of((6, 6, 2), *steps)
    with m.saying(""):
        new = convert(model, CBN())
    assert m.norms_in(new, CBN) == ["a", "b"]
    m.assert_same_outputs(new, model, m.images(8, 6, 6, 2))
    with pytest.warns(UserWarning, match=r"keep their settings: \['a', 'b'\]"):
        convert(model, CBN(rho=2))


def test_norms_that_find_no_place_and_norms_beside_are_said():
    wrapped = apply(lambda: WN(layers.Dense(3)))  # of which no other norm is the same
    model = m.model_of((4,), wrapped, layers.LayerNormalization(name="ln"), dense(2))
    for norm, name in (("noisy_bn", "NoisyBN"), ("group_norm", "GroupNormalization")):
        with pytest.warns(UserWarning, match=f"no place for {name} in model "):
            convert(model, norm)
    with pytest.warns(UserWarning, match=r"beside the new CBN layers: \['ln'\]"):
        convert(model, "cbn", data=m.images(8, 4))
    with m.saying(""):
        convert(model, "none", preserve=False)


def test_models_that_are_not_trained():
    steps = layers.Dense(4), layers.BatchNormalization(name="fresh"), layers.Dense(2)
    model = keras.Sequential([keras.Input((6,)), *steps])
    with pytest.warns(UserWarning, match=r"no batch: \['fresh'\].*may not learn.$"):
        convert(model, "cbn", data=m.images(8, 6))
    with m.saying(""):
        convert(model, "cbn", preserve=False)


def test_without_preserving():
    model = m.sequential()
    new = convert(model, "cbn", preserve=False)
    two, layer = new.get_layer("two"), new.get_layer("two_cbn")
    found = [numpy(v) for v in (two.kernel, two.bias, layer.gamma)]
    expected = numpy(model.get_layer("two").kernel), np.zeros(4), np.ones(4)
    assert all(map(np.array_equal, found, expected))
    assert float(numpy(layer.average_weight)) == 0
    new = convert(model, "cbn", preserve=False, data=m.batch_for(model))
    assert float(numpy(new.get_layer("two_cbn").average_weight)) == 1
    # Layers of all kinds get the bias that the norm had.
    new = convert(m.kinds(), "cbn", preserve=False)
    biases = [getattr(layer, "bias", None) for layer in new._flatten_layers()]
    assert len([bias for bias in biases if bias is not None]) == 7
    # Not layers that had none and no norm after them.
    steps = dense(5, use_bias=False, name="first"), apply(CBN), dense(2)
    new = convert(m.model_of((4,), *steps), "none", preserve=False)
    assert not new.get_layer("first").use_bias


def test_norms_that_stay():
    """Another axis, a mask that is given, always in training: the rest is converted."""
    norm = functools.partial(apply, layers.BatchNormalization)
    masked, trained = (layers.BatchNormalization(name=x) for x in ("mask", "training"))
    model = m.model_of(
        (8, 3),
        *(apply(layers.Conv1D, 4, 3), norm(), relu, norm(axis=1, name="axis")),
        apply(layers.Conv1D, 4, 1),
        lambda x: masked(x, mask=x[..., 0] > 0),
        *(dense(), lambda x: trained(x, training=True), dense(2)),
    )
    says = "stay as they are: .'axis', 'mask', 'training'"
    plain = quiet(convert, model, "cbn", preserve=False)
    for new in (m.check_convert(model, says=says), plain):
        assert m.norms_in(new) == ["axis", "mask", "training"]
        assert len(m.of_class(new, CBN)) == 3
    # In place, the axis does not matter.
    m.check_convert(model, "noisy_bn")
    with pytest.warns(UserWarning, match="stay as they are: .'mask', 'training'"):
        new = convert(model, "group_norm", preserve=False)
    assert m.norms_in(new) == ["mask", "training"]
