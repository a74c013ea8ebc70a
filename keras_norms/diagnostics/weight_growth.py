"""Callbacks that follow the norm of weights, and batch normalization's parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np

from keras_norms._checks.models import check_inputs, check_layers, matching_layers
from keras_norms._types import Data, Directory, Layers, Logs
from keras_norms.diagnostics._engine.calls import record
from keras_norms.diagnostics._engine.reading import (
    affine,
    float64,
    moments,
    names_of,
    norms_in,
)
from keras_norms.diagnostics.probe import Probe, same_batch
from keras_norms.layers.channel_normalization import ChannelNormalization
from keras_norms.layers.kernels import kernels_by_name


class WeightGrowth(Probe):
    """Records the norm of kernels through training (Lemma 3, Figure 3).

    With `W` a kernel before a step and `D` what the step adds to it, its numbers are

    ```
    <layer>_norm      |W|
    <layer>_step      |D|
    <layer>_growth    |W + D|^2 - |W|^2 = 2 <W, D> + |D|^2
    <layer>_cosine    <W, D> / (|W| |D|)
    ```

    For plain gradient descent `D` is `-learning_rate * gradient`. If the loss does not
    depend on the scale of `W`, the cosine is then 0 and the growth
    `learning_rate^2 |gradient|^2`, the square of the step, whatever the batch. Weight
    decay and momentum change the cosine. `<layer>` is the name of the layer with the
    kernel (in WS, CWN and WN, the layer inside), or the path of the kernel if that name
    is not unique.

    It needs no batch. A step is one execution: with `steps_per_execution=N`, of N
    batches. Every weight of rank 2 or more counts as a kernel.

    Args:
        layers: Layers or their names. All their kernels are recorded, those of layers
            inside too. `None`: all kernels of the model.
        every, log_dir: See `Probe`.

    Raises:
        ValueError: When training begins, if a layer is not in the model or has no
            trainable kernel.

    Example:

    >>> growth = WeightGrowth()
    >>> model.fit(x, y, callbacks=[growth])
    >>> growth.history["conv2d_norm"]  # over growth.history["step"]

    Reference:

    - Sun et al., AAAI 2020, Lemma 3 and Figure 3. See `decompose`.
    """

    prefix = "weight"

    def __init__(
        self,
        layers: Layers | None = None,
        every: int = 1,
        log_dir: Directory | None = None,
    ) -> None:
        super().__init__(every, log_dir)
        check_layers(layers)
        self._layers = layers
        self._before: dict[str, np.ndarray] = {}

    def on_train_begin(self, logs: Logs = None) -> None:
        super().on_train_begin(logs)
        self._kernels = kernels_by_name(self.model, self._layers)

    def before_step(self) -> None:
        self.model  # noqa: B018 (brings the state from JAX)
        self._before = {name: float64(v) for name, v in self._kernels.items()}

    def after_step(self) -> None:
        self.model  # noqa: B018
        numbers: dict[str, Any] = {}
        for name, variable in self._kernels.items():
            before, after = self._before[name], float64(variable)
            step = after - before
            norm, length = np.linalg.norm(before), np.linalg.norm(step)
            product = np.sum(before * step)
            moves = norm * length > 0
            numbers[f"{name}_norm"] = norm
            numbers[f"{name}_step"] = length
            numbers[f"{name}_growth"] = 2 * product + length**2
            numbers[f"{name}_cosine"] = product / (norm * length) if moves else np.nan
        self._before = {}
        self.record(numbers)


class BatchStatistics(Probe):
    """Records how far `gamma` and `beta` are from input statistics (Figure 2).

    Let `mu` and `sigma^2` be the mean and variance of what a batch normalization reads,
    without what a mask hides. Sun et al. take `gamma^2` as an approximation of
    `sigma^2`, and `beta` as one of `mu`. The numbers are means over channels,

    ```
    <layer>_variance_distance    |gamma^2 - sigma^2|
    <layer>_mean_distance        |beta - mu|
    ```

    Args:
        batch: A batch of inputs `x`, for which the layers run in training mode, or a
            function of the step that returns one. `None`: `mu` and `sigma^2` are the
            moving statistics of the layer, which costs nothing.
        layers: Layers or their names. `None`: every `BatchNormalization` of the
            model; with a batch also `CBN`, `NoisyBN` and `LpNorm` layers, but not the
            CBN in a `FusedCBN`.
        every, log_dir: See `Probe`.

    Attributes:
        channels: Dict from `<layer>_variance_distance` and `<layer>_mean_distance` to
            lists of arrays `(channels,)`, one for each step in `history`. `<layer>` is
            the name of a layer, or its path if several have that name.

    Raises:
        ValueError: When training begins, if a layer is not in the model, is not of
            these kinds, or if there is none; when it is measured, if the batch does not
            fit the model, or if the model does not call a layer.

    Reference:

    - Sun et al., AAAI 2020, Section 3.1 and Figure 2. See `decompose`.
    """

    prefix = "statistics"

    def __init__(
        self,
        batch: Data | Callable[[int], Data] = None,
        layers: Layers | None = None,
        every: int = 200,
        log_dir: Directory | None = None,
    ) -> None:
        super().__init__(every, log_dir)
        check_layers(layers)
        if batch is not None and not callable(batch):
            check_inputs(None, batch, "batch")
        self._batch = batch if callable(batch) else partial(same_batch, batch)
        self._has_batch = batch is not None
        self._layers = layers
        self.channels: dict[str, list[np.ndarray]] = {}

    def on_train_begin(self, logs: Logs = None) -> None:
        super().on_train_begin(logs)
        kinds: tuple[type, ...] = (keras.layers.BatchNormalization,)
        if self._has_batch:
            kinds += (ChannelNormalization,)
        found = norms_in(self.model, kinds)
        if self._layers is not None:
            every = (matching_layers(self.model, one) for one in self._layers)
            found = list(dict.fromkeys(norm for each in every for norm in each))
        self._norms = found
        if not found or not all(isinstance(norm, kinds) for norm in found):
            others = ", CBN, LpNorm or NoisyBN"
            raise ValueError(
                "Argument `layers` must name layers of class BatchNormalization"
                f"{others if self._has_batch else ' if there is no `batch`'}. "
                f"Received: layers={self._layers} of model '{self.model.name}'"
            )

    def measure(self) -> dict[str, float]:
        model = self.model  # which brings the state from JAX
        if self._has_batch:
            batch = self._batch(self._step)
            check_inputs(model, batch, "batch")
            calls = record(model, self._norms, batch, training=True)
            found = {
                call.layer: moments(call.input, call.layer.axis, call.mask)
                for call in calls
            }
        else:
            found = {
                norm: (float64(norm.moving_mean), float64(norm.moving_variance))
                for norm in self._norms
            }
        numbers = {}
        for name, norm in zip(names_of(self._norms), self._norms):
            if norm not in found:
                raise ValueError(
                    f"The model does not call layer '{norm.name}'. Leave it out of "
                    "`layers`."
                )
            mean, variance = found[norm]
            gamma, beta = affine(norm, len(mean))
            distances = np.abs(gamma**2 - variance), np.abs(beta - mean)
            for kind, value in zip(("variance", "mean"), distances):
                self.channels.setdefault(f"{name}_{kind}_distance", []).append(value)
                numbers[f"{name}_{kind}_distance"] = value.mean()
        return numbers
