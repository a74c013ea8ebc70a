"""recalibrate: fresh moving statistics from data, also while `fit` runs."""

import time
import warnings
from typing import Any

import keras
import numpy as np

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_model
from keras_norms._types import Logs, Tensor
from keras_norms.layers.frozen import is_frozen
from keras_norms.surgery._graph.affine import NORM_CLASSES
from keras_norms.surgery._graph.arrays import assign_all, to_float64, to_numpy
from keras_norms.surgery._graph.measure import (
    NotFinite,
    check_end,
    inputs_of,
    measure,
    stored,
    wrong_data,
)


def recalibrate(
    model: keras.Model,
    data: Tensor,
    steps: int | None = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
) -> keras.Model:
    """Measure the moving statistics of all normalisation layers again ("precise BN").

    Use it after the weights changed other than by training: averaged (SWA, EMA),
    pruned, loaded for another data domain. Also if batches were too small for good
    moving averages.

    It makes one pass over the data. Every normalisation layer normalises each batch
    with the statistics of this batch, as in training, but without noise. Everything
    else runs in inference mode, Dropout included. The new mean and variance are those
    of all elements, not averages over batches. (LpNorm's norm is such an average.)

    Frozen layers (`freeze`, or `layer.trainable = False`) use and keep their
    statistics. With a warning, so do layers that the model does not call, and those of
    derived classes that override `call`. All other weights and the optimizer stay as
    they are.

    Args:
        model: A built Keras model of any kind. It is changed in place.
        data: What `fit` takes: arrays, a `tf.data.Dataset`, a `keras.utils.PyDataset`,
            a PyTorch `DataLoader`, or any iterable of batches. `(x, y)` and
            `(x, y, sample_weight)` are recognised; only `x` is used. It is read in
            order: mix the classes, as in training.
        steps: Optional positive integer, how many batches to use. Needed for endless
            data.
        batch_size: Optional positive integer, for arrays. 32 by default.
        verbose: `"auto"`, 0, 1, or 2, as in `Model.predict`.

    Returns:
        The model.

    Raises:
        ValueError: If the model is not built, if it calls no layer to measure, if
            `data` is of another kind, empty, endless without `steps`, does not fit the
            model, or gives activations that are not finite, or if another argument is
            out of its range. The model is then unchanged.

    Example:

    >>> recalibrate(model, x_train, steps=100, batch_size=256)
    """
    check_model(model)
    _check(steps, batch_size)
    arguments.choice("verbose", verbose, ("auto", 0, 1, 2))
    measure_anew(model, _layers_to_measure(model), data, steps, batch_size, verbose)
    return model


def _check(steps, batch_size):
    for name, value in ("steps", steps), ("batch_size", batch_size):
        if value is not None:
            arguments.integer(name, value, at_least=1)


def _layers_to_measure(model):
    """The layers whose statistics are measured, or an error if there is none."""
    calls = [norm.call for norm in NORM_CLASSES]
    norms = [
        layer for layer in _keras.layers_of(model, NORM_CLASSES) if not is_frozen(layer)
    ]
    found = [layer for layer in norms if type(layer).call in calls]
    others = [layer.name for layer in norms if layer not in found]
    if others:
        warnings.warn(
            f"recalibrate: {others} keep their statistics, because their classes "
            "override `call`.",
            stacklevel=3,
        )
    if not found:
        raise ValueError(
            "Argument `model` must have a normalisation layer that is not frozen: "
            "CBN, NoisyBN, LpNorm or BatchNormalization. "
            f"Received: model '{model.name}'"
        )
    return found


def measure_anew(model, layers, data, steps=None, batch_size=None, verbose="auto"):
    """Measure and assign statistics of layers. Returns how many batches it took."""
    measured = measure(
        model, layers, data, steps, batch_size, verbose, with_batch_statistics=True
    )
    unread = [layer.name for layer, s in zip(layers, measured) if s is None]
    if len(unread) == len(layers):
        raise ValueError(
            f"Argument `model` must call a layer to measure. Received: model "
            f"'{model.name}', which does not call {unread}"
        )
    for layer, statistics in zip(layers, measured):
        if statistics is not None:
            assign_all(layer, stored(layer, statistics, to_float64))
    if unread:
        warnings.warn(
            f"recalibrate: {unread} keep their statistics, because model "
            f"'{model.name}' does not call them.",
            stacklevel=3,
        )
    return max(s.batches for s in measured if s is not None)


class Recalibrate(keras.callbacks.Callback):
    """Callback: measures moving statistics before weights are validated or saved.

    Averaged weights (`use_ema=True` with `SwapEMAWeights`, SWA, schedule-free
    optimisers) need statistics of their own. Without them they may be no better than
    chance. This calls `recalibrate(model, data)` ("precise BN")

    * in `fit`, before the first batch of each validation, with the weights that the
      validation uses, whatever other callbacks swap in when it begins;
    * at the end of an epoch, and when training ends, if the model then has other
      weights than those measured last.

    Training continues with its own statistics: they return when the next epoch begins.
    When training ends, the measured ones stay. If activations are not finite, as after
    a training that diverged, statistics stay, with a warning.

    Put it after callbacks that change weights (`SwapEMAWeights`), and before those that
    save (`ModelCheckpoint`) or remember weights (`EarlyStopping`). The checkpoint of an
    epoch has the weights that the model has at its end. To save averaged ones, use
    `SwapEMAWeights(swap_on_epoch=True)`. `BackupAndRestore` saves measured statistics
    too: with CBN, a restored training is then not exactly the uninterrupted one.

    The logs of the epoch have the time it took, `recalibration_seconds`. For the
    measurement when training ends, only `history` has it.

    Args:
        data: Training inputs, as in `recalibrate`. Each measurement reads their first
            `steps` batches: give no iterator that ends, and no sorted data.
        steps: Optional positive integer, how many batches to use. A few thousand images
            are enough.
        batch_size: Optional positive integer, for arrays. 32 by default.
        every: Positive integer: measure in epochs `every`, 2 `every` ..., and when
            training ends. In other epochs, validation uses the statistics of training.

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
        _check(steps, batch_size)
        check_end(inputs_of(None, data), steps)
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
        self._kept = None  # the statistics of training, while the model has others
        self._measured = None  # the weights that the statistics belong to
        self._seconds = 0.0

    def on_train_begin(self, logs: Logs = None) -> None:
        self._detach()
        self.history = {"epoch": [], "batches": [], "seconds": []}
        if self.model.built:
            _layers_to_measure(self.model)
            inputs_of(self.model, self.data)
        self._in_fit = True

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch, self._seconds = epoch, 0.0
        for variable, value in self._kept or ():
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
        layers = _layers_to_measure(model)
        if self._kept is None:
            self._kept = [
                (v, _copy(v))
                for layer in layers
                for v in layer.non_trainable_variables
                if v.name.startswith(("moving_", "renorm_", "average_weight"))
            ]
        start = time.perf_counter()
        try:
            batches = measure_anew(
                model, layers, self.data, self.steps, self.batch_size, verbose=0
            )
        except NotFinite as error:  # Other callbacks end a training that diverged.
            warnings.warn(f"Recalibrate measured nothing. {error}", stacklevel=2)
            batches = 0
        seconds = time.perf_counter() - start
        self._measured = weights
        self._seconds += seconds
        for key, value in zip(self.history, (self._epoch, batches, seconds)):
            self.history[key].append(value)


def _copy(variable):
    # PyTorch's array is the variable itself.
    return np.array(to_numpy(variable))


def _are_equal(weights, others):
    """Whether weights equal others, up to the rounding of swapping them by sums."""
    return all(
        np.linalg.norm(np.subtract(a, b, dtype="float64"))
        <= 1e-5 * np.linalg.norm(np.asarray(a, "float64"))
        for a, b in zip(weights, others, strict=True)
    )
