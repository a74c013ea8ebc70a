"""The second-order loss in a layer's output that a normalisation passes, or not."""

from typing import NamedTuple

import keras
import numpy as np

from keras_norms._types import Data, LayerOrName, Loss
from keras_norms.diagnostics._engine.reading import visible
from keras_norms.diagnostics._engine.slopes import Slopes


class SecondOrder(NamedTuple):
    """What `second_order` returns, an element for each feature `d` of the output.

    Features whose output does not vary in the batch have `nan`. So do `linear` and
    `non` if the feature's row of `H` is 0, as before a ReLU that is off at `m`.

    Attributes:
        linear_at_input: Array, `|dL_linear_d/dX|` (Table 3).
        non_at_input: Array, `|dL_non_d/dX|`.
        linear: Array, `|dL_linear_d/dy_d| / |dL_d/dy_d|` (Table 4).
        non: Array, `|dL_non_d/dy_d| / |dL_d/dy_d|` (Table 4). The squares of both sum
            to 1.
        hessian: Array of shape `(features, features)`, the mean over samples of the
            Hessian of the loss in the mean output.
    """

    linear_at_input: np.ndarray
    non_at_input: np.ndarray
    linear: np.ndarray
    non: np.ndarray
    hessian: np.ndarray


def second_order(
    model: keras.Model,
    x: Data,
    y: Data,
    loss: Loss = None,
    *,
    layer: LayerOrName,
    source: LayerOrName | None = None,
    training: bool = True,
) -> SecondOrder:
    """Measure the two parts of the off-diagonal second-order loss in a layer's output.

    Let `C`, of shape `(features, samples)`, be the outputs minus their means `m`, of
    samples that no mask hides, `c_d` its row of feature `d`, and `H` the Hessian at `m`
    without its diagonal, averaged over samples:

    ```
    L_d     = L_linear_d + L_non_d
    L_linear_d = H_d C_linear c_d        C_linear = C c_d c_d^T / |c_d|^2
    L_non_d    = H_d C_non c_d           C_non = C - C_linear
    ```

    The derivative treats `C_linear` and `C_non` as constants, as in the proof of
    Theorem 3: `dL_linear_d/dy_d = (H_d C_linear)^T`. Batch normalization does not pass
    it. The paper has `y` without affine weights and `m = 0`. With deviations from `m`,
    affine weights do not change the numbers.

    Nothing of the model changes. It costs a Hessian-vector product and two gradients
    for each feature.

    Args:
        model, x, y, loss, training: See `Objective`. The loss must be a mean over
            samples. No layer after `layer` may mix samples.
        layer: A layer of the model or its name, with an output of shape `(samples,
            features)`.
        source: See `blindness`.

    Reference:

    - Zhou et al., 2022, Lemma 2, Theorem 3, Tables 3 and 4. See `blindness`.
    """
    slopes = Slopes(model, x, y, loss, layer, source, training)
    outputs = slopes.outputs
    if outputs.ndim != 2:
        raise ValueError(
            "Argument `layer` must have an output of shape (samples, features). "
            f"Received: layer={layer!r} with an output of shape {outputs.shape}"
        )
    shown = visible(outputs, -1, slopes.mask)
    mean = outputs.mean(0, dtype="float64", where=shown)
    hessian = slopes.hessian_at(mean)
    off = hessian - np.diag(np.diag(hessian))
    c = np.where(shown, outputs - mean, 0)
    numbers = np.full((4, len(hessian)), np.nan)
    for d in np.flatnonzero(np.ptp(c, 0)):
        whole = c @ off[d]
        linear = c[:, d] * (c[:, d] @ whole) / (c[:, d] @ c[:, d])
        for i, part in enumerate((linear, whole - linear)):
            disturbance = np.zeros_like(c)
            disturbance[:, d] = part
            numbers[i, d] = np.linalg.norm(slopes.at_input(disturbance, loss=0.0))
            with np.errstate(divide="ignore", invalid="ignore"):
                numbers[2 + i, d] = np.linalg.norm(part) / np.linalg.norm(whole)
    return SecondOrder._make([*numbers, hessian])
