"""Layers inside of layers: blocks and subclassed models are entered."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CBN, convert, fold, prune, recalibrate
from tests.support import planted
from tests.support import surgery_models as m
from tests.support.backend import later_on_jax, numpy
from tests.support.surgery_models import apply, model_of

X = m.images(5, 6, 6, 3)


def with_block(*blocks):
    """A convolution, blocks, a norm and a Dense layer."""
    return model_of(
        (6, 6, 3),
        *(apply(layers.Conv2D, 4, 3, padding="same", name="stem"), *blocks),
        apply(layers.GlobalAveragePooling2D),
        apply(layers.BatchNormalization, name="last"),
        apply(layers.Dense, 2, name="logits"),
    )


def assert_converts_and_folds(model, x=X):
    """Both keep the function, and nothing but layers of Keras is left by fold."""
    new = m.check_convert(model, "cbn", x, data=x)
    assert not m.norms_in(new)
    folded = m.check_fold(model, x, says="")
    # Padding leaves a shift after CBN, which a warning says.
    for made in (folded, m.check_fold(new, x)):
        modules = {type(layer).__module__ for layer in made._flatten_layers()}
        assert all(module.startswith("keras.") for module in modules)
        assert not m.norms_in(made)
    return new, folded


class Wraps(layers.Layer):
    """A block in a Functional model in a block."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        inputs = keras.Input((6, 6, 4))
        self.model = keras.Model(inputs, m.Block()(inputs), name="inner")

    def call(self, x):
        return self.model(x)


@later_on_jax
def test_blocks():
    model = with_block(m.Block(name="first"), m.Block(name="second"), Wraps())
    new, folded = assert_converts_and_folds(model)
    # Names that are there twice have the name of the block.
    inside = [f"{block}_conv{i}" for block in ("first", "second") for i in (0, 1)]
    convolutions = [x.name for x in m.of_class(folded, layers.Conv2D)]
    assert convolutions[:5] == ["stem", *inside]
    assert sorted(convolutions[5:]) == ["conv0", "conv1"]  # of the inner model
    assert folded.get_layer("inner").get_layer("conv0").use_bias
    assert len(m.of_class(new, CBN)) == 7


@later_on_jax
def test_training_is_the_same():
    """Batch statistics and Dropout follow the mode of the model."""
    model = with_block(m.Block(name="block"))
    new = convert(model, lambda norm: None)
    norms = m.of_class(model, layers.BatchNormalization)
    assert len(m.norms_in(new)) == len(norms) == 3
    for layer in (*m.of_class(model, layers.Dropout), *m.of_class(new, layers.Dropout)):
        layer.rate = 0.0
    expected, actual = (numpy(net(X, training=True)) for net in (model, new))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    for old in norms:
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


@later_on_jax
def test_subclassed_models_and_shared_blocks():
    x = m.images(5, 8, 8, 3)
    model = Net()
    model(x)
    m.randomize(model)
    new, folded = assert_converts_and_folds(model, x)
    assert new.name == folded.name == "net"
    assert sorted(new(x)) == ["features", "logits"]
    # A stem, two blocks of two, and a head: the shared block is there once.
    assert len(m.of_class(folded, (layers.Conv2D, layers.Dense))) == 6
    inside = keras.Sequential([keras.Input((8, 8, 3)), layers.ZeroPadding2D(), model])
    m.check_fold(inside, x, says="")


class Arguments(layers.Layer):
    """Lists, dictionaries, keyword arguments; no `training`; its input given back."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = layers.Conv2D(4, 1), layers.BatchNormalization()

    def call(self, pair, *, scale=1.0, extra=None):
        x, y = pair
        y = self.norm(self.conv(ops.concatenate([x, extra["z"]], -1) * scale))
        return {"same": x, "both": [y, ops.mean(y, -1, keepdims=True)]}


@later_on_jax
def test_structures_of_tensors():
    inputs = [keras.Input((4, 4, 2)), keras.Input((4, 4, 2))]
    stem = layers.Conv2D(2, 1)(inputs[0])
    made = Arguments()([stem, inputs[1]], scale=2.0, extra={"z": inputs[1]})
    last = layers.Add()([made["same"], made["both"][1]])
    model = m.randomize(keras.Model(inputs, [last, made["both"][0]]))
    assert not m.norms_in(m.check_fold(model, says=""))


class Reader(layers.Layer):
    """Passes a mask on to a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.dense, self.norm = layers.Dense(4), layers.BatchNormalization()
        self.lstm = layers.LSTM(3)

    def compute_mask(self, x, mask):
        return None

    def call(self, x, mask=None):
        return self.lstm(ops.tanh(self.norm(self.dense(x), mask=mask)), mask=mask)


@later_on_jax
def test_masks():
    embedding = layers.Embedding(6, 3, mask_zero=True)
    model = model_of((5,), embedding, Reader(), layers.Dense(2), dtype="int32")
    tokens = np.array([[1, 2, 3, 0, 0], [4, 5, 1, 2, 3], [2, 0, 0, 0, 0]])
    assert not m.norms_in(m.check_fold(model, tokens, says=""))


@later_on_jax
def test_mixed_precision():
    """A block casts what it is called with."""

    class Casts(layers.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_bfloat16", name="casts")
            self.dense = layers.Dense(8, dtype="mixed_bfloat16")
            self.norm = layers.BatchNormalization(dtype="mixed_bfloat16")

        def call(self, x):
            return self.norm(self.dense(x)) + x

    model, x = model_of((8,), Casts()), m.images(4, 8)
    with m.saying(""):
        folded = fold(model)
    assert folded.output.dtype == "bfloat16"
    difference = ops.cast(folded(x), "float32") - ops.cast(model(x), "float32")
    assert np.max(np.abs(numpy(difference))) < 0.1


@later_on_jax
def test_blocks_that_the_user_leaves_alone():
    model = with_block(m.Block(name="first"), m.Block(name="second"))
    for skip in ("first", ["first"], lambda layer: layer.name == "first"):
        new = convert(model, "noisy_bn", skip=skip)
        assert len(m.norms_in(new)) == 2
        assert isinstance(new.get_layer("first"), m.Block)
    says = "inside of other layers"
    new = m.check_convert(model, "noisy_bn", X, says=says, inline=False)
    assert isinstance(new.get_layer("second"), m.Block)


@later_on_jax
def test_prune_and_recalibrate():
    class Unused(m.Block):
        def build(self, shape):
            self.unused = layers.BatchNormalization(name="unused")
            self.unused.build(shape)

    model = with_block(m.Block(name="block"), Unused(name="other"))
    norm = model.get_layer("block").norms["0"]
    for weight in (norm.gamma, norm.beta):
        weight.assign(numpy(weight) * [1, 0, 1, 1])
    pruned = prune(model, X, gamma=1e-3)
    assert list(pruned.removed) == ["block_conv0"]
    m.assert_same_outputs(pruned.model, model, X)
    with pytest.warns(UserWarning, match="does not call .*unused"):
        recalibrate(model, X, verbose=0)


def test_convert_save_recalibrate_prune_and_fold(tmp_path):
    """All of surgery, one after the other, on every backend."""
    keras.utils.set_random_seed(0)  # with which one channel is dead, and no other
    first = layers.Conv2D(3, 3, activation="relu", name="first")
    conv, pooling = layers.Conv2D(4, 3), layers.GlobalAveragePooling2D()
    model = m.model_of((8, 8, 2), first, conv, m.Block(), pooling, layers.Dense(2))
    first.bias.assign([0.5, -99.0, 0.5])  # a dead channel
    x = m.images(12, 8, 8, 2)
    new = m.check_convert(model, CBN(rho=2), x, data=x)
    norms = m.of_class(new, CBN)
    assert len(norms) == 4 and not m.norms_in(new)
    new.save(tmp_path / "new.keras")
    m.assert_same_outputs(keras.models.load_model(tmp_path / "new.keras"), new, x, 0)
    # The same statistics, of another pass
    before = [norm.get_weights() for norm in norms]
    recalibrate(new, x, batch_size=12, verbose=0)
    for norm, weights in zip(norms, before):
        for actual, expected in zip(norm.get_weights(), weights, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
    m.assert_same_outputs(new, model, x, 1e-3)
    pruned = prune(new, x)
    assert planted.removed(pruned) == {"first": [1]}
    m.assert_same_outputs(m.check_fold(pruned.model, x), new, x, 2e-5)
