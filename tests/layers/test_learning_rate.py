"""CBN in training loops of one's own: the rate of each step is the optimizer's."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms import AMAT, CBN
from tests.support.autodiff import training_step
from tests.support.backend import BACKEND, has_float64, jax_only, numpy
from tests.support.rates import (
    EAGER,
    MOST_STEPS,
    PIECEWISE,
    XLA,
    Twice,
    branches,
    check,
    compiled,
    fit,
    rates_of,
    recorder,
    ways,
)

not_jax = pytest.mark.skipif(BACKEND == "jax", reason="JAX has its own rule")
X = np.eye(4, MOST_STEPS, dtype="float32")


class SetsTheRate(keras.Model):
    """A model whose training step tells its norm the optimizer's learning rate."""

    def train_step(self, *arguments):
        if BACKEND != "jax":
            self.norm.set_learning_rate(self.optimizer.learning_rate)
            return super().train_step(*arguments)
        (trainable, rest, optimizer, metrics), data = arguments
        mapping = zip(self.non_trainable_variables, rest)
        mapping = [*mapping, *zip(self.optimizer.variables, optimizer)]
        with keras.StatelessScope(mapping) as scope:
            self.norm.set_learning_rate(self.optimizer.learning_rate)
        rest = [scope.get_current_value(v) for v in self.non_trainable_variables]
        return super().train_step((trainable, rest, optimizer, metrics), data)


def custom(rate, cls=SetsTheRate, **way):
    norm = CBN(omega=1)
    plain = branches(norm)
    model = cls(plain.inputs, plain.outputs)
    model.norm = norm
    return compiled(model, rate, **way), norm


@ways({}, later=[EAGER, XLA])
def test_a_train_step_sets_the_rate(way):
    model, norm = custom(0.5, **way)
    halve = keras.callbacks.LearningRateScheduler(lambda epoch: 0.4 / (epoch + 1))
    fit(model, halve)
    fit(compiled(model, PIECEWISE, **way), first=2)
    check(model, norm, [0.4] * 3 + [0.2] * 3 + rates_of(PIECEWISE, range(6)))


@jax_only
def test_a_compiled_step_on_jax_needs_the_state():
    class Naive(SetsTheRate):
        def train_step(self, state, data):
            self.norm.set_learning_rate(self.optimizer.learning_rate)
            return keras.Model.train_step(self, state, data)

    with pytest.raises(ValueError, match="StatelessScope.*AMAT"):
        fit(custom(0.5, Naive)[0])


@pytest.mark.parametrize("rate", [np.nan, np.inf])
def test_a_rate_that_is_no_number_is_refused(rate):
    for kind in (float, np.float32, ops.convert_to_tensor, keras.Variable):
        with pytest.raises(ValueError, match="`rate`.*finite.*Received: rate="):
            CBN().set_learning_rate(kind(rate))
    with pytest.raises(ValueError, match="`rate`.*layer.follow.schedule"):
        CBN().set_learning_rate(PIECEWISE)


# Schedules


def test_follow_says_what_must_be_compiled_again():
    norm, counter = CBN(), keras.Variable(0, trainable=False)
    for given in ((), (PIECEWISE,), (PIECEWISE, counter), (PIECEWISE, counter, 2)):
        assert [norm.follow(*given) for _ in range(2)] == [given != (), False]


def test_the_rate_stays_where_the_optimizer_is_gone():
    norm = CBN()
    norm.set_learning_rate(0.5)
    norm.follow(PIECEWISE, keras.Variable(0, trainable=False))
    norm(X, training=True)
    assert float(numpy(norm.learning_rate)) == 0.5


def test_a_rate_that_is_set_ends_a_schedule():
    first = keras.optimizers.SGD(PIECEWISE)
    model, norm = recorder(first)
    fit(model, AMAT(), epochs=1)
    norm.set_learning_rate(0.25)
    fit(compiled(model, 0.25), first=1, epochs=1)
    check(model, norm, rates_of(PIECEWISE, range(3)) + [0.25] * 3)
    assert not norm.follow()


def step_of_ones_own(model, optimizer):
    """A step of training in a loop of one's own."""
    weights = model.trainable_variables
    optimizer.build(weights)
    if BACKEND == "jax":  # The arguments of a step have all state.
        step = training_step(model, ops.mean, "jit_compile")
        return lambda: step(X)
    if BACKEND == "torch":

        def step():
            model.zero_grad()
            ops.mean(model(X, training=True)).backward()
            optimizer.apply([w.value.grad for w in weights])

        return step
    import tensorflow as tf

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = ops.mean(model(X, training=True))
        optimizer.apply(tape.gradient(loss, weights))

    return step


class Again(Twice):
    """Calls the norm once more in the backward pass."""

    def call(self, x, training=None):
        return keras.remat(lambda x: self.norm(x, training=training))(x)


def test_a_schedule_in_a_loop_of_ones_own():
    places = [lambda norm: norm, Twice]
    if BACKEND != "jax":  # Which has its own rule for what `remat` traces.
        places += [Again]
    norms = [CBN() for _ in places]
    model = branches(*(place(norm) for place, norm in zip(places, norms)))
    optimizer = keras.optimizers.SGD(PIECEWISE)
    for norm in norms:  # Before any step, and long after the layers are made.
        norm.follow(PIECEWISE, None if BACKEND == "jax" else optimizer.iterations)
    step = step_of_ones_own(model, optimizer)
    for expected in rates_of(PIECEWISE, range(5)):
        step()
        for norm in norms:
            assert float(numpy(norm.learning_rate)) == pytest.approx(expected)


@not_jax
def test_a_schedule_needs_the_counter():
    norm = CBN(name="own")
    model = branches(norm)
    optimizer = keras.optimizers.SGD(PIECEWISE)
    norm.follow(PIECEWISE)
    before = [numpy(w) for w in model.weights]
    message = "'own'.*cannot count.*iterations=optimizer.iterations"
    with pytest.raises(ValueError, match=message):
        step_of_ones_own(model, optimizer)()
    np.testing.assert_equal([numpy(w) for w in model.weights], before)
    model(X)
    # Where all state is in the arguments of a step, it counts itself.
    step = training_step(model, ops.mean)
    for expected in rates_of(PIECEWISE, range(4)):
        step(X)
        assert float(numpy(norm.learning_rate)) == pytest.approx(expected)


@jax_only
def test_a_counter_that_is_not_in_the_state_is_refused():
    norm = CBN()
    model = branches(norm)
    optimizer = keras.optimizers.SGD(PIECEWISE)
    norm.follow(PIECEWISE, optimizer.iterations)
    with pytest.raises(ValueError, match="not part of the state.*`iterations`"):
        step_of_ones_own(model, optimizer)()
    # One that is in it, is read.
    with keras.StatelessScope([(optimizer.iterations, 4)]):
        norm(X, training=True)
        assert float(norm.learning_rate) == pytest.approx(PIECEWISE(4))


@has_float64
def test_a_rate_that_is_set_before_the_layer_is_built_keeps_its_digits():
    norm = CBN(dtype="float64")
    norm.set_learning_rate(0.1)
    norm.build((None, 2))
    assert numpy(norm.learning_rate) == 0.1
