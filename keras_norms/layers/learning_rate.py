"""Layers whose moving averages follow the learning rate."""

import functools
import numbers
import warnings
import weakref
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._types import Tensor
from keras_norms.ops.functions import ops


class FollowsLearningRate(keras.layers.Layer):
    """Base of a layer that needs the learning rate of each step.

    The rate is a scalar weight, `learning_rate`, negative while it is unknown. It is
    either set, or follows a schedule inside the compiled training step. The `AMAT`
    callback does one or the other for every such layer of a model. A subclass calls
    `build_learning_rate` in `build`, and `learning_rate_of_this_step` once in each
    training call.
    """

    statistics_dtype: str  # in which the layer keeps it

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.learning_rate: Any = None
        self.step: Any = None
        self._first_rate = -1.0  # unknown
        self._schedule = None
        self._accumulation_steps = 1
        self._iterations: weakref.ref | None = None
        self._counted_scope: weakref.ref | None = None
        self._is_told = False

    def set_learning_rate(self, rate: Tensor) -> None:
        """Set the learning rate of the coming steps, also before the layer is built.

        In a compiled step, such as a custom `train_step`, call
        `layer.set_learning_rate(optimizer.learning_rate)` before the model: it assigns
        the rate each time that the step runs. On JAX, where the step holds all state,
        this needs a `keras.StatelessScope` of that state (docs/guides/loop_jax.md). A
        callback on JAX must read `self.model` first, or the rate is lost within an
        epoch.

        The layer no longer follows a schedule, such as that of an earlier `fit` with
        `AMAT`. Functions compiled before still do: compile the model again.

        Args:
            rate: Float, scalar tensor or `keras.Variable`; negative means unknown. For
                a schedule, call `follow`.

        Raises:
            ValueError: If the rate is known and not a finite number; if it is known
                only when a compiled step runs and the layer is not built; in a compiled
                step on JAX, without a `keras.StatelessScope`.
        """
        if isinstance(rate, LearningRateSchedule):
            wanted = "a number. For a schedule call `layer.follow(schedule)`"
            raise arguments.wrong("rate", wanted, rate)
        if self.built:  # Not before: the check would start JAX.
            self._check_can_assign(rate)
        is_tensor = (
            not isinstance(rate, numbers.Real)
            and getattr(rate, "shape", None) == ()
            and arguments.is_numeric(rate)
            and keras.backend.standardize_dtype(rate.dtype) != "bool"
        )
        value = _value(rate) if is_tensor else rate
        if value is not None or not is_tensor:
            self._first_rate = rate = arguments.number("rate", value)
        elif not self.built:
            raise ValueError(
                f"Layer '{self.name}' must be built before a compiled step sets its "
                "learning rate to a tensor. Call the model on a batch first. "
                f"Received: rate={arguments.shown(rate)}"
            )
        self._remember(_is_told=True)
        if self._schedule is not None:
            self.follow(None)
        if self.built:
            if not is_tensor:
                rate = ops.full((), rate, self.statistics_dtype)
            self.learning_rate.assign(rate)

    def _check_can_assign(self, rate):
        """Raise where JAX would lose what is assigned, or keep it forever."""
        if keras.backend.backend() != "jax" or _value(ops.zeros(())) is not None:
            return
        scope = _keras.get_stateless_scope()
        if scope is None:
            raise ValueError(
                f"The learning rate of layer '{self.name}' cannot be set in this "
                "compiled step: on JAX its state is in its arguments. Set it in a "
                "`keras.StatelessScope` with `model.non_trainable_variables` and "
                "`optimizer.variables` (docs/guides/loop_jax.md), or pass "
                "`callbacks=[keras_norms.AMAT()]` to `fit()`."
            )
        if isinstance(rate, keras.Variable):
            self._check_is_state(rate, scope)

    def follow(
        self,
        schedule: LearningRateSchedule | None = None,
        iterations: keras.Variable | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> bool:
        """Let the learning rate follow a schedule, or no longer.

        Args:
            schedule: The layer evaluates it in each training step. `None`: the rate is
                the one that was set.
            iterations: The optimizer's counter, `optimizer.iterations` (with gradient
                accumulation, the first of `optimizer.variables`). On TensorFlow and
                PyTorch a training step needs it, because the layer cannot tell two
                calls in one step from two steps. On JAX leave it out, unless the state
                of the step holds it: there the layer has its own counter, the variable
                `step`, and a step is one `stateless_call` of the model, as in `fit`.
            gradient_accumulation_steps: The optimizer's. The rate of the schedule is
                divided by it: averages then span the batches of one update.

        Returns:
            Whether a compiled training function must be compiled again.

        Raises:
            ValueError: If an argument is of another class; in a training step, if the
                counter is missing or, on JAX, not part of the state.
        """
        if not isinstance(schedule, (LearningRateSchedule, type(None))):
            raise arguments.wrong(
                "schedule", "a LearningRateSchedule, or None", schedule
            )
        if not isinstance(iterations, (keras.Variable, type(None))):
            raise arguments.wrong("iterations", "a keras.Variable, or None", iterations)
        batches = arguments.integer(
            "gradient_accumulation_steps",
            1 if gradient_accumulation_steps is None else gradient_accumulation_steps,
            at_least=1,
        )
        self._is_told = True
        is_same = schedule is self._schedule and batches == self._accumulation_steps
        if is_same and iterations is _referent(self._iterations):
            return False
        counts = schedule is not None and iterations is None
        if counts and self.built and self.step is None:
            with _keras.unlocked(self):
                self.step = self.add_scalar("step", 0, "int32")
        self._schedule, self._accumulation_steps = schedule, batches
        # A variable in an attribute would become a weight of this layer.
        self._iterations = None if iterations is None else weakref.ref(iterations)
        return True

    def build_learning_rate(self) -> None:
        """Make the weights."""
        self.learning_rate = self.add_scalar(
            "learning_rate", self._first_rate, self.statistics_dtype
        )
        if self._schedule is not None and self._iterations is None:
            self.step = self.add_scalar("step", 0, "int32")

    def add_scalar(self, name, value, dtype):
        """Add a number that does not train."""
        return self.add_weight(
            name=name,
            shape=(),
            # Not `Constant`, which rounds to float32.
            initializer=lambda shape, dtype: ops.full(shape, value, dtype),
            dtype=dtype,
            trainable=False,
            autocast=False,
            aggregation="none",  # TensorFlow replicas all compute the same
        )

    def learning_rate_of_this_step(self) -> Tensor:
        """The rate as a scalar. If there is a schedule, take its next step."""
        if not self._is_told:
            _warn_once()
        if self._schedule is None:
            return self.learning_rate
        scope, is_jax = _keras.get_stateless_scope(), keras.backend.backend() == "jax"
        if self._iterations is not None:
            iterations = self._iterations()
            if iterations is not None:
                if is_jax and scope is not None:
                    self._check_is_state(iterations, scope)
                self._assign_rate_of(iterations)
        elif scope is not None:
            # A step is one stateless scope, however often it calls this layer.
            if scope is not _referent(self._counted_scope):
                self._remember(_counted_scope=weakref.ref(scope))
                self._assign_rate_of(self.step)
                self.step.assign(self.step + 1)
        elif not is_jax:  # On JAX, a call without a scope trains nothing.
            raise ValueError(
                f"Layer '{self.name}' follows a schedule but cannot count the steps of "
                "this training loop. Call `layer.follow(schedule, "
                "iterations=optimizer.iterations)`. Received: iterations=None"
            )
        return self.learning_rate

    def _remember(self, **attributes):
        # Not `setattr`: Flax forbids it in a traced call, if layers are NNX modules.
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _assign_rate_of(self, step):
        self.learning_rate.assign(self._schedule(step) / self._accumulation_steps)

    def _check_is_state(self, variable, scope):
        if scope.get_current_value(variable) is None:
            raise ValueError(
                f"The learning rate of layer '{self.name}' comes from a variable that "
                "is not part of the state of this step, and would not change. Map the "
                "variable in the `keras.StatelessScope`, or call "
                "`layer.follow(schedule)` without `iterations`. "
                f"Received: {variable!r}"
            )

    @property
    def iterations(self) -> keras.Variable | None:
        """The optimizer's counter that `follow` was given, or `None`."""
        return _referent(self._iterations)

    @property
    def weights(self) -> list[keras.Variable]:
        """All except `step`, which AMAT adds and takes from the optimizer."""
        return [v for v in super().weights if v is not self.step]

    def save_own_variables(self, store: Any) -> None:
        for variable in self.weights:
            store[variable.name] = variable  # by name

    def load_own_variables(self, store: Any) -> None:
        if not self.built:  # Nothing to load, or Keras' own error.
            super().load_own_variables(store)
            return
        weights = {variable.name: variable for variable in self.weights}
        if set(weights) != set(store.keys()):
            raise ValueError(
                f"Layer '{self.name}' expected the weights {sorted(weights)}. "
                f"Received: {sorted(store.keys())}"
            )
        for name, variable in weights.items():
            variable.assign(store[name])


def _referent(reference):
    return None if reference is None else reference()


def _value(scalar):
    """The value of a tensor or variable, `None` while a compiled step is traced."""
    try:
        return float(ops.convert_to_numpy(scalar))
    except Exception:  # Each backend has its own.
        return None


@functools.cache
def _warn_once():
    warnings.warn(
        "CBN is not told the learning rate. Its averages follow the last one of an "
        "earlier training, if its weights hold one. If not, it normalises with the "
        "statistics of each batch alone, as BatchNormalization does. Pass "
        "`callbacks=[keras_norms.AMAT()]` to `fit()`, or call "
        "`layer.set_learning_rate(rate)` in your own training loop.",
        stacklevel=4,
    )
