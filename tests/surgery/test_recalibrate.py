"""recalibrate and Recalibrate: exact statistics of data, and nothing else changed."""

import copy
import functools
import inspect

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import AMAT, CBN, LpNorm, NoisyBN, diagnostics
from keras_norms.surgery import Recalibrate, convert, freeze, prune, recalibrate
from keras_norms.surgery.project_weights import scale_invariant_kernels
from tests.support import planted
from tests.support import surgery_models as m
from tests.support.backend import BACKEND, later, numpy, some
from tests.support.surgery_models import apply, dense
from tests.support.wrapped import Damped

NORMS = {
    "bn": layers.BatchNormalization,
    "noisy_bn": lambda **kwargs: NoisyBN(noise_at_inference=True, **kwargs),
    "cbn": CBN,
    "coupled": lambda **kwargs: CBN(decouple=False, rho=2.0, **kwargs),
    "lp": lambda **kwargs: LpNorm(p=1, **kwargs),
}


def network(norm=layers.BatchNormalization):
    conv = apply(layers.Conv2D, 4, 3, activation="relu")
    steps = apply(norm, name="first"), conv, apply(layers.Dropout, 0.5)
    pooling = apply(layers.GlobalAveragePooling2D)
    return m.model_of((6, 6, 3), *steps, apply(norm, name="second"), pooling, dense(2))


def one_norm(*shape, **kwargs):
    norm = layers.BatchNormalization(name="bn", **kwargs)
    return keras.Sequential([keras.Input(shape), norm]), norm


quietly = functools.partial(recalibrate, verbose=0)


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


def assert_second_is_measured(model, x):
    """By what it reads, which other layers make, in float32."""
    layer = model.get_layer("second")
    read = keras.Model(model.inputs[0], layer.input)(x)
    assert_measured(layer, read, mean=(1e-3, 1e-4), variance=(2e-3, 1e-5))


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
    # It normalises with them, without noise: so does inference, with one batch.
    x = m.images(16, 6, 6, 3)
    quietly(model, x, batch_size=16)
    layer.noise_at_inference = False
    assert_second_is_measured(model, x)


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
    assert_second_is_measured(model, x)
    model.train_on_batch(x, y)


class Batches(keras.utils.PyDataset):
    def __init__(self, x):
        super().__init__()
        self.parts = np.split(x, 3)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.parts[index], np.zeros(4)


def generator(x):
    while True:
        for part in np.split(x, 3):
            yield part, np.zeros(4), np.ones(4)


def tf_data(x):
    tf = pytest.importorskip("tensorflow")
    of_five = tf.data.Dataset.from_tensor_slices((x, np.zeros(12))).batch(5)
    return of_five.filter(lambda x, y: True)  # of unknown length


# Of 12 samples; options, and how many samples are read
DATA = {
    "with labels": (lambda x: (x, np.zeros(12)), {}, 12),
    "list with labels": (lambda x: [(x[:7], x[:7, 0]), (x[7:], x[7:, 0])], {}, 12),
    "iterator": (lambda x: iter([x[:7], x[7:]]), {}, 12),
    "PyDataset": (Batches, {}, 12),
    "tf.data": (tf_data, {}, 12),
    "steps of a generator": (generator, {"steps": 1}, 4),
    "steps of a tensor": (ops.convert_to_tensor, {"steps": 1, "batch_size": 4}, 4),
}
LATER = {"list with labels", "iterator", "tf.data"} if BACKEND == "jax" else set()


@pytest.mark.parametrize("kind", some(DATA, DATA.keys() - LATER))
def test_data_of_all_kinds(kind):
    """prune takes them too."""
    make, options, count = DATA[kind]
    x = m.images(12, 4, 3)
    model, norm = one_norm(4, 3)
    quietly(model, make(x), **options)
    assert_measured(norm, x[:count])
    model = m.model_of((4, 3), dense(3, "relu"), dense(2))
    found = prune(model, make(x), gamma=0.5, **options)
    expected = prune(model, x[:count], gamma=0.5)
    assert planted.removed(found) == planted.removed(expected)
    assert found[-2:] == pytest.approx(expected[-2:], rel=1e-4)


def test_a_list_of_batches_of_two_inputs():
    a, b = m.images(8, 3), m.images(8, 3, seed=1)
    inputs = keras.Input((3,)), keras.Input((3,))
    norm = layers.BatchNormalization()
    model = keras.Model(inputs, norm(layers.add(inputs)))
    batches = [((a[i], b[i]), np.zeros(4)) for i in (slice(4), slice(4, 8))]
    for kind in tuple, list:
        quietly(model, [(kind(x), y) for x, y in batches])
        assert_measured(norm, a + b)
        norm.moving_mean.assign(norm.moving_mean + 1)


def two_layers():
    return m.model_of(
        (4,), dense(3, "relu"), apply(layers.BatchNormalization), dense(2)
    )


class Endless(Batches):
    num_batches = None


@pytest.mark.parametrize("make", [Endless, *later(lambda x: tf_data(x).repeat())])
def test_data_without_an_end(make):
    data, model = make(m.images(12, 4)), two_layers()
    for function in (recalibrate, prune, lambda *_: convert(model, CBN, data=data)):
        with pytest.raises(ValueError, match="`data` must have an end"):
            function(model, data)
    with pytest.raises(ValueError, match="`data` must have an end"):
        Recalibrate(data)


def test_activations_that_are_not_finite():
    """An error that changes nothing, and no end of a training that diverged."""
    (x, y), model = batch(), two_layers()
    lost = np.where(x == x[5], np.nan, x)
    before = [numpy(v).copy() for v in model.variables]
    for function in (quietly, lambda *_: convert(model, CBN, data=lost)):
        with pytest.raises(ValueError, match="inputs of layers.*are not"):
            function(model, lost)
    assert all(map(np.array_equal, map(numpy, model.variables), before))
    model.compile(keras.optimizers.SGD(1e30), "mse")
    recalibrated = Recalibrate(x)
    with pytest.warns(UserWarning, match="Recalibrate measured nothing"):
        model.fit(x, y, 16, epochs=2, callbacks=[recalibrated], verbose=0)
    assert recalibrated.history["batches"] == [0, 0, 0]


@pytest.mark.parametrize("batch_size", [4, 1])
def test_shared_layers_see_all_their_calls(batch_size):
    """Few batches run eagerly on TensorFlow, and with a cheap compilation on JAX."""
    model = m.shared()
    x = m.batch_for(model, 9)
    quietly(model, x, batch_size=batch_size)
    stem = model.get_layer("stem")
    assert_measured(model.get_layer("stem_bn"), *map(stem, x), mean=(1e-4, 1e-5))


def test_masked_steps_do_not_count():
    x = m.images(6, 5, 3)
    x[:, 3:] = 0
    norm = layers.BatchNormalization()
    stack = keras.Input((5, 3)), layers.Masking(), norm
    quietly(keras.Sequential(stack), x, batch_size=4)
    assert_measured(norm, x[:, :3])


class Cell(layers.Layer):
    """Of a recurrent layer: it normalises each step."""

    state_size = 3

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        self.norm.build(shape)

    def call(self, inputs, states, training=None):
        outputs = self.norm(inputs, training=training)
        return outputs, [outputs]


def test_layers_in_recurrent_ones():
    """More batches than run eagerly."""
    cell, x = Cell(), m.images(10, 4, 3)
    model = m.model_of((4, 3), apply(layers.RNN, cell))
    quietly(model, x, batch_size=1)
    assert_measured(cell.norm, x)


def test_subclassed_models():
    class Own(keras.Model):
        def call(self, x, training=None):
            return self.norm(x, training=training)

    model, x = Own(name="own"), m.images(12, 3)
    model.norm = layers.BatchNormalization(name="first")
    with pytest.raises(ValueError, match="built keras.Model.*own"):
        quietly(model, x)
    model(x)
    quietly(model, x)
    assert_measured(model.norm, x, mean=(1e-4, 1e-6))
    model.call = lambda x, training=None: x
    with pytest.raises(ValueError, match="model 'own', which does not call .*'first'"):
        quietly(model, x)


def test_a_list_for_a_subclassed_model_of_two_inputs():
    class Two(keras.Model):
        def call(self, xs, training=None):
            return self.norm(xs[0] + xs[1][:, :3], training=training)

    model, xs = Two(), [m.images(12, 3), m.images(12, 4, seed=1)]
    model.norm = layers.BatchNormalization()
    model(xs)
    quietly(model, xs)
    assert_measured(model.norm, xs[0] + xs[1][:, :3], mean=(1e-4, 1e-6))


def test_a_derived_class_that_computes_something_else():
    plain = apply(layers.BatchNormalization, name="plain")
    model = m.model_of((4,), apply(Damped, name="damped"), plain)
    damped, x = model.get_layer("damped"), m.images(64, 4)
    before, expected = damped.get_weights(), damped(x, training=False)
    with pytest.warns(UserWarning, match="'damped'.*override `call`"):
        quietly(model, x)
    assert all(map(np.array_equal, damped.get_weights(), before))
    assert_measured(model.get_layer("plain"), expected, mean=(1e-4, 1e-5))


has_renorm = pytest.mark.skipif(
    "renorm" not in inspect.signature(layers.BatchNormalization).parameters,
    reason="Keras has it from 3.14 on",
)


@has_renorm
def test_batch_renormalization_is_converted_and_pruned():
    """The first training step is that of inference, but for rounding."""
    norm = apply(layers.BatchNormalization, renorm=True)
    model, x = m.model_of((4,), dense(5, "relu"), norm, dense(2)), m.images(64, 4)
    quietly(model, x)
    model.layers[1].bias.assign([0.5, -99.0, 0.5, 0.5, 0.5])  # a dead unit
    quietly(model, x)
    for new in (
        convert(convert(model, CBN), layers.BatchNormalization(renorm=True)),
        convert(model, "ws"),
        prune(model, x).model,
    ):
        y = new(x, training=False)
        np.testing.assert_allclose(numpy(new(x, training=True)), numpy(y), atol=5e-3)


@has_renorm
def test_renormalization_that_is_frozen_is_a_map():
    norm = layers.BatchNormalization(renorm=True, trainable=False, name="bn")
    model, x = m.model_of((4,), m.dense(5), norm), m.images(16, 4)
    found = diagnostics.effective_weights(model, x)["bn"]
    expected = numpy(model(x))
    np.testing.assert_allclose(x @ found.kernel + found.bias, expected, 1e-4, 1e-5)


@has_renorm
def test_what_renormalization_is_not():
    norm = layers.BatchNormalization(renorm=True, name="bn")
    model, x = m.model_of((4,), dense(5), norm), m.images(16, 4)
    with pytest.raises(ValueError, match="must have a BatchNormalization of"):
        diagnostics.effective_weights(model, x)
    with pytest.raises(ValueError, match="not with `renorm`"):
        diagnostics.lipschitz_terms(model, "bn", x, x)
    assert not scale_invariant_kernels(model)


@has_renorm
def test_batch_renormalization():
    model, norm = one_norm(3, renorm=True)
    x = m.images(12, 3)
    quietly(model, x)
    deviation = np.sqrt(x.var(0) + norm.epsilon)
    assert_is(norm, "renorm_stddev", deviation)
    assert_is(norm, "moving_stddev", deviation)


class Spy(keras.callbacks.Callback):
    """Checks what a validation and the end of an epoch find."""

    def __init__(self, x):
        super().__init__()
        self.x, self.seen = x, []

    def check(self, *_, logs=None):
        dense, norm = self.model.layers[-2:]
        made = self.x @ numpy(dense.kernel).astype("float64")
        self.seen.append(made)
        assert_measured(norm, made, mean=(0, 1e-4), variance=(1e-3, 0))

    on_test_batch_begin = on_epoch_end = check


def batch():
    x = m.images(48, 4) + 0.7
    return x, np.stack([x[:, 0] * x[:, 1], x[:, 2]], -1)


def compiled(norm=layers.BatchNormalization, **kwargs):
    stack = keras.Input((4,)), layers.Dense(2, use_bias=False), norm()
    model = keras.Sequential(stack)
    model.compile(keras.optimizers.SGD(0.05, **kwargs), "mse")
    return model


@pytest.mark.parametrize("swap_on_epoch", [True, False])
def test_statistics_are_those_of_the_weights(swap_on_epoch, tmp_path):
    """Of a validation, whatever the order is; of two weights two measurements."""
    (x, y), model = batch(), compiled(use_ema=True, ema_momentum=0.9)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
    recalibrate, spy = Recalibrate(x, batch_size=16), Spy(x)
    both = [swap, recalibrate] if swap_on_epoch else [recalibrate, swap]
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    settings = {"batch_size": 16, "validation_batch_size": 48, "verbose": 0}
    settings |= {"callbacks": [*both, spy, saved], "validation_data": (x, y)}
    history = model.fit(x, y, epochs=2, **settings).history
    validated, ended, *_ = spy.seen
    assert swap_on_epoch == np.allclose(validated, ended, atol=1e-5)
    # The last is of the averaged weights, which `fit` leaves in the model.
    epochs = [0, 1] if swap_on_epoch else [0, 0, 1, 1, 1]
    assert recalibrate.history["epoch"] == epochs
    assert recalibrate.history["batches"] == [3] * len(epochs)
    seconds = recalibrate.history["seconds"]
    assert history["recalibration_seconds"][0] == sum(seconds[: len(epochs) // 2])
    spy.check()
    spy.set_model(keras.saving.load_model(tmp_path / "1.keras"))
    spy.check()
    np.testing.assert_allclose(spy.seen[-1], ended, atol=1e-5)


def test_training_is_the_same_without_it():
    """With CBN it depends on the averages."""
    (x, y), weights = batch(), []
    for callbacks in [], [Recalibrate((x, y), every=2)]:
        keras.utils.set_random_seed(0)
        model, both = compiled(CBN), [*callbacks, AMAT()]
        model.fit(x, y, 16, epochs=3, callbacks=both, shuffle=False, verbose=0)
        weights.append(numpy(model.layers[0].kernel))
    np.testing.assert_array_equal(*weights)
    assert callbacks[0].history["epoch"] == [1, 2]


def test_weights_that_do_not_move_get_their_statistics_again():
    (x, y), model = batch(), compiled()
    model.optimizer.learning_rate = 0.0
    recalibrate = Recalibrate(x, batch_size=16)
    model.fit(x, y, 16, epochs=2, callbacks=[recalibrate], verbose=0)
    expected = (x @ numpy(model.layers[0].kernel)).mean(0)
    np.testing.assert_allclose(numpy(model.layers[1].moving_mean), expected, atol=1e-5)


def test_a_copy_has_all_arguments():
    made = copy.deepcopy(given := Recalibrate(batch(), steps=2, batch_size=4, every=3))
    assert made.data is given.data
    assert (made.steps, made.batch_size, made.every) == (2, 4, 3)


def test_when_training_begins():
    with pytest.raises(ValueError, match="`data`"):
        Recalibrate(iter([batch()]))
    (x, y), model = batch(), compiled()
    other = copy.deepcopy(Recalibrate(x[:, :3], steps=2))
    with pytest.raises(ValueError, match="`data` must have the shape"):
        model.fit(x, y, callbacks=[other], verbose=0)
    # Outside of training nothing is measured.
    alone = Recalibrate(x)
    model.evaluate(x, y, callbacks=[alone], verbose=0)
    assert alone.history == {}
    with pytest.raises(ValueError, match="not frozen"):
        freeze(model).fit(x, y, callbacks=[alone], verbose=0)
