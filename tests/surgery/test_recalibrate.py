"""recalibrate: exact statistics of a pass over data, and nothing else changed."""

import inspect

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from keras_norms import CBN, LpNorm, NoisyBN, prune, recalibrate
from tests.support import planted
from tests.support import surgery_models as m
from tests.support.backend import BACKEND, numpy, some
from tests.support.surgery_models import apply, dense

NORMS = {
    "bn": layers.BatchNormalization,
    "noisy_bn": NoisyBN,
    "cbn": CBN,
    "coupled": lambda **kwargs: CBN(decouple=False, rho=2.0, **kwargs),
    "lp": lambda **kwargs: LpNorm(p=1, **kwargs),
}


def network(norm=layers.BatchNormalization):
    return m.model_of(
        (6, 6, 3),
        apply(norm, name="first"),
        apply(layers.Conv2D, 4, 3, activation="relu"),
        apply(layers.Dropout, 0.5),
        apply(norm, name="second"),
        *(apply(layers.GlobalAveragePooling2D), dense(2)),
    )


def one_norm(*shape, **kwargs):
    norm = layers.BatchNormalization(name="bn", **kwargs)
    return keras.Sequential([keras.Input(shape), norm]), norm


def quietly(model, data, **kwargs):
    return recalibrate(model, data, verbose=0, **kwargs)


def over_positions(x):
    return numpy(x).reshape(-1, x.shape[-1]).astype("float64")


def assert_is(layer, name, expected, rtol=1e-5, atol=0.0):
    actual = numpy(getattr(layer, name))
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def assert_measured(layer, *inputs, mean=(1e-5, 1e-6), variance=(1e-4, 1e-6)):
    """Mean and variance are those of all inputs, with these tolerances."""
    flat = np.concatenate([over_positions(x) for x in inputs])
    assert_is(layer, "moving_mean", flat.mean(0), *mean)
    if hasattr(layer, "moving_variance"):
        assert_is(layer, "moving_variance", flat.var(0), *variance)


# Of what other layers make, in float32
INSIDE = {"mean": (1e-3, 1e-4), "variance": (2e-3, 1e-5)}


def read_by(model, name):
    """A model of what a layer reads."""
    return keras.Model(model.inputs[0], model.get_layer(name).input)


@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_layers_one_after_the_other(name):
    """The first layer's are those of the data, whatever the batches are."""
    model = network(NORMS[name])
    x = m.images(23, 6, 6, 3) * 3 + 100
    assert quietly(model, x, batch_size=5) is model
    layer, flat = model.get_layer("first"), over_positions(x)
    mean, variance = flat.mean(0), flat.var(0)
    assert_is(layer, "moving_mean", mean, rtol=1e-6)
    if name in ("bn", "noisy_bn"):
        assert_is(layer, "moving_variance", variance, rtol=1e-4)
    elif name == "lp":
        assert_is(layer, "moving_norm", np.abs(flat).mean(0))
    else:
        beta = numpy(layer.beta) if name == "cbn" else 0
        square = np.square(flat - mean + beta).mean(0)
        square = variance if name == "coupled" else square
        assert_is(layer, "moving_square", square, rtol=1e-4)
        assert float(numpy(layer.average_weight)) == 1
    # It normalises with them: with one batch, inference is what the pass saw.
    x = m.images(16, 6, 6, 3)
    quietly(model, x, batch_size=16)
    assert_measured(model.get_layer("second"), read_by(model, "second")(x), **INSIDE)


@settings(max_examples=5, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3), seed=st.integers(0, 99)
)
def test_batches_of_any_size_combine(sizes, seed):
    model, norm = one_norm(3)
    batches = [m.images(n, 3, seed=seed + i) for i, n in enumerate(sizes)]
    quietly(model, batches)
    assert_measured(norm, *batches)


@pytest.mark.parametrize("batch_size", [8, 4])
def test_few_batches_and_many_are_measured_alike(batch_size):
    """A few run eagerly on TensorFlow, and with a cheap compilation on JAX."""
    model, norm = one_norm(6, 6, 3)
    x = m.images(40, 6, 6, 3)
    quietly(model, x, batch_size=batch_size)
    assert_measured(norm, x, mean=(1e-4, 0), variance=(1e-4, 0))


def test_noise_is_not_measured():
    noisy = NoisyBN(noise_at_inference=True, scale=False, center=False)
    model = m.model_of((4,), noisy, apply(layers.BatchNormalization, name="bn"))
    x = m.images(64, 4)
    quietly(model, x, batch_size=64)
    normalized = (x - x.mean(0)) / np.sqrt(x.var(0) + noisy.epsilon)
    assert_measured(model.get_layer("bn"), normalized, mean=(0, 1e-6))


def test_nothing_else_changes():
    """Frozen layers keep their statistics too, and use them."""
    model = network()
    first, second = model.get_layer("first"), model.get_layer("second")
    first.trainable = False
    model.compile("adam", "mse", run_eagerly=BACKEND == "tensorflow")
    x, y = m.images(12, 6, 6, 3), np.zeros((12, 2))
    model.train_on_batch(x, y)
    measured = [id(v) for v in second.non_trainable_variables]
    variables = model.variables + model.optimizer.variables
    kept = [v for v in variables if id(v) not in measured]
    before = [numpy(v).copy() for v in kept]
    quietly(model, x)
    assert all(map(np.array_equal, map(numpy, kept), before))
    assert_measured(second, read_by(model, "second")(x), **INSIDE)
    model.train_on_batch(x, y)


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
        for part in np.split(x, 3):
            yield part, np.zeros(4), np.ones(4)


def tf_data(x):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((x, np.zeros(12))).batch(5)


# Of 12 samples; options, and how many samples are read
DATA = {
    "array": (lambda x: x, {}, 12),
    "with labels": (lambda x: (x, np.zeros(12)), {}, 12),
    "tensor": (keras.ops.convert_to_tensor, {}, 12),
    "list with labels": (lambda x: [(x[:7], x[:7, 0]), (x[7:], x[7:, 0])], {}, 12),
    "iterator": (lambda x: iter([x[:7], x[7:]]), {}, 12),
    "PyDataset": (Batches, {}, 12),
    "tf.data": (tf_data, {}, 12),
    "steps of a generator": (generator, {"steps": 1}, 4),
    "steps of a list": (lambda x: [x[:7], x[7:]], {"steps": 1}, 7),
    "steps of an array": (lambda x: x, {"steps": 1, "batch_size": 4}, 4),
}
LATER = {"array", "tensor", "steps of an array"}
if BACKEND == "jax":
    LATER |= {"list with labels", "iterator", "tf.data", "steps of a list"}


@pytest.mark.parametrize("kind", some(DATA, DATA.keys() - LATER))
def test_data_of_all_kinds(kind):
    """prune takes them too."""
    make, options, count = DATA[kind]
    x = m.images(12, 4, 3)
    model, norm = one_norm(4, 3)
    quietly(model, make(x), **options)
    assert_measured(norm, x[:count])
    model = m.model_of((4, 3), dense(3, "relu"), dense(2))
    found = prune(model, make(x), 0.5, **options)
    expected = prune(model, x[:count], 0.5)
    assert planted.removed(found) == planted.removed(expected)
    assert found[-2:] == pytest.approx(expected[-2:], rel=1e-4)


def test_shared_layers_see_all_their_calls():
    model = m.shared()
    x = m.batch_for(model, 9)
    quietly(model, x, batch_size=4)
    stem = model.get_layer("stem")
    assert_measured(model.get_layer("stem_bn"), *map(stem, x), mean=(1e-4, 1e-5))


def test_masked_steps_do_not_count():
    norm = layers.BatchNormalization()
    stack = keras.Input((5, 3)), layers.Masking(), norm, layers.GlobalAveragePooling1D()
    x = m.images(6, 5, 3)
    x[:, 3:] = 0
    quietly(keras.Sequential(stack), x, batch_size=4)
    assert_measured(norm, x[:, :3])


class Subclassed(keras.Model):
    def __init__(self, norm):
        super().__init__(name="own")
        self.norm, self.dense = norm, layers.Dense(2)

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x, training=None):
        return self.dense(self.norm(x, training=training))


def test_subclassed_models():
    model, x = Subclassed(layers.BatchNormalization()), m.images(12, 3)
    model(x)
    quietly(model, x)
    assert_measured(model.norm, x, mean=(1e-4, 1e-6))


def test_layers_that_are_never_called():
    model = Subclassed(layers.BatchNormalization(name="unused"))
    model.build((None, 3))
    model.call = lambda x, training=None: model.dense(x)
    with pytest.raises(ValueError, match="'unused'.*'own' were not called"):
        quietly(model, m.images(4, 3))


def test_a_derived_class_that_computes_something_else():
    class Twice(layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return 2 * super().call(inputs, training=training, mask=mask)

    plain = apply(layers.BatchNormalization, name="plain")
    model = m.model_of((4,), apply(Twice, name="twice"), plain)
    twice, x = model.get_layer("twice"), m.images(64, 4)
    before, expected = twice.get_weights(), twice(x, training=False)
    with pytest.warns(UserWarning, match="override `call`.*'twice'"):
        quietly(model, x)
    assert all(map(np.array_equal, twice.get_weights(), before))
    assert_measured(model.get_layer("plain"), expected, mean=(1e-4, 1e-5))


@pytest.mark.skipif(
    "renorm" not in inspect.signature(layers.BatchNormalization).parameters,
    reason="Keras has it from 3.14 on",
)
def test_batch_renormalization():
    model, norm = one_norm(3, renorm=True)
    x = m.images(12, 3)
    quietly(model, x)
    deviation = np.sqrt(x.var(0) + norm.epsilon)
    assert_is(norm, "renorm_stddev", deviation)
    assert_is(norm, "moving_stddev", deviation)


def test_bad_models():
    with pytest.raises(ValueError, match="must be built.*'own'"):
        quietly(Subclassed(None), np.zeros((1, 3)))
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(1)], name="plain")
    with pytest.raises(ValueError, match="not frozen.*'plain'"):
        quietly(plain, np.zeros((1, 3)))
