"""Recalibrate: moving statistics that fit the weights that are validated and saved."""

import time
from typing import Any

import keras
import numpy as np

from keras_norms._checks import arguments
from keras_norms._types import Tensor
from keras_norms.surgery._graph.data import inputs_of, wrong_data
from keras_norms.surgery._graph.units import to_numpy
from keras_norms.surgery.recalibrate import (
    layers_to_measure,
    measure_anew,
    statistics_of,
)

Logs = dict[str, float] | None


class Recalibrate(keras.callbacks.Callback):
    """Measures moving statistics anew for what is validated and saved ("precise BN").

    Moving statistics lag behind the weights, and belong to the weights that were
    trained. Averaged weights (`use_ema=True` with `SwapEMAWeights`, SWA, schedule-free
    optimisers) need statistics of their own, and without them may be no better than
    chance. This calls `recalibrate(model, data)`

    * in `fit`, before the first batch of each validation, with the weights that it
      uses, whatever other callbacks swap in at its beginning;
    * at the end of an epoch, if the model then has other weights than those measured
      last;
    * when training ends, likewise.

    Training goes on with the statistics that it had: they are put back when the next
    epoch begins. When training ends the measured ones stay.

    Put it after callbacks that change weights (`SwapEMAWeights`), and before those that
    save (`ModelCheckpoint`) or remember weights (`EarlyStopping`). The checkpoint of an
    epoch is of the weights that the model has at its end: those averaged need
    `SwapEMAWeights(swap_on_epoch=True)`.

    Each measurement is one pass over the data in inference mode. What it took is in the
    logs of the epoch as `recalibration_seconds`, and in `history`.

    Args:
        data: Training inputs, as in `recalibrate`. They are read anew each time, the
            first `steps` batches of them: no iterator that ends, and no sorted data.
        steps: Optional positive integer, how many batches to use; a few thousand images
            are enough.
        batch_size: Optional positive integer, for arrays. 32 by default.
        every: Positive integer: in epochs `every`, 2 `every` ..., and when training
            ends. In other epochs, validation has the statistics of training.

    Attributes:
        history: Dictionary of lists with an element for each measurement: `"epoch"`,
            counted from 0, `"batches"` and `"seconds"`.

    Raises:
        ValueError: If an argument is out of its range; when training begins, if the
            model has no layer to measure, or if `data` does not fit it.

    Example:

    >>> model.compile(keras.optimizers.SGD(0.1, use_ema=True), loss)
    >>> model.fit(x, y, epochs=10, validation_data=(x_val, y_val), callbacks=[
    ...     keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    ...     Recalibrate(x, steps=50),
    ...     keras.callbacks.ModelCheckpoint("averaged.keras"),
    ... ])

    Reference:

    - Izmailov et al., Averaging Weights Leads to Wider Optima and Better
      Generalization, UAI 2018, Section 3.2. https://arxiv.org/abs/1803.05407
    - Wu and Johnson, Rethinking "Batch" in BatchNorm, 2021, Section 3.
      https://arxiv.org/abs/2105.07576
    """

    def __init__(
        self,
        data: Tensor,
        steps: int | None = None,
        batch_size: int | None = None,
        every: int = 1,
    ) -> None:
        super().__init__()
        inputs_of(None, data)
        for name, value in ("steps", steps), ("batch_size", batch_size):
            if value is not None:
                arguments.integer(name, value, at_least=1)
        if hasattr(data, "__next__") and steps is None:
            raise wrong_data(data)  # It would be read once.
        self.data, self.steps, self.batch_size = data, steps, batch_size
        self.every = arguments.integer("every", every, at_least=1)
        self.history: dict[str, list[float]] = {}
        self._detach()

    def __deepcopy__(self, memo: Any) -> "Recalibrate":
        # A copy belongs to no model yet, and shares the data.
        return type(self)(self.data, self.steps, self.batch_size, self.every)

    def _detach(self):
        self._in_fit = self._is_due = False
        self._epoch = 0
        self._kept = None  # the statistics of training, while others are there
        self._measured = None  # the weights that the statistics belong to
        self._seconds = 0.0

    def on_train_begin(self, logs: Logs = None) -> None:
        self._detach()
        self.history = {"epoch": [], "batches": [], "seconds": []}
        if self.model.built:
            layers_to_measure(self.model)
            inputs_of(self.model, self.data)
        self._in_fit = True

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch, self._seconds = epoch, 0.0
        if self._kept is not None:
            for variable, value in self._kept:
                variable.assign(value)
            self._kept = self._measured = None

    def on_test_begin(self, logs: Logs = None) -> None:
        self._is_due = self._in_fit and self._is_due_in_epoch()

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        # Not before: callbacks that come later may have swapped weights.
        if self._is_due:
            self._is_due = False
            self._measure()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._is_due_in_epoch():
            self._measure()
        if logs is not None:
            logs["recalibration_seconds"] = self._seconds

    def on_train_end(self, logs: Logs = None) -> None:
        self._measure()
        self._detach()

    def _is_due_in_epoch(self):
        return (self._epoch + 1) % self.every == 0

    def _measure(self):
        """Measure, if the statistics are not those of the weights that are there."""
        model = self.model
        weights = [_copy(v) for v in model.trainable_variables]
        if self._measured is not None and _are_equal(weights, self._measured):
            return
        if self._kept is None:
            layers = layers_to_measure(model)
            self._kept = [(v, _copy(v)) for v in statistics_of(layers)]
        start = time.perf_counter()
        batches = measure_anew(model, self.data, self.steps, self.batch_size, verbose=0)
        seconds = time.perf_counter() - start
        self._measured = weights
        self._seconds += seconds
        for key, value in (
            ("epoch", self._epoch),
            ("batches", batches),
            ("seconds", seconds),
        ):
            self.history[key].append(value)


def _copy(variable):
    # PyTorch's array is the variable itself.
    return np.array(to_numpy(variable))


def _are_equal(weights, others):
    """Whether weights are others, up to the rounding of swapping them by sums."""
    return all(
        np.linalg.norm(np.subtract(a, b, dtype="float64"))
        <= 1e-5 * np.linalg.norm(np.asarray(a, "float64"))
        for a, b in zip(weights, others, strict=True)
    )
