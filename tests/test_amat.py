"""AMAT: the rate CBN used in each step is the one the optimizer used in that step."""

import copy
import warnings

import keras
import pytest
from keras import layers, ops
from keras.callbacks import BackupAndRestore, LearningRateScheduler, ReduceLROnPlateau

from keras_norms import AMAT, CBN, freeze, unfreeze
from tests.support import rates as r
from tests.support.backend import BACKEND, later, not_torch
from tests.support.rates import COSINE, EAGER, MOST_STEPS, PIECEWISE, TWO_STEPS, XLA

rates = pytest.mark.parametrize("rate", [PIECEWISE, *later(0.3)], ids=type)


class RateAfterBatch(keras.callbacks.Callback):
    """Assigns a new rate after some steps of the first epoch."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def on_train_batch_end(self, batch, logs=None):
        if batch in self.rates:
            self.model.optimizer.learning_rate = self.rates.pop(batch)


@r.ways({}, later=[EAGER, XLA])
@pytest.mark.parametrize("amat_first", [True, False])
def test_callbacks_that_change_the_rate(amat_first, way):
    model, norm = r.recorder(0.5, **way)
    callbacks = [
        AMAT(),
        LearningRateScheduler(lambda epoch, rate: 0.8 * rate),
        RateAfterBatch({0: 0.35, 1: 0.3}),
        ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1e3),
    ]
    r.fit(model, *callbacks[:: 1 if amat_first else -1], epochs=3)
    # The second epoch is no better than the first, after which the rate is halved.
    r.check(model, norm, [0.4, 0.35, 0.3] + [0.24] * 3 + [0.096] * 3)


# Three times two steps, and the rate that the next one would have.
SMALL = keras.optimizers.schedules.PiecewiseConstantDecay([5], [0.01, 1.0])


@pytest.mark.parametrize("rate, alone", [(1.0, True), (0.99, False), (SMALL, False)])
def test_a_warning_of_averages_of_the_last_batch_alone(rate, alone):
    """CBN has `omega` of 1 here, and half the rate where two batches make an update."""
    for steps, stay in (None, False), (2, False), (None, True):
        optimizer = keras.optimizers.SGD(rate, gradient_accumulation_steps=steps)
        model, _ = r.recorder(optimizer)
        if stay:
            freeze(model)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            r.fit(model, AMAT())
        warned = any("recalibrate" in str(each.message) for each in found)
        assert warned == (alone and steps is None and not stay)


@pytest.mark.parametrize(
    "optimizer, rate, steps, better",
    [
        ("AdamW", 0.01, None, "omega=10)"),  # CBN has `omega` of 1 here
        ("Adam", 0.05, 2, "omega=4)"),
        ("Adam", 0.1, None, None),
        ("Nadam", COSINE, None, None),
        ("SGD", 0.01, None, None),
    ],
)
def test_a_warning_of_averages_that_lag_behind_adam(optimizer, rate, steps, better):
    optimizer = getattr(keras.optimizers, optimizer)(rate)
    optimizer.gradient_accumulation_steps = steps
    model, _ = r.recorder(optimizer)
    for change in (lambda model: model), freeze:
        change(model)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            r.fit(model, AMAT())
        said = [str(each.message) for each in found if "lag" in str(each.message)]
        assert len(said) == (better is not None and change is not freeze)
        assert all(better in each for each in said)


def test_weights_are_as_many_after_a_schedule():
    model, _ = r.recorder(COSINE)
    before = model.get_weights()
    r.fit(model, AMAT())
    other, _ = r.recorder(COSINE)
    other.set_weights(model.get_weights())
    model.set_weights(before)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="needs Keras 3.15"
)
def test_an_optimizer_without_a_rate_of_its_own():
    each = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    model, _ = r.recorder(keras.optimizers.MultiOptimizer(each))
    with pytest.raises(ValueError, match="set_learning_rate"):
        r.fit(model, AMAT())


@not_torch
def test_a_rate_changed_between_executions():
    model, norm = r.recorder(0.5, **TWO_STEPS)
    r.fit(model, AMAT(), RateAfterBatch({1: 0.4}))
    r.check(model, norm, [0.5] * 2 + [0.4] * 4)


@rates
def test_optimizers_with_steps_of_their_own(rate):
    expected = r.rates_of(rate, range(6))
    inner = keras.optimizers.SGD(rate)
    model, norm = r.recorder(keras.optimizers.LossScaleOptimizer(inner))
    r.check(r.fit(model, AMAT()), norm, expected)
    model, norm = r.recorder(keras.optimizers.SGD(rate, gradient_accumulation_steps=2))
    r.fit(model, AMAT())
    # The averages of an update span its two batches.
    r.close(r.told(norm), [each / 2 for each in expected])
    assert r.used(model)[1:6:2] == pytest.approx(r.told(norm)[1:6:2], rel=1e-5)


def test_one_fit_after_another():
    norm, frozen = CBN(omega=1), CBN(omega=1, center=False, scale=False)
    frozen.trainable = False
    model, amat = r.compiled(r.branches(norm, frozen), PIECEWISE), AMAT()
    r.fit(model, epochs=1)
    r.fit(model, amat, first=1, epochs=1, validation_data=r.OneHot())
    model.evaluate(r.OneHot(), verbose=0)
    frozen.trainable = True
    r.fit(r.compiled(model, model.optimizer), amat, first=2, epochs=1)
    r.fit(r.compiled(model, 0.25), amat, first=3, epochs=1)
    model.optimizer.learning_rate = 0.2
    r.fit(model, amat, first=4, epochs=1)
    r.fit(r.compiled(model, COSINE), AMAT(), first=5, epochs=1)
    r.fit(model, AMAT(), first=6, epochs=1)
    first, cosine = r.rates_of(PIECEWISE, range(9)), r.rates_of(COSINE, range(6))
    later = [*first[6:], *[0.25] * 3, *[0.2] * 3, *cosine]
    r.close(r.used(model), first[:6] + later)
    # Without a rate the averages follow `momentum`, 0.99.
    r.close(r.told(norm), [0.01] * 3 + first[3:6] + later)
    r.close(r.told(frozen), [0] * 6 + later)
    assert float(ops.convert_to_numpy(norm.learning_rate)) == pytest.approx(cosine[-1])


@rates
@pytest.mark.parametrize("amat_first", [True, *later(False)])
def test_backup_and_restore_in_a_fresh_model(tmp_path, rate, amat_first):
    for epochs in (2, 3):
        model, norm = r.recorder(rate)
        both = [AMAT(), BackupAndRestore(tmp_path, delete_checkpoint=False)]
        r.fit(model, *both[:: 1 if amat_first else -1], epochs=epochs)
    r.check(model, norm, r.rates_of(rate, range(9)))


def over_time(norm):
    inputs = keras.Input((MOST_STEPS,))
    outputs = layers.TimeDistributed(norm)(layers.RepeatVector(3)(inputs))
    return keras.Model(inputs, ops.sum(outputs, axis=1))


def in_a_model(norm):
    return keras.Sequential([keras.Input((MOST_STEPS,)), norm])


# How often each of them calls the norm in a step.
PLACES = {in_a_model: 1, r.Twice: 2, over_time: 3}


@r.ways({}, XLA, TWO_STEPS, later=[EAGER])
def test_every_norm_of_a_model_is_told(way):
    norms = {place: CBN(omega=0.2) for place in PLACES}
    model = r.branches(*(place(norm) for place, norm in norms.items()))
    r.fit(r.compiled(model, 0.3, **way), AMAT(), epochs=1)
    r.fit(r.compiled(model, PIECEWISE, **way), AMAT(), first=1)
    expected = [0.3] * 3 + r.rates_of(PIECEWISE, range(6))
    r.close(r.used(model), expected)
    for place, norm in norms.items():
        r.close(r.told(norm, PLACES[place]), expected)
    if BACKEND == "jax":  # No two share an array, which a step could not donate.
        scalars = [v.value for v in model.non_trainable_variables if not v.shape]
        buffers = {scalar.unsafe_buffer_pointer() for scalar in scalars}
        assert len(buffers) == len(scalars) == 4 * len(norms)


class Late(keras.Model):
    """A model that makes its layers when it is built."""

    def build(self, shape):
        self.norm = CBN(omega=1)
        self.inner = r.branches(self.norm)

    def call(self, x, training=None):
        return self.inner(x, training=training)


@rates
def test_models_that_are_not_built(rate):
    expected, norm = r.rates_of(rate, range(6)), CBN(omega=1)
    r.fit(r.compiled(keras.Sequential([norm, layers.Dense(1)]), rate), AMAT())
    r.close(r.told(norm), expected)
    model = r.fit(r.compiled(Late(), rate), AMAT())
    r.close(r.used(model), expected)
    if BACKEND == "tensorflow":
        expected[0] = 0.01  # Made after the step began: `momentum` as without a rate.
    r.close(r.told(model.norm), expected)


def test_one_callback_serves_one_model_after_another_and_copies_too():
    amat = AMAT()
    for _ in range(2):  # The same rate is told again.
        model, norm = r.recorder(0.4)
        r.check(r.fit(model, amat, epochs=1), norm, [0.4] * 3)
    duplicate = copy.deepcopy(amat)
    assert duplicate is not amat and duplicate.model is None
    model, norm = r.recorder(0.2)
    r.check(r.fit(model, duplicate, epochs=1), norm, [0.2] * 3)


def test_a_model_that_another_optimizer_trains():
    class Own(keras.Sequential):
        def train_step(self, *batch):
            loss = {"loss": ops.zeros(())}
            # On JAX a step takes the state, and gives it back.
            return (loss, batch[0]) if BACKEND == "jax" else loss

    model = Own([keras.Input((4,)), CBN()])
    model.compile()
    said = "`model.optimizer`, which has made no step"
    with pytest.warns(UserWarning, match=said) as caught:
        r.fit(model, AMAT())  # of two epochs
    assert sum(said in str(each.message) for each in caught) == 1
    with warnings.catch_warnings(action="error", category=UserWarning):
        r.fit(freeze(model), AMAT())
        # It skips steps while it looks for its scale.
        unfreeze(model).compile(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        )
        r.fit(model, AMAT())


def test_layers_that_are_made_in_the_first_step():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.unused = CBN()
            self.first, self.second = CBN(), None

        def build(self, shape):
            self.second = CBN()
            for norm in self.first, self.second:
                norm.build(shape)

        def call(self, x, training=None):
            return self.second(self.first(x, training=training), training=training)

    model = r.compiled(Own(), 0.25)
    r.fit(model, AMAT())
    assert [float(norm.learning_rate) for norm in (model.first, model.second)] == [
        0.25
    ] * 2


def test_models_that_amat_cannot_serve():
    amat = AMAT()
    amat.set_model(r.compiled(r.branches(layers.BatchNormalization()), 0.1))
    with pytest.warns(UserWarning, match="no CBN layer"):
        amat.on_train_begin()
    if BACKEND != "torch":  # which takes each step on the host
        amat.set_model(r.compiled(r.branches(CBN()), lambda: 0.1))
        with pytest.raises(ValueError, match="a LearningRateSchedule.*Received: le"):
            amat.on_train_begin()
    amat.set_model(r.branches(CBN()))
    with pytest.raises(ValueError, match="compiled with an optimizer.*Received: mo"):
        amat.on_train_begin()


def test_variables_that_can_be_called(monkeypatch):
    """As those of Keras are with Flax NNX."""
    monkeypatch.setattr(keras.Variable, "__call__", lambda self: self, raising=False)
    model, norm = r.recorder(0.25)
    r.check(r.fit(model, AMAT()), norm, [0.25] * 6)
