"""AMAT: the callback that tells CBN layers the learning rate."""

import warnings
from typing import Any

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_norms import _keras
from keras_norms._types import Logs
from keras_norms.layers.frozen import is_frozen
from keras_norms.layers.learning_rate import FollowsLearningRate

_ADAM = keras.optimizers.Adam, keras.optimizers.Adamax, keras.optimizers.Nadam
_WEIGHT_WITH_ADAM = 0.1  # `omega * learning_rate`


class AMAT(keras.callbacks.Callback):
    """Adaptive moving average technique: `model.fit(..., callbacks=[AMAT()])`.

    It tells every `CBN` layer of the model, nested ones too, the learning rate of the
    coming step. The averages of the layer then follow with
    `eta = max(1 - omega * learning_rate, 0)`.

    Pass it to each `fit`, after callbacks that change the rate at
    `on_train_batch_begin`. A `LearningRateSchedule` becomes part of the compiled step
    and is right with any `steps_per_execution`.

    * With Adam, which moves the weights at small rates too, use
      `CBN(omega=0.1 / learning_rate)`: longer averages lag behind the weights
      (docs/results/adam.md). A warning says so if the rate is not a schedule.
    * With `gradient_accumulation_steps=n`, layers get an `n`-th of the rate: the
      averages of one update of the weights then span its `n` small batches.
    * If other optimizers than `model.optimizer` train the model, as in a GAN, do not
      use AMAT. Call `layer.set_learning_rate(rate)` of each layer in `train_step`, or
      for a schedule on JAX, `layer.follow(schedule)` before `fit`. AMAT warns of this
      if `model.optimizer` has made no step in the first epoch.
    * With a schedule on JAX, layers count the steps themselves and take over the
      optimizer's count at the start of each epoch. In between they also count steps
      that a `LossScaleOptimizer` skips, and each `stateless_call` of a `train_step`
      that makes several.
    * On TensorFlow, build a model that creates layers in its own `build()` before
      `fit`. Otherwise they get the rate only after the first step.

    When training ends, layers keep the last rate, also in a saved file. If that is
    `1 / omega` or more, inference has the statistics of the last batch alone, and a
    warning says so. If it is near 0, as at the end of a schedule, the averages hardly
    move in a `fit` without AMAT. (On TensorFlow and JAX the schedule continues there.)
    A loaded layer warns if it is trained without AMAT.

    Raises:
        ValueError: At the start of training, if the model has no optimizer, if the
            optimizer has no learning rate of its own, as
            `keras.optimizers.MultiOptimizer`, or if the rate, on TensorFlow and JAX, is
            a function that is not a schedule.

    Reference:

    - Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and Beyond,
      TPAMI 2023, Section 4.2, Eqs. 8-9.
    """

    def __init__(self) -> None:
        super().__init__()
        self._detach()

    def __deepcopy__(self, memo: Any) -> "AMAT":
        # A copy belongs to no model yet.
        return type(self)()

    def _detach(self):
        self._layers = []
        self._schedule = None
        self._rate = None
        self._was_built = False
        self._steps_before = None

    def on_train_begin(self, logs: Logs = None) -> None:
        model = self.model
        if getattr(model, "optimizer", None) is None:
            raise ValueError(
                "AMAT needs a model compiled with an optimizer. "
                f"Received: model={model} with optimizer=None"
            )
        if not hasattr(model.optimizer, "learning_rate"):
            raise ValueError(
                "AMAT needs an optimizer with one learning rate. For others, call "
                "`layer.set_learning_rate(rate)` of each CBN layer instead. "
                f"Received: model={model} with optimizer={model.optimizer}"
            )
        self._detach()
        self._attach()
        if not self._layers and self._was_built:
            warnings.warn("AMAT found no CBN layer in the model.", stacklevel=2)
        self._check_adam()

    def _check_adam(self):
        optimizer = _keras.inner_optimizer(self.model.optimizer)
        follows = isinstance(_keras.learning_rate_of(optimizer), LearningRateSchedule)
        omegas = [layer.omega for layer in self._layers if not is_frozen(layer)]
        if not isinstance(optimizer, _ADAM) or follows or not omegas:
            return
        rate = _number(optimizer.learning_rate) / self._accumulation_steps()
        better = _WEIGHT_WITH_ADAM / rate if rate > 0 else 0
        if 0 < min(omegas) < 0.99 * better:
            warnings.warn(
                "With Adam, CBN's averages lag behind the weights if a batch enters "
                "them with a weight, `omega * learning_rate`, of less than "
                f"{_WEIGHT_WITH_ADAM}. Use CBN(omega={better:.3g}), or leave AMAT out. "
                f"Received: omega={min(omegas):g} with learning_rate={rate:g}",
                stacklevel=3,
            )

    def _attach(self):
        model = self.model
        self._was_built = model.built
        self._schedule = _schedule(model.optimizer)
        self._layers = _keras.layers_of(model, FollowsLearningRate)
        self._rate = None  # New layers do not know it.
        iterations = None
        if self._schedule is not None and keras.backend.backend() == "tensorflow":
            iterations = _keras.step_counter(model.optimizer)
        follow = self._schedule, iterations, self._accumulation_steps()
        changed = [layer.follow(*follow) for layer in self._layers]
        if any(changed):
            model.make_train_function(force=True)
            self._set_counters()

    def _set_counters(self):
        counting = [layer for layer in self._layers if layer.step is not None]
        if counting:
            done = self._steps_done()
            for layer in counting:
                layer.step.assign(done)

    def _steps_done(self):
        return int(_number(_keras.step_counter(self.model.optimizer)))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        # Here, and not when training begins: a backup may have been restored since.
        if self._schedule is not None:
            self._set_counters()
        if self._steps_before is None:
            self._steps_before = self._steps_done()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        # Loss scaling may skip all steps of an epoch while it looks for the scale.
        optimizer = self.model.optimizer
        is_scaled = _keras.inner_optimizer(optimizer) is not optimizer
        uses_rate = not all(map(is_frozen, self._layers))
        if uses_rate and not is_scaled and self._steps_before == self._steps_done():
            warnings.warn(
                "AMAT tells CBN layers the learning rate of `model.optimizer`, which "
                "has made no step. If other optimizers train the model, leave AMAT out "
                "and call `layer.set_learning_rate(rate)` of each CBN layer in the "
                "training step.",
                stacklevel=2,
            )
        self._steps_before = -1  # Warn once.

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if not self._was_built and self.model.built:
            self._attach()
        if self._schedule is not None or not self._layers:
            return
        # On JAX the trainer holds all state in an epoch, and fetching it is slow. A
        # callback that changes the rate fetches it: otherwise the rate is the same.
        if not _keras.is_state_current(self):
            return
        rate = _number(self.model.optimizer.learning_rate)
        if rate != self._rate:
            for layer in self._layers:
                layer.set_learning_rate(rate / self._accumulation_steps())
            self._rate = rate

    def _accumulation_steps(self):
        optimizer = _keras.inner_optimizer(self.model.optimizer)
        return optimizer.gradient_accumulation_steps or 1

    def on_train_end(self, logs: Logs = None) -> None:
        for layer in self._layers:
            if not layer.built or is_frozen(layer):
                continue  # Its averages stay as they are.
            rate = _number(layer.learning_rate)
            if layer.omega * rate >= 1:
                warnings.warn(
                    f"Training ended at a learning rate of {rate:g}. At 1 / omega or "
                    "more, CBN layers keep only the statistics of the last batch for "
                    "inference. Call keras_norms.recalibrate on the model, or end with "
                    "a smaller rate.",
                    stacklevel=2,
                )
                break
        self._detach()


def _number(scalar):
    return float(ops.convert_to_numpy(ops.convert_to_tensor(scalar)))


def _schedule(optimizer):
    """The optimizer's schedule if the training step can hold it, else `None`.

    PyTorch runs a step operation by operation. There one evaluation on the host is
    cheaper than one in every layer.
    """
    rate = _keras.learning_rate_of(optimizer)
    if keras.backend.backend() == "torch":
        return None
    if isinstance(rate, LearningRateSchedule):
        return rate
    if callable(rate) and not isinstance(rate, keras.Variable):  # as those of NNX are
        raise ValueError(
            "AMAT needs a learning rate that is a number or a LearningRateSchedule. "
            "It cannot see what other functions return in the compiled step. "
            f"Received: learning_rate={rate}"
        )
    return None
