"""AMAT: the rate CBN used in each step is the one the optimizer used in that step.

Both are read off a trained model. Batch number t holds a one in channel t and nothing
else, so that channel t of a moving mean keeps what entered in step t, and row t of a
kernel with gradient 1 keeps what the optimizer subtracted in step t.
"""

import copy
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from keras import ops
from keras.optimizers.schedules import CosineDecay, PiecewiseConstantDecay

from keras_norms import AMAT, CBN

BACKEND = keras.backend.backend()
MOST_STEPS = 12
PER_EPOCH = 3

PIECEWISE = PiecewiseConstantDecay([1, 3, 7], [0.4, 0.3, 0.2, 0.1])
COSINE = CosineDecay(0.1, decay_steps=8, warmup_target=0.5, warmup_steps=3)

graph_backends = pytest.mark.skipif(BACKEND == "torch", reason="PyTorch runs eagerly")
tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")
both_schedules = pytest.mark.parametrize("schedule", [PIECEWISE, COSINE], ids=type)


class OneHot(keras.utils.PyDataset):
    """Batch `start + epoch * PER_EPOCH + i`: a one in the channel of that number."""

    def __init__(self, start, time):
        super().__init__()
        self.start, self.time, self.epoch = start, time, 0

    def __len__(self):
        return PER_EPOCH

    def __getitem__(self, i):
        x = np.zeros((2, *self.time, MOST_STEPS), "float32")
        x[..., (self.start + self.epoch * PER_EPOCH + i) % MOST_STEPS] = 1
        return x, np.zeros((2, 1), "float32")


class Epoch(keras.callbacks.Callback):
    """Tells the data the epoch, also when a backup decides where to start."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch, logs=None):
        self.data.epoch = epoch


def fit(model, *callbacks, epochs=2, start=0, time=(), **kwargs):
    data = OneHot(start, time)
    callbacks = [*callbacks, Epoch(data)]
    model.fit(
        data, epochs=epochs, callbacks=callbacks, shuffle=False, verbose=0, **kwargs
    )
    return model


def branches(norm, time=()):
    """A model that uses `norm` but learns only the kernel, with gradient 1."""
    x = inputs = keras.Input((*time, MOST_STEPS))
    unused = ops.sum(norm(x), axis=tuple(range(1, len(x.shape))))
    for _ in time:
        x = x[:, 0]
    y = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(x)
    return keras.Model(inputs, y + 0 * unused[:, None])


def mean_output(y_true, y_pred):
    return ops.mean(y_pred, axis=-1)


def compiled(model, rate, **kwargs):
    """`model` with plain SGD, or with the optimizer given instead of a rate."""
    is_optimizer = isinstance(rate, keras.optimizers.Optimizer)
    optimizer = rate if is_optimizer else keras.optimizers.SGD(rate)
    model.compile(optimizer, mean_output, **kwargs)
    return model


def recorder(rate, **kwargs):
    """A compiled model and its CBN layer."""
    norm = CBN(omega=1)
    return compiled(branches(norm), rate, **kwargs), norm


def told(norm, calls=1):
    """The rates of the first steps, from the averages of a layer."""
    shares = ops.convert_to_numpy(norm.moving_mean).astype("float64")
    shares *= ops.convert_to_numpy(norm.average_weight)
    rates, later = [], 1.0
    for share in reversed(shares):
        entered = share / later
        later *= 1 - entered
        rates.append((1 - (1 - entered) ** (1 / calls)) / norm.omega)
    return np.array(rates[::-1])


def used(model):
    """The rates of the first steps, from the kernel that the optimizer moved."""
    kernel = next(w for w in model.trainable_weights if w.name == "kernel")
    return -ops.convert_to_numpy(kernel)[:, 0]


def padded(rates):
    """`rates`, and 0 for the steps that were not taken."""
    return [float(rate) for rate in rates] + [0] * (MOST_STEPS - len(rates))


def close(rates, expected):
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-6)


def check(model, norm, expected):
    """The layer and the optimizer used the expected rates."""
    close(used(model), padded(expected))
    close(told(norm), padded(expected))


def rates_of(schedule, steps):
    return [schedule(step) for step in steps]


WAYS = [{}, {"run_eagerly": True}]
if BACKEND != "torch":
    WAYS += [{"jit_compile": True}, {"steps_per_execution": 3}]
ways = pytest.mark.parametrize("way", WAYS, ids=str)


@ways
def test_constant_rate(way):
    model, norm = recorder(0.3, **way)
    check(fit(model, AMAT()), norm, [0.3] * 6)


@ways
@both_schedules
def test_schedule(schedule, way):
    model, norm = recorder(schedule, **way)
    check(fit(model, AMAT(), epochs=4), norm, rates_of(schedule, range(12)))


@graph_backends
def test_executions_that_straddle_epochs():
    model, norm = recorder(PIECEWISE, steps_per_execution=2)
    check(fit(model, AMAT(), epochs=3), norm, rates_of(PIECEWISE, range(9)))


@pytest.mark.parametrize("amat_first", [True, False])
def test_learning_rate_scheduler(amat_first):
    model, norm = recorder(0.5)
    callbacks = [
        AMAT(),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.4 / (epoch + 1)),
    ]
    fit(model, *callbacks[:: 1 if amat_first else -1], epochs=3)
    check(model, norm, [0.4] * 3 + [0.2] * 3 + [0.4 / 3] * 3)


@pytest.mark.parametrize("amat_first", [True, False])
def test_reduce_on_plateau(amat_first):
    model, norm = recorder(0.4)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1e3)
    fit(model, *[AMAT(), plateau][:: 1 if amat_first else -1], epochs=3)
    check(model, norm, [0.4] * 6 + [0.2] * 3)


class RateAfterBatch(keras.callbacks.Callback):
    """Assigns a new rate after some steps of the first epoch."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def on_train_batch_end(self, batch, logs=None):
        if batch in self.rates:
            self.model.optimizer.learning_rate = self.rates.pop(batch)


@pytest.mark.parametrize("amat_first", [True, False])
def test_rate_changed_between_batches(amat_first):
    model, norm = recorder(0.5)
    callbacks = [AMAT(), RateAfterBatch({0: 0.4, 1: 0.3})]
    fit(model, *callbacks[:: 1 if amat_first else -1])
    check(model, norm, [0.5, 0.4] + [0.3] * 4)


@graph_backends
def test_rate_changed_between_executions():
    model, norm = recorder(0.5, steps_per_execution=2)
    fit(model, AMAT(), RateAfterBatch({1: 0.4}))
    check(model, norm, [0.5] * 2 + [0.4] * 4)


@pytest.mark.parametrize("rate", [0.3, PIECEWISE], ids=["constant", "schedule"])
def test_loss_scale_optimizer(rate):
    inner = keras.optimizers.SGD(rate)
    model, norm = recorder(keras.optimizers.LossScaleOptimizer(inner))
    expected = rates_of(PIECEWISE, range(6)) if rate is PIECEWISE else [0.3] * 6
    check(fit(model, AMAT()), norm, expected)


def test_gradient_accumulation():
    optimizer = keras.optimizers.SGD(PIECEWISE, gradient_accumulation_steps=2)
    model, norm = recorder(optimizer)
    fit(model, AMAT())
    close(told(norm), padded(rates_of(PIECEWISE, range(6))))
    # An update is half the rate for each of its two batches.
    close(2 * used(model)[1:6:2], told(norm)[1:6:2])


@both_schedules
def test_a_second_fit_goes_on(schedule):
    model, norm = recorder(schedule)
    fit(model, AMAT(), epochs=1)
    fit(model, AMAT(), epochs=1, start=3)
    fit(model, AMAT(), initial_epoch=2, epochs=4)
    check(model, norm, rates_of(schedule, range(12)))


def test_a_second_fit_sees_a_new_constant_rate():
    model, norm = recorder(0.4)
    amat = AMAT()
    fit(model, amat, epochs=1)
    model.optimizer.learning_rate = 0.2
    fit(model, amat, epochs=2, initial_epoch=1)
    check(model, norm, [0.4] * 3 + [0.2] * 3)


@pytest.mark.parametrize("rate", [0.3, PIECEWISE], ids=["constant", "schedule"])
def test_a_first_fit_without_amat(rate):
    model, norm = recorder(rate)
    fit(model, epochs=1)
    # Without a rate the averages follow `momentum`, 0.99.
    close(told(norm), padded([0.01] * 3))
    fit(model, AMAT(), initial_epoch=1)
    expected = rates_of(PIECEWISE, range(6)) if rate is PIECEWISE else [0.3] * 6
    close(used(model), padded(expected))
    close(told(norm), padded([0.01] * 3 + expected[3:]))


def test_recompile_from_schedule_to_constant_and_back():
    model, norm = recorder(PIECEWISE)
    fit(model, AMAT(), epochs=1)
    fit(compiled(model, 0.25), AMAT(), epochs=1, start=3)
    fit(compiled(model, COSINE), AMAT(), epochs=1, start=6)
    expected = rates_of(PIECEWISE, range(3)) + [0.25] * 3 + rates_of(COSINE, range(3))
    check(model, norm, expected)


class Stop(Exception):
    """An interruption."""


class StopAfter(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Stop


@pytest.mark.parametrize("amat_first", [True, False])
@pytest.mark.parametrize("rate", [0.3, PIECEWISE], ids=["constant", "schedule"])
def test_backup_and_restore_in_a_fresh_model(tmp_path, rate, amat_first):
    def callbacks():
        both = [AMAT(), keras.callbacks.BackupAndRestore(tmp_path)]
        return both[:: 1 if amat_first else -1]

    with pytest.raises(Stop):
        fit(recorder(rate)[0], *callbacks(), StopAfter(2), epochs=4)
    model, norm = recorder(rate)
    fit(model, *callbacks(), epochs=4)
    expected = rates_of(PIECEWISE, range(12)) if rate is PIECEWISE else [0.3] * 12
    check(model, norm, expected)


class Wrapped(keras.layers.Layer):
    """A layer of the user's own that holds a norm."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def call(self, x, training=None):
        return self.norm(x, training=training)


def nested(norm):
    inner = keras.Sequential([keras.Input((MOST_STEPS,)), Wrapped(norm)])
    inputs = keras.Input((MOST_STEPS,))
    return keras.Model(inputs, inner(inputs))


def in_a_list(norm):
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.parts = [{"norm": norm}]

        def call(self, x, training=None):
            return self.parts[0]["norm"](x, training=training)

    return Block()


@pytest.mark.parametrize("place", [Wrapped, nested, in_a_list])
@pytest.mark.parametrize("rate", [0.3, PIECEWISE], ids=["constant", "schedule"])
def test_nested_layers_are_found(place, rate):
    norm = CBN(omega=1)
    model = compiled(branches(place(norm)), rate)
    expected = rates_of(PIECEWISE, range(6)) if rate is PIECEWISE else [0.3] * 6
    check(fit(model, AMAT()), norm, expected)


class Twice(keras.layers.Layer):
    """Calls the same norm two times, out of sight of any graph."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def call(self, x, training=None):
        return self.norm(x, training=training) + self.norm(x, training=training)


def twice_in_a_graph(norm):
    inputs = keras.Input((MOST_STEPS,))
    return keras.Model(inputs, norm(inputs) + norm(inputs))


def twice_nested(norm):
    inputs = keras.Input((MOST_STEPS,))
    inner = keras.Sequential([keras.Input((MOST_STEPS,)), norm])
    return keras.Model(inputs, inner(inputs) + inner(inputs))


def check_twice(place, **way):
    norm = CBN(omega=0.2)
    model = fit(compiled(branches(place(norm)), PIECEWISE, **way), AMAT(), epochs=3)
    close(used(model), padded(rates_of(PIECEWISE, range(9))))
    close(told(norm, calls=2), used(model))


@pytest.mark.parametrize("place", [Twice, twice_in_a_graph, twice_nested])
def test_shared_layer_with_a_schedule(place):
    check_twice(place)


@ways
def test_shared_layer_however_compiled(way):
    check_twice(Twice, **way)


@pytest.mark.parametrize("rate", [0.3, PIECEWISE], ids=["constant", "schedule"])
def test_time_distributed(rate):
    norm = CBN(omega=0.2)
    model = branches(keras.layers.TimeDistributed(norm), time=(3,))
    fit(compiled(model, rate), AMAT(), time=(3,), epochs=3)
    expected = rates_of(PIECEWISE, range(9)) if rate is PIECEWISE else [0.3] * 9
    close(used(model), padded(expected))
    close(told(norm, calls=3), used(model))


@pytest.mark.parametrize("rate", [0.3, PIECEWISE], ids=["constant", "schedule"])
def test_unbuilt_sequential(rate):
    norm = CBN(omega=1)
    model = compiled(keras.Sequential([norm, keras.layers.Dense(1)]), rate)
    fit(model, AMAT())
    expected = rates_of(PIECEWISE, range(6)) if rate is PIECEWISE else [0.3] * 6
    close(told(norm), padded(expected))


class Subclassed(keras.Model):
    """A model that makes its layers when it is made, or when it is built."""

    def __init__(self, late):
        super().__init__()
        self.norm = None
        if not late:
            self._make_layers()

    def _make_layers(self):
        self.norm = CBN(omega=1)
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")

    def build(self, shape):
        if self.norm is None:
            self._make_layers()
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x, training=None):
        unused = ops.sum(self.norm(x, training=training), -1, keepdims=True)
        return self.dense(x) + 0 * unused


@pytest.mark.parametrize("rate", [0.3, PIECEWISE], ids=["constant", "schedule"])
@pytest.mark.parametrize("late", [False, True])
def test_unbuilt_subclassed_model(rate, late):
    model = fit(compiled(Subclassed(late), rate), AMAT())
    expected = rates_of(PIECEWISE, range(6)) if rate is PIECEWISE else [0.3] * 6
    close(used(model), padded(expected))
    if late and BACKEND == "tensorflow":
        expected[0] = 0.01  # Made after the step began: `momentum` as without a rate.
    close(told(model.norm), padded(expected))


def test_a_frozen_layer_does_not_lose_count():
    norm = CBN(omega=1, center=False, scale=False)
    norm.trainable = False
    model = compiled(branches(norm), PIECEWISE)
    fit(model, AMAT(), epochs=1)
    norm.trainable = True
    fit(compiled(model, model.optimizer), AMAT(), initial_epoch=1)
    close(told(norm), padded([0] * 3 + rates_of(PIECEWISE, range(3, 6))))


def test_evaluation_does_not_count_as_a_step():
    model, norm = recorder(PIECEWISE)
    fit(model, AMAT(), validation_data=OneHot(0, ()))
    model.evaluate(OneHot(0, ()), verbose=0)
    fit(model, AMAT(), initial_epoch=2, epochs=3)
    check(model, norm, rates_of(PIECEWISE, range(9)))


@pytest.mark.parametrize("after_fit", [False, True])
def test_copies_serve_other_models(after_fit):
    original = AMAT()
    if after_fit:
        fit(recorder(0.5)[0], original)
    duplicate = copy.deepcopy(original)
    assert duplicate is not original
    assert duplicate.model is None
    model, norm = recorder(PIECEWISE)
    check(fit(model, duplicate), norm, rates_of(PIECEWISE, range(6)))


def test_one_callback_serves_one_model_after_another():
    amat = AMAT()
    for rate in (0.4, 0.4, 0.2):
        model, norm = recorder(rate)
        check(fit(model, amat, epochs=1), norm, [rate] * 3)


def test_the_last_rate_stays():
    model, norm = recorder(PIECEWISE)
    fit(model, AMAT(), epochs=3)
    np.testing.assert_allclose(float(norm.learning_rate), 0.1, rtol=1e-6)


def test_layers_share_no_array():
    model = keras.Sequential([keras.Input((MOST_STEPS,))])
    for _ in range(3):
        model.add(CBN())
    model.add(keras.layers.Dense(1))
    for rate in (0.3, PIECEWISE):
        fit(compiled(model, rate), AMAT(), epochs=2)
        fit(model, AMAT(), epochs=3)
    if BACKEND == "jax":
        scalars = [v.value for v in model.non_trainable_variables if not v.shape]
        buffers = [scalar.unsafe_buffer_pointer() for scalar in scalars]
        assert len(set(buffers)) == len(scalars) == 12


def test_a_model_without_cbn_gets_a_warning():
    model = compiled(branches(keras.layers.BatchNormalization()), 0.1)
    with pytest.warns(UserWarning, match="no CBN layer"):
        fit(model, AMAT())


def test_an_optimizer_is_needed():
    model = branches(CBN())
    model.compile(loss=mean_output, optimizer=None)
    amat = AMAT()
    amat.set_model(model)
    with pytest.raises(
        ValueError, match="compiled with an optimizer.*Received: model="
    ):
        amat.on_train_begin()


def test_a_compiled_model_is_needed():
    amat = AMAT()
    amat.set_model(branches(CBN()))
    with pytest.raises(ValueError, match="compiled with an optimizer"):
        amat.on_train_begin()


REPLICAS = """
    import numpy as np
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    from tests.test_amat import *

    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model, norm = recorder(PIECEWISE)
    x = np.repeat(np.eye(MOST_STEPS, dtype="float32")[:6], 2, axis=0)
    for part in (x[:6], x[6:]):
        model.fit(
            part, part[:, :1], 2, 1, verbose=0, shuffle=False, callbacks=[AMAT()]
        )
    check(model, norm, rates_of(PIECEWISE, range(6)))
    assert ops.convert_to_numpy(model.optimizer.iterations) == 6
    assert model.distribute_strategy.num_replicas_in_sync == 2
"""


@tensorflow_only
def test_replicas():
    script = textwrap.dedent(REPLICAS)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
