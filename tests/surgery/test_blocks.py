"""Blocks and subclassed models are entered; what cannot be stays, and is named."""

import re

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import AMAT, CBN, convert, fold, prune, recalibrate
from tests.support import surgery_models as m
from tests.support.backend import numpy, precision, thorough_on
from tests.support.surgery_models import model_of

pytestmark = thorough_on("jax")
X = m.images(5, 6, 6, 3)


def with_block(*blocks):
    """A convolution, blocks, a norm and a Dense layer."""
    stem = layers.Conv2D(4, 3, padding="same", name="stem")
    norm = layers.BatchNormalization(name="last")
    head = layers.GlobalAveragePooling2D(), norm, layers.Dense(2, name="logits")
    return model_of((6, 6, 3), stem, *blocks, *head)


def of_call(call, base=layers.Layer, name=None, **parts):
    """A layer of one's own that has these parts, and does that with them."""
    own = type("Own", (base,), {"call": call})(name=name)
    for each, part in parts.items():
        setattr(own, each, part)
    return own


def assert_converts_and_folds(model, x=X):
    """Both keep the function, and no block is left."""
    new = m.check_convert(model, "cbn", x, data=x)
    folded = m.check_fold(model, x, says="")
    # Padding leaves a shift after CBN, which a warning says.
    for made in (new, folded, m.check_fold(new, x)):
        assert not m.of_class(made, (m.Block, layers.BatchNormalization))
    return new, folded


def test_blocks():
    """The last is in a Functional model in a block."""
    inner = model_of((6, 6, 4), m.Block(), name="inner")
    wraps = of_call(lambda self, x: self.model(x), model=inner)
    model = with_block(m.Block(name="first"), m.Block(name="second"), wraps)
    new, folded = assert_converts_and_folds(model)
    # Names that are there twice have the name of the block.
    inside = [f"{block}_conv{i}" for block in ("first", "second") for i in (0, 1)]
    convolutions = [x.name for x in m.of_class(folded, layers.Conv2D)]
    assert convolutions[:5] == ["stem", *inside]
    assert sorted(convolutions[5:]) == ["conv0", "conv1"]  # of the inner model
    assert folded.get_layer("inner").get_layer("conv0").use_bias
    assert len(m.of_class(new, CBN)) == 7


def test_training_is_the_same():
    """Batch statistics and Dropout follow the mode of the model."""
    model = with_block(m.Block(name="block"))
    new = convert(model, lambda norm: None)
    assert len(m.norms_in(new)) == 3
    for layer in (*m.of_class(model, layers.Dropout), *m.of_class(new, layers.Dropout)):
        layer.rate = 0.0
    expected, actual = (numpy(net(X, training=True)) for net in (model, new))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    for old in m.of_class(model, layers.BatchNormalization):
        now = new.get_layer(old.name).moving_mean
        np.testing.assert_allclose(numpy(now), numpy(old.moving_mean), rtol=1e-4)
    assert np.any(numpy(model(X)) != expected)


class Net(keras.Model):
    """Blocks in a list, one of them called twice, two outputs by name."""

    def __init__(self):
        super().__init__(name="net")
        self.stem = layers.Conv2D(4, 3)
        self.blocks = [m.Block(name="first"), m.Block(name="second")]
        self.head = layers.Dense(3)

    def call(self, x):
        x = self.stem(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return {"logits": self.head(ops.mean(x, (1, 2))), "features": x}


def test_subclassed_models_and_shared_blocks():
    x = m.images(5, 8, 8, 3)
    model = Net()
    with pytest.raises(ValueError, match="subclassed model .* it is not built"):
        fold(model)
    model(x)
    m.randomize(model)
    new, folded = assert_converts_and_folds(model, x)
    assert new.name == folded.name == "net"
    assert sorted(new(x)) == ["features", "logits"]
    # A stem, two blocks of two, and a head: the shared block is there once.
    assert len(m.of_class(folded, (layers.Conv2D, layers.Dense))) == 6
    inside = keras.Sequential([keras.Input((8, 8, 3)), layers.ZeroPadding2D(), model])
    m.check_fold(inside, x, says="")
    with pytest.raises(ValueError, match="cannot be seen from outside"):
        fold(model, inline=False)
    model.call = lambda x: x if ops.max(x) > 0 else -x
    with pytest.raises(ValueError, match="subclassed model .* cannot be traced: .*Ker"):
        fold(model)


@pytest.mark.parametrize("pack", [lambda y: y, lambda y: [y, 2 * y]])
def test_subclassed_models_whose_outputs_have_no_names(pack):
    def call(self, x):
        return pack(self.last(self.norm(self.first(x))))

    norm = {"norm": layers.BatchNormalization()}
    parts = norm | {"first": layers.Dense(4), "last": layers.Dense(2)}
    model, x = of_call(call, keras.Model, "plain", **parts), m.images(5, 4)
    model(x)
    assert_converts_and_folds(m.randomize(model), x)
    m.assert_same_outputs(prune(model, x).model, model, x)


def test_outputs_keep_their_names():
    """Losses, metrics and targets are given by them."""

    def call(self, x):
        return self.last(self.norm(self.first(x)))

    blocks = [
        of_call(
            *(call, layers.Layer, name),
            first=layers.Dense(4),
            norm=layers.BatchNormalization(),
            last=layers.Dense(2),
        )
        for name in ("one", "two")
    ]
    hidden, norm = layers.Dense(3, "relu"), layers.BatchNormalization(name="norm")
    ends = *blocks, m.chain(layers.Dense(2), norm), layers.Dense(2, name="logits")
    model = model_of((4,), hidden, m.branches(list, *ends))
    names, x = ["one", "two", "norm", "logits"], m.images(8, 4)
    y = {name: m.images(8, 2, seed=i) for i, name in enumerate(names)}
    model.compile("sgd", dict.fromkeys(names, "mse"), metrics={"one": ["mae"]})
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    fused = convert(model, "cbn", data=x, fused=True)
    for new in convert(model, "cbn", data=x), fused, fold(fused), prune(model, x).model:
        assert new.output_names == names
        found = new.evaluate(x, y, verbose=0, return_dict=True)
        assert found == pytest.approx(expected, rel=1e-4)
    named = keras.Model(model.inputs, dict(zip(names, model.outputs)))
    assert set(fold(named).output_names) == {*names}
    # Of one output only where the name is used.
    model = model_of((4,), layers.Dense(2), norm)
    for loss, count in ("mse", 2), ({"norm": "mse"}, 3):
        model.compile("sgd", loss)
        new = fold(model)
        new.train_on_batch(x, y["norm"])
        assert len(new.layers) == count


def test_structures_of_tensors():
    """Lists, dictionaries, keyword arguments; no `training`; its input given back."""

    def call(self, pair, *, scale=1.0, extra=None):
        x, y = pair
        y = self.norm(self.conv(ops.concatenate([x, extra["z"]], -1) * scale))
        return {"same": x, "both": [y, ops.mean(y, -1, keepdims=True)]}

    own = of_call(call, conv=layers.Conv2D(4, 1), norm=layers.BatchNormalization())
    inputs = [keras.Input((4, 4, 2)), keras.Input((4, 4, 2))]
    stem = layers.Conv2D(2, 1)(inputs[0])
    made = own([stem, inputs[1]], scale=2.0, extra={"z": inputs[1]})
    last = layers.Add()([made["same"], made["both"][1]])
    model = m.randomize(keras.Model(inputs, [last, made["both"][0]]))
    assert not m.norms_in(m.check_fold(model, says=""))


def test_masks():
    """A block passes one on to a norm and to a recurrent layer."""

    def call(self, x, mask=None):
        return self.lstm(ops.tanh(self.norm(self.dense(x), mask=mask)), mask=mask)

    parts = {"dense": layers.Dense(4), "lstm": layers.LSTM(3)}
    reader = of_call(call, norm=layers.BatchNormalization(), **parts)
    reader.supports_masking, reader.compute_mask = True, lambda x, mask: None
    embedding = layers.Embedding(6, 3, mask_zero=True)
    model = model_of((5,), embedding, reader, layers.Dense(2), dtype="int32")
    tokens = np.array([[1, 2, 3, 0, 0], [4, 5, 1, 2, 3], [2, 0, 0, 0, 0]])
    assert not m.norms_in(m.check_fold(model, tokens, says=""))
    # What is inside passes it on, though the block is said not to.
    passes = of_call(lambda self, x: self.dense(x), dense=layers.Dense(4))
    steps = embedding, passes, m.bn, layers.LSTM(3)
    model = m.quiet(model_of, (5,), *steps, dtype="int32")
    assert not m.norms_in(m.check_fold(model, tokens, says=""))


def test_mixed_precision():
    """A block casts what it is called with."""
    with precision("mixed_bfloat16"):
        model = with_block(m.Block())
    folded = m.check_fold(model, X, 0.02, says="")
    assert folded.output.dtype == "bfloat16"


def test_blocks_that_the_user_leaves_alone():
    model = with_block(m.Block(name="first"), m.Block(name="second"))
    for skip in ("first", ["first"], lambda layer: layer.name == "first"):
        new = convert(model, "noisy_bn", skip=skip)
        assert len(m.norms_in(new)) == 2
        assert isinstance(new.get_layer("first"), m.Block)
    says = "inside of other layers"
    new = m.check_convert(model, "noisy_bn", X, says=says, inline=False)
    assert isinstance(new.get_layer("second"), m.Block)
    with m.saying(""):
        convert(model, "noisy_bn", skip=["first", "second"], inline=False)


def test_prune_and_recalibrate():
    other = m.Block(name="other")
    other.unused = layers.BatchNormalization(name="unused")
    other.unused.build((None, 4))
    model = with_block(m.Block(name="block"), other)
    norm = model.get_layer("block").norms[0]
    for weight in (norm.gamma, norm.beta):
        weight.assign(numpy(weight) * [1, 0, 1, 1])
    pruned = prune(model, X, gamma=1e-3)
    assert list(pruned.removed) == ["block_conv0"]
    m.assert_same_outputs(pruned.model, model, X)
    with pytest.warns(UserWarning, match="'unused'.*does not call them"):
        recalibrate(model, X, verbose=0)


class Stays(layers.Layer):
    """A convolution and a norm, and something that a graph cannot hold."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(4, 1, name="inner_conv")
        self.norm = layers.BatchNormalization(name="inner_norm")
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")
        for layer in self.conv, self.norm:
            layer.build((None, 6, 6, 4))

    def compute_output_shape(self, shape):
        return shape

    def inside(self, x, **kwargs):
        return self.norm(self.conv(x), **kwargs)


def also(action):
    """A call that does something else besides."""

    def call(self, x):
        action(self, x)
        return self.inside(x)

    return call


def asks_training(self, x, training=None):
    return self.inside(x) * 2 if training else self.inside(x, training=False)


def passes_mode(self, x, training=None):
    return self.inside(x, training=training)


class CallsAnother(Stays):
    """A block that is entered too, but in training only."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = of_call(passes_mode, Stays)

    def call(self, x, training=None):
        return self.block(x, training=True) if training else self.inside(x)


class Unknown(layers.Layer):
    def call(self, x):
        return x

    def get_config(self):
        raise NotImplementedError


def fills_batch(self, x):
    return ops.reshape(self.inside(x), (ops.shape(x)[0], 6, 6, 4))


@pytest.mark.parametrize(
    "call, reason",
    [
        (lambda self, x: self.inside(x) * ops.abs(self.scale), "reads .*scale"),
        (lambda self, x: ops.multiply(self.inside(x), self.scale), "reads .*scale"),
        (also(lambda self, x: self.scale.assign_add(1)), "changes .*scale"),
        (also(lambda self, x: setattr(self, "last", x.shape)), "sets .*last"),
        (lambda self, x: x if ops.max(x) > 9 else self.inside(x), "symbolic|KerasT"),
        (
            lambda self, x: ops.cond(ops.max(x) > 9, lambda: 2 * x, lambda: x),
            "it passes a function to 'cond.*'|__jax_array__",
        ),
        (asks_training, "other calls in training"),
        (
            lambda self, x: self.inside(x, training=False),
            "always calls 'inner_norm' with training=False",
        ),
        (also(lambda self, x: self.add_loss(ops.ones(()))), "adds losses"),
        (lambda self, x: Unknown()(self.inside(x)), "which has no configuration"),
        (fills_batch, ""),
    ],
)
def test_what_cannot_be_entered_is_named(call, reason):
    model = with_block(of_call(call, Stays, "stays"))
    says = rf"with all layers inside.* 'stays' \(Own\): .*({reason})"
    with pytest.warns(UserWarning, match=says):
        folded = fold(model)
    assert isinstance(folded.get_layer("stays"), Stays)
    assert m.norms_in(folded) == ["inner_norm"]
    m.assert_same_outputs(folded, model, X)


def test_blocks_of_which_more_is_needed_than_their_calls_are_named():
    names = "penalised", "trained", "sized"
    penalised, trained, sized = (of_call(passes_mode, Stays, name) for name in names)
    penalised.activity_regularizer = keras.regularizers.L2(0.1)
    sized.compute_output_shape = lambda shape: (shape[0], None, None, 4)
    steps = penalised, lambda x: trained(x, training=True), CallsAnother(name="other")
    model = with_block(*steps, sized)
    with pytest.warns(UserWarning, match="cannot be traced") as caught:
        folded = fold(model)
    said = " ".join(str(warning.message) for warning in caught)
    for name, reason in (
        ("penalised", "it has an activity regularizer"),
        ("trained", "it is called with training=True"),
        ("other", "it makes other calls in training"),
        ("sized", "Keras computes other output shapes"),
    ):
        assert isinstance(folded.get_layer(name), Stays)
        assert re.search(rf"'{name}' \(\w+\): {reason}", said)
    m.assert_same_outputs(folded, model, X)


def test_the_inner_block_is_named():
    def call(self, x):
        for part in self.parts:
            x = part(self.norm(self.conv(x)))
        return x

    calls = {"one": fills_batch, "two": asks_training}
    parts = [of_call(call, Stays, name) for name, call in calls.items()]
    conv = layers.Conv2D(4, 1, use_bias=False, name="outer_conv")
    norm = layers.BatchNormalization(name="outer_norm")
    model = with_block(of_call(call, conv=conv, norm=norm, parts=parts))
    with pytest.warns(UserWarning, match=r"'one' \(Own\).*'two' \(Own\)"):
        folded = fold(model)
    m.assert_same_outputs(folded, model, X)
    assert {*m.norms_in(folded)} == {"inner_norm"}


def test_a_mask_that_only_the_block_passes_on():
    """Its functions lose a mask, which it gives back."""
    own = of_call(lambda self, x: ops.relu(self.inside(x)), Stays, "stays")
    own.supports_masking = True
    steps = layers.Embedding(6, 4, mask_zero=True), own, layers.Reshape((36, 4))
    with pytest.warns(UserWarning, match="'stays' .*: it gives its output a mask"):
        fold(model_of((6, 6), *steps, dtype="int32"))


def test_a_block_stays_in_all_of_its_calls_or_in_none():
    """Its second call, with another shape, cannot be traced."""

    class Cuts(Stays):
        def call(self, x):
            return super().call(x) if x.shape[1] == 6 else ops.shape(x)[0] + x

    cuts = Cuts(name="cuts")
    model = model_of((6, 6, 4), cuts, layers.Cropping2D(1), cuts)
    with pytest.warns(UserWarning, match="'cuts' .*"):
        new = convert(model, lambda norm: None)
    assert isinstance(new.get_layer("cuts"), Cuts)
    assert len(new.weights) == len(model.weights)


def test_subclasses_of_sequential():
    """Of what was a chain comes a network that is none, by inputs and outputs."""

    class Stack(keras.Sequential):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    ends = layers.GlobalAveragePooling2D(), layers.Dense(2)
    model = Stack([keras.Input((6, 6, 4)), m.Block(name="block"), *ends])
    folded = fold(m.randomize(model))
    m.assert_same_outputs(folded, model, m.images(5, 6, 6, 4))
    assert not isinstance(folded, Stack)


def test_blocks_of_one_name():
    """The names of block and model are not enough to tell three of them apart."""
    parts = {part: m.Block(name="block") for part in ("one", "two", "three")}
    call = m.chain(*parts.values())
    model = of_call(lambda self, x: call(x), keras.Model, **parts)
    x = m.images(5, 6, 6, 4)
    model(x)
    assert not m.norms_in(m.check_fold(m.randomize(model), x))


def test_makers_of_one_name_are_counted_each():
    def block(name):
        steps = layers.Dense(6, "relu", name="one"), layers.Dense(4, name="two")
        inside = keras.Sequential(steps, name="inside")
        return of_call(lambda self, x: self.inside(x) + x, name=name, inside=inside)

    model = model_of((4,), block("first"), block("second"), layers.Dense(1))
    pruned = prune(model, m.images(32, 4), ratio=0.3)
    left = [layer.units for layer in m.of_class(pruned.model, layers.Dense)]
    assert pruned.channels == (21, sum(left)) and sum(left) < 21


def test_own_weights_come_before_those_of_layers_inside():
    class Twice(layers.BatchNormalization):
        def build(self, shape):
            super().build(shape)
            self.inside = layers.BatchNormalization()
            self.inside.build(shape)

    model = model_of((4,), m.dense(6), Twice(), m.dense(3))
    m.check_convert(model, "noisy_bn", m.images(8, 4))


def test_layers_that_are_copied_whole_keep_all_their_weights():
    """With the counters of AMAT, which are in no configuration."""
    parts = layers.Dense(3, "tanh"), CBN(), layers.Dense(3, "tanh")
    inner = keras.Sequential([keras.Input((3,)), *parts])
    model = m.model_of((2, 3), m.apply(layers.TimeDistributed, inner), m.dense(2), m.bn)
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 100)
    model.compile(keras.optimizers.SGD(schedule), "mse")
    x = m.batch_for(model, 16)
    model.fit(x, np.ones((16, 2, 2)), verbose=0, callbacks=[AMAT()])
    m.check(fold, model, x)
    m.check_convert(model, "none", x)


class Pair(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.pair = [layers.Dense(4, name="one"), layers.Dense(4, name="two")]

    def build(self, shape):
        for layer in self.pair:
            layer.build(shape)

    def call(self, x):
        return self.pair[1](self.pair[0](x))


def test_weights_that_no_configuration_has_are_an_error():
    block = Pair(name="block")
    model = m.model_of((4,), block, m.bn, m.dense(2))
    m.check(fold, model, None, 1e-5, None, inline=False)
    block.pair[0].enable_lora(2)
    with pytest.raises(ValueError, match="'block' could.*'one' in it has.*lora_ker"):
        fold(model, inline=False)
