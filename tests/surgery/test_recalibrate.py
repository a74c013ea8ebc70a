"""recalibrate: exact statistics of a pass over data, and nothing else changed."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from keras_norms.layers.cbn import CBN
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.surgery import recalibrate
from tests.support import surgery_models as m

NORMS = {
    "bn": layers.BatchNormalization,
    "noisy_bn": NoisyBN,
    "cbn": CBN,
    "coupled": lambda **kwargs: CBN(decouple=False, rho=2.0, **kwargs),
    "lp": lambda **kwargs: LpNorm(p=1, **kwargs),
}


def network(norm, size=(6, 6)):
    inputs = keras.Input((*size, 3))
    x = norm(name="first")(inputs)
    x = layers.Dropout(0.5)(layers.Conv2D(4, 3, activation="relu")(x))
    x = norm(name="second")(x)
    x = layers.Dense(2)(layers.GlobalAveragePooling2D()(x))
    return m.randomize(keras.Model(inputs, x))


def quietly(model, data, **kwargs):
    return recalibrate(model, data, verbose=0, **kwargs)


def weight(layer, name):
    return m.numpy(getattr(layer, name))


def over_positions(x):
    return x.reshape(-1, x.shape[-1]).astype("float64")


@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_the_input(name):
    """The first layer's are those of the data, whatever the batches are."""
    model = network(NORMS[name])
    x = m.images(23, 6, 6, 3) * 3 + 100
    assert quietly(model, x, batch_size=5) is model
    layer, flat = model.get_layer("first"), over_positions(x)
    mean, variance = flat.mean(0), flat.var(0)
    np.testing.assert_allclose(weight(layer, "moving_mean"), mean, rtol=1e-6)
    if name in ("bn", "noisy_bn"):
        np.testing.assert_allclose(
            weight(layer, "moving_variance"), variance, rtol=1e-4
        )
    elif name == "lp":
        norm = np.abs(flat).mean(0)
        np.testing.assert_allclose(weight(layer, "moving_norm"), norm, rtol=1e-5)
    else:
        beta = weight(layer, "beta") if name == "cbn" else 0
        square = np.square(flat - mean + beta).mean(0)
        square = variance if name == "coupled" else square
        np.testing.assert_allclose(weight(layer, "moving_square"), square, rtol=1e-4)
        assert float(weight(layer, "average_weight")) == 1


@pytest.mark.parametrize("name", NORMS)
def test_upstream_layers_use_the_statistics_of_the_batch(name):
    """With one batch, inference afterwards is what the pass saw."""
    model = network(NORMS[name])
    x = m.images(16, 6, 6, 3)
    quietly(model, x, batch_size=16)
    second = model.get_layer("second")
    inside = keras.Model(model.inputs[0], second.input)
    flat = over_positions(m.numpy(inside(x, training=False)))
    np.testing.assert_allclose(
        weight(second, "moving_mean"), flat.mean(0), rtol=1e-3, atol=1e-4
    )
    if name in ("bn", "noisy_bn"):
        np.testing.assert_allclose(
            weight(second, "moving_variance"), flat.var(0), rtol=2e-3, atol=1e-5
        )


@settings(max_examples=5, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3), seed=st.integers(0, 99)
)
def test_batches_of_any_size_combine(sizes, seed):
    model = keras.Sequential(
        [keras.Input((3,)), layers.BatchNormalization(name="bn"), layers.Dense(1)]
    )
    batches = [m.images(n, 3, seed=seed + i) for i, n in enumerate(sizes)]
    quietly(model, batches)
    flat = np.concatenate(batches).astype("float64")
    layer = model.get_layer("bn")
    np.testing.assert_allclose(
        weight(layer, "moving_mean"), flat.mean(0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        weight(layer, "moving_variance"), flat.var(0), rtol=1e-4, atol=1e-6
    )


def test_nothing_else_changes():
    model = network(layers.BatchNormalization)
    model.compile("adam", "mse")
    x, y = m.images(12, 6, 6, 3), np.zeros((12, 2))
    model.fit(x, y, verbose=0)
    kept = [v for v in model.variables if not v.name.startswith("moving_")]
    kept += model.optimizer.variables
    before = [m.numpy(v) for v in kept]
    quietly(model, x)
    for v, old in zip(kept, before):
        np.testing.assert_array_equal(m.numpy(v), old)
    for layer in model.layers:
        assert "call" not in vars(layer)
    model.fit(x, y, verbose=0)


def test_frozen_layers_are_left_alone():
    model = network(layers.BatchNormalization)
    first = model.get_layer("first")
    first.trainable = False
    before = weight(first, "moving_mean")
    x = m.images(8, 6, 6, 3)
    quietly(model, x)
    np.testing.assert_array_equal(weight(first, "moving_mean"), before)
    inside = keras.Model(model.inputs[0], model.get_layer("second").input)
    flat = over_positions(m.numpy(inside(x, training=False)))
    np.testing.assert_allclose(
        weight(model.get_layer("second"), "moving_mean"), flat.mean(0), rtol=1e-3
    )


class Batches(keras.utils.PyDataset):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.x[4 * index : 4 * index + 4], np.zeros(4)


def generator(x):
    while True:
        for start in (0, 4, 8):
            yield x[start : start + 4], np.zeros(4), np.ones(4)


def tf_data(x):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((x, np.zeros(12))).batch(5)


DATA = {
    "array": lambda x: x,
    "with labels": lambda x: (x, np.zeros(12)),
    "with weights": lambda x: (x, np.zeros(12), np.ones(12)),
    "tensor": keras.ops.convert_to_tensor,
    "list": lambda x: [x[:7], x[7:]],
    "list with labels": lambda x: [(x[:7], np.zeros(7)), (x[7:], np.zeros(5))],
    "iterator": lambda x: iter([x[:7], x[7:]]),
    "PyDataset": Batches,
    "tf.data": tf_data,
}


@pytest.mark.parametrize("kind", DATA)
def test_data_of_all_kinds(kind):
    model = keras.Sequential(
        [keras.Input((4, 3)), layers.BatchNormalization(name="bn")]
    )
    x = m.images(12, 4, 3)
    quietly(model, DATA[kind](x))
    np.testing.assert_allclose(
        weight(model.get_layer("bn"), "moving_mean"),
        over_positions(x).mean(0),
        rtol=1e-5,
    )


def test_steps():
    x = m.images(12, 4, 3)
    for data in (generator(x), DATA["list"](x), x):
        model = keras.Sequential(
            [keras.Input((4, 3)), layers.BatchNormalization(name="bn")]
        )
        quietly(model, data, steps=1, batch_size=4 if data is x else None)
        seen = 7 if isinstance(data, list) else 4
        np.testing.assert_allclose(
            weight(model.get_layer("bn"), "moving_mean"),
            over_positions(x[:seen]).mean(0),
            rtol=1e-5,
        )


def test_shared_layers_see_all_their_calls():
    model = m.shared()
    x = m.batch_for(model, 9)
    quietly(model, x, batch_size=4)
    layer = model.get_layer("stem_bn")
    stem = model.get_layer("stem")
    flat = np.concatenate([over_positions(m.numpy(stem(v))) for v in x])
    np.testing.assert_allclose(
        weight(layer, "moving_mean"), flat.mean(0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(weight(layer, "moving_variance"), flat.var(0), rtol=1e-4)


def test_masked_steps_do_not_count():
    model = keras.Sequential(
        [
            keras.Input((5, 3)),
            layers.Masking(),
            layers.BatchNormalization(name="bn"),
            layers.GlobalAveragePooling1D(),
        ]
    )
    x = m.images(6, 5, 3)
    x[:, 3:] = 0
    quietly(model, x, batch_size=4)
    np.testing.assert_allclose(
        weight(model.get_layer("bn"), "moving_mean"),
        over_positions(x[:, :3]).mean(0),
        rtol=1e-5,
    )


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.norm = layers.BatchNormalization()
        self.dense = layers.Dense(2)

    def call(self, x, training=None):
        return self.dense(self.norm(x, training=training))


def test_subclassed_models():
    model = Subclassed()
    x = m.images(12, 3)
    with pytest.raises(ValueError, match="must be built.*'own'"):
        quietly(model, x)
    model(x)
    quietly(model, x)
    np.testing.assert_allclose(
        weight(model.norm, "moving_mean"), x.mean(0), rtol=1e-4, atol=1e-6
    )


def test_a_derived_class_that_computes_something_else():
    class Twice(layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return 2 * super().call(inputs, training=training, mask=mask)

    inputs = keras.Input((4,))
    x = layers.BatchNormalization(name="plain")(Twice(name="twice")(inputs))
    model = m.randomize(keras.Model(inputs, x))
    before, x = model.get_layer("twice").get_weights(), m.images(64, 4)
    expected = m.numpy(model.get_layer("twice")(x, training=False)).mean(0)
    with pytest.warns(UserWarning, match="override `call`.*'twice'"):
        recalibrate(model, x, verbose=0)
    for a, b in zip(model.get_layer("twice").get_weights(), before):
        np.testing.assert_array_equal(a, b)
    mean = m.numpy(model.get_layer("plain").moving_mean)
    np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-5)


def test_batch_renormalization():
    model = keras.Sequential(
        [keras.Input((3,)), layers.BatchNormalization(renorm=True, name="bn")]
    )
    x = m.images(12, 3)
    quietly(model, x)
    layer = model.get_layer("bn")
    deviation = np.sqrt(x.var(0) + layer.epsilon)
    np.testing.assert_allclose(weight(layer, "renorm_stddev"), deviation, rtol=1e-5)
    np.testing.assert_allclose(weight(layer, "moving_stddev"), deviation, rtol=1e-5)


def test_bad_input():
    with pytest.raises(ValueError, match="Keras model"):
        recalibrate(layers.Dense(2), np.zeros((1, 1)))
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(1)], name="plain")
    with pytest.raises(ValueError, match="not frozen.*'plain'"):
        recalibrate(plain, np.zeros((1, 3)))
    model = m.sequential()
    for data in (None, "images", 3, object(), []):
        with pytest.raises(ValueError, match="Argument `data` must be"):
            quietly(model, data)


def test_few_batches_and_many_are_measured_alike():
    """A few run eagerly on TensorFlow, and with a cheap compilation on JAX."""
    model = network(layers.BatchNormalization)
    norm = model.get_layer("first")
    x = m.images(40, 6, 6, 3)
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    parts = [x[i : i + 4] for i in range(0, 40, 4)]
    for data, options in (
        (x, {"batch_size": 8}),
        (x, {"batch_size": 4}),
        (x, {"batch_size": 4, "steps": 10}),
        (parts, {}),
        (parts[:5] + [x[20:]], {}),
        (iter(parts), {}),
    ):
        norm.moving_mean.assign(np.zeros(3))
        quietly(model, data, **options)
        for name, expected in (("moving_mean", mean), ("moving_variance", variance)):
            np.testing.assert_allclose(weight(norm, name), expected, rtol=1e-4)
