"""Blocks and subclassed models are entered."""

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


def assert_converts_and_folds(model, x=X):
    """Both keep the function, and no block is left."""
    new = m.check_convert(model, "cbn", x, data=x)
    folded = m.check_fold(model, x, says="")
    # Padding leaves a shift after CBN, which a warning says.
    for made in (new, folded, m.check_fold(new, x)):
        assert not m.of_class(made, (m.Block, layers.BatchNormalization))
    return new, folded


class Tokens(layers.Layer):
    """Calls a layer on a constant, and stays for that."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokens, self.positions = layers.Embedding(4000, 4), layers.Embedding(5, 4)

    def call(self, ids):
        return self.tokens(ids) + self.positions(ops.arange(5))


@pytest.mark.parametrize("embedding", [layers.Embedding(4000, 4), Tokens()])
def test_only_inputs_that_an_embedding_reads_are_integers(embedding):
    def call(self, inputs):
        ids, features = inputs
        return self.head(ops.mean(self.embedding(ids), 1) + self.first(features))

    head = m.chain(layers.BatchNormalization(), layers.Dense(3))
    parts = {"embedding": embedding, "first": layers.Dense(4), "head": head}
    model = m.of_call(call, keras.Model, **parts)
    ids = 3000 + np.arange(40).reshape(8, 5)  # that half precision does not hold
    x = [ids, np.random.default_rng(0).random((8, 6), "float32")]
    expected = numpy(model(x))
    new = fold(model)
    np.testing.assert_allclose(numpy(new(x)), expected, rtol=1e-4, atol=1e-5)
    assert [each.dtype for each in new.inputs] == ["int32", "float32"]


def test_blocks():
    """The last is in a Functional model in a block."""
    inner = model_of((6, 6, 4), m.Block(), name="inner")
    wraps = m.of_call(lambda self, x: self.model(x), model=inner)
    model = m.with_block(m.Block(name="first"), m.Block(name="second"), wraps)
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
    model = m.with_block(m.Block(name="block"))
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
    model, x = m.of_call(call, keras.Model, "plain", **parts), m.images(5, 4)
    model(x)
    assert_converts_and_folds(m.randomize(model), x)
    m.assert_same_outputs(prune(model, x).model, model, x)


def test_a_subclassed_model_that_takes_more_than_it_was_built_for():
    def call(self, x, more=None, training=False):
        y = self.last(self.norm(self.first(x)), training=training)
        return y if more is None else y + more

    norm = {"norm": layers.BatchNormalization()}
    parts = norm | {"first": layers.Dense(4), "last": layers.Dense(2)}
    model, x = m.of_call(call, keras.Model, "more", **parts), m.images(5, 4)
    model(x, more=1.0)
    with pytest.warns(UserWarning, match=r"fold: .* its arguments \['more'\]"):
        folded = fold(m.randomize(model))
    m.assert_same_outputs(folded, model, x)


def test_outputs_keep_their_names():
    """Losses, metrics and targets are given by them."""

    def call(self, x):
        return self.last(self.norm(self.first(x)))

    blocks = [
        m.of_call(
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

    own = m.of_call(call, conv=layers.Conv2D(4, 1), norm=layers.BatchNormalization())
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
    reader = m.of_call(call, norm=layers.BatchNormalization(), **parts)
    reader.supports_masking, reader.compute_mask = True, lambda x, mask: None
    embedding = layers.Embedding(6, 3, mask_zero=True)
    model = model_of((5,), embedding, reader, layers.Dense(2), dtype="int32")
    tokens = np.array([[1, 2, 3, 0, 0], [4, 5, 1, 2, 3], [2, 0, 0, 0, 0]])
    assert not m.norms_in(m.check_fold(model, tokens, says=""))
    # What is inside passes it on, though the block is said not to.
    passes = m.of_call(lambda self, x: self.dense(x), dense=layers.Dense(4))
    steps = embedding, passes, m.bn, layers.LSTM(3)
    model = m.quiet(model_of, (5,), *steps, dtype="int32")
    assert not m.norms_in(m.check_fold(model, tokens, says=""))


def test_mixed_precision():
    """A block casts what it is called with."""
    with precision("mixed_bfloat16"):
        model = m.with_block(m.Block())
    folded = m.check_fold(model, X, 0.02, says="")
    assert folded.output.dtype == "bfloat16"


def test_blocks_that_the_user_leaves_alone():
    model = m.with_block(m.Block(name="first"), m.Block(name="second"))
    for skip in ("first", ["first"], lambda layer: layer.name == "first"):
        new = convert(model, "noisy_bn", skip=skip)
        assert len(m.norms_in(new)) == 2
        assert isinstance(new.get_layer("first"), m.Block)
    says = "inside other layers"
    new = m.check_convert(model, "noisy_bn", X, says=says, inline=False)
    assert isinstance(new.get_layer("second"), m.Block)
    with m.saying(""):
        convert(model, "noisy_bn", skip=["first", "second"], inline=False)


def test_prune_and_recalibrate():
    other = m.Block(name="other")
    other.unused = layers.BatchNormalization(name="unused")
    other.unused.build((None, 4))
    model = m.with_block(m.Block(name="block"), other)
    norm = model.get_layer("block").norms[0]
    for weight in (norm.gamma, norm.beta):
        weight.assign(numpy(weight) * [1, 0, 1, 1])
    pruned = prune(model, X, gamma=1e-3)
    assert list(pruned.removed) == ["block_conv0"]
    m.assert_same_outputs(pruned.model, model, X)
    with pytest.warns(UserWarning, match="'unused'.*does not call them"):
        recalibrate(model, X, verbose=0)


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
    model = m.of_call(lambda self, x: call(x), keras.Model, **parts)
    x = m.images(5, 6, 6, 4)
    model(x)
    assert not m.norms_in(m.check_fold(m.randomize(model), x))


def test_makers_of_one_name_are_counted_each():
    def block(name):
        steps = layers.Dense(6, "relu", name="one"), layers.Dense(4, name="two")
        inside = keras.Sequential(steps, name="inside")
        return m.of_call(lambda self, x: self.inside(x) + x, name=name, inside=inside)

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
