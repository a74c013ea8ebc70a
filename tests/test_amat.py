"""AMAT: the rate CBN used in each step is the one the optimizer used in that step."""

import copy

import keras
import pytest
from keras import layers, ops
from keras.callbacks import BackupAndRestore, LearningRateScheduler, ReduceLROnPlateau

from keras_norms import AMAT, CBN
from tests.support.backend import BACKEND, later, not_torch
from tests.support.rates import (
    COSINE,
    EAGER,
    MOST_STEPS,
    PIECEWISE,
    TWO_STEPS,
    XLA,
    OneHot,
    Twice,
    branches,
    check,
    close,
    compiled,
    fit,
    mean_output,
    rates_of,
    recorder,
    told,
    used,
    ways,
)

rates = pytest.mark.parametrize("rate", [PIECEWISE, *later(0.3)], ids=type)


@ways(XLA, TWO_STEPS, later=[EAGER])
def test_schedule(way):
    model, norm = recorder(PIECEWISE, **way)
    check(fit(model, AMAT()), norm, rates_of(PIECEWISE, range(6)))


class RateAfterBatch(keras.callbacks.Callback):
    """Assigns a new rate after some steps of the first epoch."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def on_train_batch_end(self, batch, logs=None):
        if batch in self.rates:
            self.model.optimizer.learning_rate = self.rates.pop(batch)


@ways({}, later=[EAGER, XLA])
@pytest.mark.parametrize("amat_first", [True, False])
def test_callbacks_that_change_the_rate(amat_first, way):
    model, norm = recorder(0.5, **way)
    callbacks = [
        AMAT(),
        LearningRateScheduler(lambda epoch, rate: 0.8 * rate),
        RateAfterBatch({0: 0.35, 1: 0.3}),
        ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1e3),
    ]
    fit(model, *callbacks[:: 1 if amat_first else -1], epochs=3)
    # The second epoch is no better than the first, after which the rate is halved.
    check(model, norm, [0.4, 0.35, 0.3] + [0.24] * 3 + [0.096] * 3)


@not_torch
def test_a_rate_changed_between_executions():
    model, norm = recorder(0.5, **TWO_STEPS)
    fit(model, AMAT(), RateAfterBatch({1: 0.4}))
    check(model, norm, [0.5] * 2 + [0.4] * 4)


@rates
def test_loss_scale_optimizer(rate):
    inner = keras.optimizers.SGD(rate)
    model, norm = recorder(keras.optimizers.LossScaleOptimizer(inner))
    check(fit(model, AMAT()), norm, rates_of(rate, range(6)))


@rates
def test_gradient_accumulation(rate):
    optimizer = keras.optimizers.SGD(rate, gradient_accumulation_steps=2)
    model, norm = recorder(optimizer)
    fit(model, AMAT())
    # The averages of an update span its two batches.
    close(told(norm), [each / 2 for each in rates_of(rate, range(6))])
    assert used(model)[1:6:2] == pytest.approx(told(norm)[1:6:2], rel=1e-5)


def test_one_fit_after_another():
    norm, frozen = CBN(omega=1), CBN(omega=1, center=False, scale=False)
    frozen.trainable = False
    model, amat = compiled(branches(norm, frozen), PIECEWISE), AMAT()
    fit(model, epochs=1)
    fit(model, amat, first=1, epochs=1, validation_data=OneHot())
    model.evaluate(OneHot(), verbose=0)
    frozen.trainable = True
    fit(compiled(model, model.optimizer), amat, first=2, epochs=1)
    fit(compiled(model, 0.25), amat, first=3, epochs=1)
    model.optimizer.learning_rate = 0.2
    fit(model, amat, first=4, epochs=1)
    fit(compiled(model, COSINE), AMAT(), first=5, epochs=1)
    fit(model, AMAT(), first=6, epochs=1)
    first, cosine = rates_of(PIECEWISE, range(9)), rates_of(COSINE, range(6))
    later = [*first[6:], *[0.25] * 3, *[0.2] * 3, *cosine]
    close(used(model), first[:6] + later)
    # Without a rate the averages follow `momentum`, 0.99.
    close(told(norm), [0.01] * 3 + first[3:6] + later)
    close(told(frozen), [0] * 6 + later)
    assert float(ops.convert_to_numpy(norm.learning_rate)) == pytest.approx(cosine[-1])


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


@rates
@pytest.mark.parametrize("amat_first", [True, *later(False)])
def test_backup_and_restore_in_a_fresh_model(tmp_path, rate, amat_first):
    def callbacks():
        both = [AMAT(), BackupAndRestore(tmp_path)]
        return both[:: 1 if amat_first else -1]

    with pytest.raises(KeyboardInterrupt):
        fit(recorder(rate)[0], *callbacks(), Interrupt(), epochs=3)
    model, norm = recorder(rate)
    fit(model, *callbacks(), epochs=3)
    check(model, norm, rates_of(rate, range(9)))


def over_time(norm):
    inputs = keras.Input((MOST_STEPS,))
    outputs = layers.TimeDistributed(norm)(layers.RepeatVector(3)(inputs))
    return keras.Model(inputs, ops.sum(outputs, axis=1))


class Listed(layers.Layer):
    """Keeps the norm in a structure."""

    def __init__(self, norm):
        super().__init__()
        self.parts = [{"norm": norm}]

    def call(self, x, training=None):
        return self.parts[0]["norm"](x, training=training)


def in_two_models(norm):
    inner = keras.Sequential([keras.Input((MOST_STEPS,)), Listed(norm)])
    inputs = keras.Input((MOST_STEPS,))
    return keras.Model(inputs, inner(inputs))


def twice_in_a_graph(norm):
    inputs = keras.Input((MOST_STEPS,))
    return keras.Model(inputs, norm(inputs) + norm(inputs))


# How often each of them calls the norm in a step.
PLACES = {in_two_models: 1, Twice: 2, twice_in_a_graph: 2, over_time: 3}


@ways({}, later=[EAGER, XLA, TWO_STEPS])
def test_every_norm_of_a_model_is_told(way):
    norms = {place: CBN(omega=0.2) for place in PLACES}
    model = branches(*(place(norm) for place, norm in norms.items()))
    fit(compiled(model, 0.3, **way), AMAT(), epochs=1)
    fit(compiled(model, PIECEWISE, **way), AMAT(), first=1)
    expected = [0.3] * 3 + rates_of(PIECEWISE, range(6))
    close(used(model), expected)
    for place, norm in norms.items():
        close(told(norm, PLACES[place]), expected)
    if BACKEND == "jax":  # No two share an array, which a step could not donate.
        scalars = [v.value for v in model.non_trainable_variables if not v.shape]
        buffers = {scalar.unsafe_buffer_pointer() for scalar in scalars}
        assert len(buffers) == len(scalars) == 4 * len(norms)


class Late(keras.Model):
    """A model that makes its layers when it is built."""

    def build(self, shape):
        self.norm = CBN(omega=1)
        self.dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x, training=None):
        unused = ops.sum(self.norm(x, training=training), -1, keepdims=True)
        return self.dense(x) + 0 * unused


@rates
def test_models_that_are_not_built(rate):
    expected, norm = rates_of(rate, range(6)), CBN(omega=1)
    fit(compiled(keras.Sequential([norm, layers.Dense(1)]), rate), AMAT())
    close(told(norm), expected)
    model = fit(compiled(Late(), rate), AMAT())
    close(used(model), expected)
    if BACKEND == "tensorflow":
        expected[0] = 0.01  # Made after the step began: `momentum` as without a rate.
    close(told(model.norm), expected)


def test_one_callback_serves_one_model_after_another_and_copies_too():
    amat = AMAT()
    for _ in range(2):  # The same rate is told again.
        model, norm = recorder(0.4)
        check(fit(model, amat, epochs=1), norm, [0.4] * 3)
    duplicate = copy.deepcopy(amat)
    assert duplicate is not amat and duplicate.model is None
    model, norm = recorder(0.2)
    check(fit(model, duplicate, epochs=1), norm, [0.2] * 3)


def test_models_that_amat_cannot_serve():
    def start(model):
        amat = AMAT()
        amat.set_model(model)
        amat.on_train_begin()

    with pytest.warns(UserWarning, match="no CBN layer"):
        start(compiled(branches(layers.BatchNormalization()), 0.1))
    model = branches(CBN())
    message = "compiled with an optimizer.*Received: model="
    with pytest.raises(ValueError, match=message):
        start(model)
    model.compile(loss=mean_output, optimizer=None)
    with pytest.raises(ValueError, match=message):
        start(model)
