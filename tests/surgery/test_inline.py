"""Layers inside of layers: blocks and subclassed models are entered."""

import re
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms.layers.cbn import CBN
from keras_norms.surgery import convert, fold, prune, recalibrate
from tests.support import surgery_models as m


def norms_in(model):
    return m.of_class(model, layers.BatchNormalization)


class Block(layers.Layer):
    """Two norms, a sum, functions of keras.ops, the names of all other blocks."""

    def __init__(self, filters=4, **kwargs):
        super().__init__(**kwargs)
        self.filters = filters
        self.convs = [
            layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"conv{i}")
            for i in range(2)
        ]
        self.norms = {
            str(i): layers.BatchNormalization(name=f"norm{i}") for i in range(2)
        }
        self.drop = layers.Dropout(0.5, name="drop")

    def call(self, x, training=False):
        y = x
        for i, conv in enumerate(self.convs):
            y = ops.relu(self.norms[str(i)](conv(y), training=training))
        return x + self.drop(y, training=training)

    def get_config(self):
        return {**super().get_config(), "filters": self.filters}


class Net(keras.Model):
    """Blocks in a list, one of them called twice, two outputs by name."""

    def __init__(self):
        super().__init__(name="net")
        self.stem = layers.Conv2D(4, 3)
        self.blocks = [Block(name="first"), Block(name="second")]
        self.head = layers.Dense(3)

    def call(self, x):
        x = self.stem(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return {"logits": self.head(ops.mean(x, (1, 2))), "features": x}


def with_block(*blocks, shape=(6, 6, 3)):
    """A convolution, blocks, a norm and a Dense layer."""
    inputs = keras.Input(shape)
    x = layers.Conv2D(4, 3, padding="same", name="stem")(inputs)
    for block in blocks:
        x = block(x)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.BatchNormalization(name="last")(x)
    return m.randomize(keras.Model(inputs, layers.Dense(2, name="logits")(x)))


def quietly(function, *args, **kwargs):
    """The result, where nothing is to be warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return function(*args, **kwargs)


def assert_converts_and_folds(model, x):
    """Both keep the function, and leave `model` as it is. Returns both."""
    attributes = [set(vars(layer)) for layer in model._flatten_layers()]
    nodes = [len(layer._inbound_nodes) for layer in model._flatten_layers()]
    new = convert(model, "cbn", data=x)
    assert not norms_in(new)
    m.assert_same_outputs(new, model, x)
    folded = quietly(fold, model)
    m.assert_same_outputs(folded, model, x)
    # Padding leaves a shift after CBN, which a warning says.
    for made in (folded, fold(new)):
        modules = {type(layer).__module__ for layer in made._flatten_layers()}
        assert all(module.startswith("keras.") for module in modules)
        assert not norms_in(made)
    assert attributes == [set(vars(layer)) for layer in model._flatten_layers()]
    assert nodes == [len(layer._inbound_nodes) for layer in model._flatten_layers()]
    return new, folded


def test_blocks(tmp_path):
    model = with_block(Block(name="first"), Block(name="second"))
    x = m.images(5, 6, 6, 3)
    new, folded = assert_converts_and_folds(model, x)
    # Names that are there twice have the name of the block.
    assert [layer.name for layer in m.of_class(folded, layers.Conv2D)] == [
        "stem",
        "first_conv0",
        "first_conv1",
        "second_conv0",
        "second_conv1",
    ]
    assert len(m.of_class(new, CBN)) == 5
    new.compile("sgd", "mse", run_eagerly=m.BACKEND == "tensorflow")
    before = new.get_weights()
    new.fit(x, np.zeros((5, 2)), epochs=2, verbose=0)
    assert all(np.any(a != b) for a, b in zip(before, new.get_weights()) if a.ndim > 1)
    new.save(tmp_path / "new.keras")
    loaded = keras.models.load_model(tmp_path / "new.keras")
    m.assert_same_outputs(loaded, new, x, 0)
    m.assert_same_outputs(fold(loaded), new, x)


def test_training_is_the_same():
    """Batch statistics and Dropout follow the mode of the model."""
    model = with_block(Block(name="block"))
    x = m.images(5, 6, 6, 3)
    new = convert(model, lambda norm: None)
    assert len(norms_in(new)) == 3
    for layer in (*m.of_class(model, layers.Dropout), *m.of_class(new, layers.Dropout)):
        layer.rate = 0.0
    expected, actual = (m.numpy(net(x, training=True)) for net in (model, new))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    for old in norms_in(model):
        now = new.get_layer(old.name).moving_mean
        np.testing.assert_allclose(m.numpy(now), m.numpy(old.moving_mean), rtol=1e-4)
    assert np.any(m.numpy(model(x)) != expected)


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
    m.assert_same_outputs(quietly(fold, inside), inside, x)


def test_models_that_cannot_be_entered():
    with pytest.raises(ValueError, match="subclassed model .* it is not built"):
        fold(Net())

    class Asks(Net):
        def build(self, shape):
            self.head.build(shape)

        def call(self, x):
            return self.head(x if ops.max(x) > 0 else -x)

    model = Asks()
    model(m.images(2, 4, 4, 3))
    with pytest.raises(
        ValueError, match="subclassed model .* cannot be traced: .*Keras"
    ):
        fold(model)
    with pytest.raises(ValueError, match="cannot be seen from outside"):
        fold(model, inline=False)
    with pytest.raises(ValueError, match="`inline` must be True or False"):
        fold(model, inline=1)


class Arguments(layers.Layer):
    """Lists, dictionaries, keyword arguments; no `training`; its input given back."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(4, 1)
        self.norm = layers.BatchNormalization()

    def call(self, pair, *, scale=1.0, extra=None):
        x, y = pair
        y = self.norm(self.conv(ops.concatenate([x, extra["z"]], -1) * scale))
        return {"same": x, "both": [y, ops.mean(y, -1, keepdims=True)]}


def test_structures_of_tensors():
    inputs = [keras.Input((4, 4, 2)), keras.Input((4, 4, 2))]
    stem = layers.Conv2D(2, 1)(inputs[0])
    made = Arguments()([stem, inputs[1]], scale=2.0, extra={"z": inputs[1]})
    last = layers.Add()([made["same"], made["both"][1]])
    model = m.randomize(keras.Model(inputs, [last, made["both"][0]]))
    x = [m.images(3, 4, 4, 2), m.images(3, 4, 4, 2, seed=1)]
    m.assert_same_outputs(quietly(fold, model), model, x)
    assert not norms_in(fold(model))


class Reader(layers.Layer):
    """Passes a mask on to a recurrent layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.dense = layers.Dense(4)
        self.norm = layers.BatchNormalization()
        self.lstm = layers.LSTM(3)

    def compute_mask(self, x, mask):
        return None

    def call(self, x, mask=None):
        return self.lstm(ops.tanh(self.norm(self.dense(x), mask=mask)), mask=mask)


def test_masks():
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(6, 3, mask_zero=True)(inputs)
    model = m.randomize(keras.Model(inputs, layers.Dense(2)(Reader()(x))))
    tokens = np.array([[1, 2, 3, 0, 0], [4, 5, 1, 2, 3], [2, 0, 0, 0, 0]])
    folded = quietly(fold, model)
    assert not norms_in(folded)
    m.assert_same_outputs(folded, model, tokens)
    # It does say something.
    other = np.where(tokens == 0, 1, tokens)
    assert np.max(np.abs(m.outputs(model, other) - m.outputs(model, tokens))) > 1e-3


def test_a_mask_that_only_the_block_passes_on():
    inputs = keras.Input((6, 6), dtype="int32")
    x = layers.Embedding(6, 4, mask_zero=True)(inputs)
    x = layers.Reshape((36, 4))(PassesMask(name="stays")(x))
    model = m.randomize(keras.Model(inputs, x))
    with pytest.warns(UserWarning, match="'stays' .*: it gives its output a mask"):
        fold(model)
    # Where there is no mask it can be entered.
    model = with_block(PassesMask())
    m.assert_same_outputs(quietly(fold, model), model, m.images(3, 6, 6, 3))


def test_a_block_stays_in_all_of_its_calls_or_in_none():
    """Its second call, with another shape, cannot be traced."""

    class Cuts(Stays):
        def call(self, x):
            return super().call(x) if x.shape[1] == 6 else ops.shape(x)[0] + x

    cuts = Cuts(name="cuts")
    inputs = keras.Input((6, 6, 4))
    x = layers.Cropping2D(1)(cuts(inputs))
    model = m.randomize(keras.Model(inputs, cuts(x)))
    with pytest.warns(UserWarning, match="'cuts' .*"):
        new = convert(model, lambda norm: None)
    assert isinstance(new.get_layer("cuts"), Cuts)
    assert len(new.weights) == len(model.weights)


def test_mixed_precision():
    """A block casts what it is called with."""

    class Casts(layers.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_bfloat16", name="casts")
            self.dense = layers.Dense(8, dtype="mixed_bfloat16")
            self.norm = layers.BatchNormalization(dtype="mixed_bfloat16")

        def call(self, x):
            return self.norm(self.dense(x)) + x

    inputs = keras.Input((8,))
    model = m.randomize(keras.Model(inputs, Casts()(inputs)))
    folded = quietly(fold, model)
    assert folded.output.dtype == "bfloat16"
    x = m.images(4, 8)
    difference = ops.cast(folded(x), "float32") - ops.cast(model(x), "float32")
    assert np.max(np.abs(m.numpy(difference))) < 0.1


def test_models_in_blocks_and_blocks_in_models():
    class Wraps(layers.Layer):
        def __init__(self, model, **kwargs):
            super().__init__(**kwargs)
            self.model = model

        def call(self, x):
            return self.model(x)

    inputs = keras.Input((6, 6, 4))
    inner = keras.Model(inputs, Block(name="deep")(inputs), name="inner")
    model = with_block(Wraps(inner, name="wraps"), Block(name="block"))
    x = m.images(4, 6, 6, 3)
    new, folded = assert_converts_and_folds(model, x)
    assert folded.get_layer("inner").get_layer("conv0").use_bias


# What stays


class Stays(layers.Layer):
    """A convolution and a norm, and something that a graph cannot hold."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(4, 1, name="inner_conv")
        self.norm = layers.BatchNormalization(name="inner_norm")

    def build(self, shape):
        self.conv.build(shape)
        self.norm.build(shape)

    def compute_output_shape(self, shape):
        return shape

    def call(self, x, training=None):
        return self.norm(self.conv(x), training=training)


class ReadsVariable(Stays):
    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(name="scale", initializer="ones")

    def call(self, x):
        return super().call(x) * ops.convert_to_tensor(self.scale)


class PassesVariable(ReadsVariable):
    def call(self, x):
        return ops.multiply(Stays.call(self, x), self.scale)


class ReadsKernel(Stays):
    def call(self, x):
        return super().call(x) + ops.sum(self.conv.kernel)


class Counts(ReadsVariable):
    def call(self, x):
        self.scale.assign(self.scale + 1)
        return Stays.call(self, x)


class Remembers(Stays):
    def call(self, x):
        self.last = x.shape
        return super().call(x)


class AsksValues(Stays):
    def call(self, x):
        return (
            ops.cond(True, lambda: x, lambda: x) if ops.max(x) > 9 else super().call(x)
        )


class GivesFunction(Stays):
    def call(self, x):
        return ops.cond(ops.max(x) > 9, lambda: x, lambda: x) + super().call(x)


class AsksTraining(Stays):
    def call(self, x, training=None):
        return super().call(x) * 2 if training else super().call(x, False)


class Freezes(Stays):
    def call(self, x):
        return super().call(x, training=False)


class AddsLoss(Stays):
    def call(self, x):
        self.add_loss(ops.sum(ops.ones(())))
        return super().call(x)


class PassesMask(Stays):
    """Its functions lose a mask, which it gives back."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x, training=None):
        return ops.relu(super().call(x, training))


class FillsBatch(Stays):
    def call(self, x):
        return ops.reshape(super().call(x), (ops.shape(x)[0], 6, 6, 4))


@pytest.mark.parametrize(
    "cls, reason",
    [
        (ReadsVariable, "reads its variables .*scale"),
        (PassesVariable, "reads its variables .*scale"),
        (ReadsKernel, "reads its variables .*kernel"),
        (Counts, "changes its variables .*scale"),
        (Remembers, "sets .*last"),
        (AsksValues, "symbolic|KerasTensor"),
        (GivesFunction, "a function|"),
        (AsksTraining, "other calls in training"),
        (Freezes, "calls 'inner_norm' with training=False"),
        (AddsLoss, "adds losses"),
        (FillsBatch, ""),
    ],
)
def test_what_cannot_be_entered_is_named(cls, reason):
    model = with_block(cls(name="stays"))
    x = m.images(4, 6, 6, 3)
    # Calling it may change it.
    weights = model.get_weights()
    expected = m.outputs(model, x)
    model.set_weights(weights)
    with pytest.warns(UserWarning) as said:
        folded = fold(model)
    texts = [str(w.message) for w in said if "fold: what is inside" in str(w.message)]
    assert len(texts) == 1
    assert f"'stays' ({cls.__name__}): " in texts[0]
    assert re.search(reason, texts[0])
    assert isinstance(folded.get_layer("stays"), cls)
    assert [layer.name for layer in norms_in(folded)] == ["inner_norm"]
    np.testing.assert_allclose(m.outputs(folded, x), expected, rtol=1e-4, atol=1e-5)


def test_the_inner_block_is_named():
    class Outer(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.conv = layers.Conv2D(4, 1, use_bias=False, name="outer_conv")
            self.norm = layers.BatchNormalization(name="outer_norm")
            self.parts = [FillsBatch(name="one"), AsksTraining(name="two")]

        def call(self, x):
            for part in self.parts:
                x = part(self.norm(self.conv(x)))
            return x

    model = with_block(Outer(name="outer"))
    with pytest.warns(UserWarning, match=r"'one' \(FillsBatch\).*'two' \(AsksTraining"):
        folded = fold(model)
    m.assert_same_outputs(folded, model, m.images(4, 6, 6, 3))
    assert {layer.name for layer in norms_in(folded)} == {"inner_norm"}


def test_blocks_that_the_user_leaves_alone():
    model = with_block(Block(name="first"), Block(name="second"))
    for skip in ("first", ["first"], lambda layer: layer.name == "first"):
        new = convert(model, "noisy_bn", skip=skip)
        assert len(norms_in(new)) == 2
        assert isinstance(new.get_layer("first"), Block)
    with pytest.warns(UserWarning, match="inside of other layers"):
        new = convert(model, "noisy_bn", inline=False)
    assert isinstance(new.get_layer("second"), Block)
    m.assert_same_outputs(new, model, m.images(4, 6, 6, 3))


def test_prune_and_recalibrate():
    class Unused(Block):
        def build(self, shape):
            self.unused = layers.BatchNormalization(name="unused")
            self.unused.build(shape)

    model = with_block(Block(name="block"), Unused(name="other"))
    norm = model.get_layer("block").norms["0"]
    norm.gamma.assign(m.numpy(norm.gamma) * [1, 0, 1, 1])
    norm.beta.assign(m.numpy(norm.beta) * [1, 0, 1, 1])
    x = m.images(6, 6, 6, 3)
    pruned = prune(model, x, gamma=1e-3)
    assert list(pruned.removed) == ["block_conv0"]
    m.assert_same_outputs(pruned.model, model, x)
    with pytest.warns(UserWarning, match="does not call .*unused"):
        recalibrate(model, x, verbose=0)
