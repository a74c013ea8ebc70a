"""Layers whose moving averages follow the learning rate."""

import functools
import numbers
import warnings
import weakref

import keras
from keras import initializers, ops
from keras.optimizers.schedules import LearningRateSchedule
from keras.src.backend import get_stateless_scope

from keras_norms.layers import arguments

UNKNOWN = -1.0


class FollowsLearningRate:
    """Mixin for a `keras.layers.Layer` that needs the learning rate of each step.

    The rate is a scalar weight, `learning_rate`, negative while it is unknown. Either
    it is set, or it follows a schedule inside the compiled training step. The `AMAT`
    callback does one or the other for every such layer of a model.

    A layer calls `build_learning_rate` in `build`, and `learning_rate_of_this_step`
    once in each training call.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.learning_rate = None
        self.step = None
        self._first_rate = UNKNOWN
        self._schedule = None
        self._iterations = None
        self._counted_scope = None
        self._was_told = False

    def set_learning_rate(self, rate):
        """Say which learning rate the coming steps use, also before the layer is built.

        Args:
            rate: Float, or such a scalar tensor; negative for unknown.

        Raises:
            ValueError: If it is not a finite number.
        """
        is_number = isinstance(rate, numbers.Real)
        is_scalar = not is_number and getattr(rate, "shape", None) == ()
        if is_scalar and arguments.is_numeric(rate):
            rate = float(ops.convert_to_numpy(rate))
        self._first_rate = arguments.number("rate", rate)
        self._was_told = True
        if self.built:
            self.learning_rate.assign(self._first_rate)

    def follow(self, schedule=None, iterations=None):
        """Say whether the learning rate follows a schedule.

        Args:
            schedule: A `keras.optimizers.schedules.LearningRateSchedule` that the layer
                evaluates in each training step, or `None`: the rate is the one that was
                set.
            iterations: The optimizer's counter, where a training step can read it.
                Otherwise the layer owns a counter, the weight `step`.

        Returns:
            Whether a compiled training function must be made again.

        Raises:
            ValueError: If an argument is of another class.
        """
        if not isinstance(schedule, (LearningRateSchedule, type(None))):
            raise arguments.wrong(
                "schedule", "a LearningRateSchedule, or None", schedule
            )
        if not isinstance(iterations, (keras.Variable, type(None))):
            raise arguments.wrong("iterations", "a keras.Variable, or None", iterations)
        self._was_told = True
        if schedule is self._schedule and iterations is _referent(self._iterations):
            return False
        counts = schedule is not None and iterations is None
        if counts and self.built and self.step is None:
            self._tracker.unlock()
            self._add_step()
            self._tracker.lock()
        self._schedule = schedule
        # A variable in an attribute would become a weight of this layer.
        self._iterations = None if iterations is None else weakref.ref(iterations)
        return True

    def build_learning_rate(self):
        """Make the weights."""
        self.learning_rate = self._add_scalar(
            "learning_rate", self._first_rate, self.statistics_dtype
        )
        if self._schedule is not None and self._iterations is None:
            self._add_step()

    def _add_step(self):
        self.step = self._add_scalar("step", 0, "int32")

    def _add_scalar(self, name, value, dtype):
        return self.add_weight(
            name=name,
            shape=(),
            initializer=initializers.Constant(value),
            dtype=dtype,
            trainable=False,
            autocast=False,
            aggregation="none",  # TensorFlow replicas all compute the same
        )

    def learning_rate_of_this_step(self):
        """The rate as a scalar; moves on along the schedule, if there is one."""
        if not self._was_told:
            _explain_amat_once()
        if self._schedule is None:
            return self.learning_rate
        if self._iterations is not None:
            iterations = self._iterations()
            if iterations is not None:
                self.learning_rate.assign(self._schedule(iterations))
            return self.learning_rate
        # A step is one stateless scope, however often it calls this layer.
        scope = get_stateless_scope()
        if scope is not None and scope is not _referent(self._counted_scope):
            self._counted_scope = weakref.ref(scope)
            self.learning_rate.assign(self._schedule(self.step))
            self.step.assign(self.step + 1)
        return self.learning_rate

    def save_own_variables(self, store):
        # By name, and without `step`: AMAT takes it from the optimizer when it trains.
        for variable in self.weights:
            if variable is not self.step:
                store[variable.name] = variable

    def load_own_variables(self, store):
        for variable in self.weights:
            if variable is self.step:
                continue
            if variable.name not in store:
                raise ValueError(
                    f"Layer '{self.name}' expected a weight named '{variable.name}'. "
                    f"Received: {sorted(store.keys())}"
                )
            variable.assign(store[variable.name])


def _referent(reference):
    return None if reference is None else reference()


@functools.cache
def _explain_amat_once():
    warnings.warn(
        "CBN is trained without a learning rate, so it normalises with the statistics "
        "of each batch alone. Pass `callbacks=[keras_norms.AMAT()]` to `fit()` to "
        "switch its adaptive moving averages (AMAT) on, or call "
        "`layer.set_learning_rate(rate)` in a training loop of your own.",
        stacklevel=4,
    )
