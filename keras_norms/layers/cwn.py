"""CWN: centered weight normalization."""

from typing import Any

import keras
from keras import initializers

from keras_norms._checks import arguments
from keras_norms._types import Initializer
from keras_norms.layers.kernel_normalization import KernelNormalization
from keras_norms.ops import weight_norms


@keras.saving.register_keras_serializable(package="keras_norms")
class CWN(KernelNormalization):
    """CWN: centered weight normalization.

    A wrapper around a layer with a kernel. Let `w` be the weights that one unit of the
    layer sums over. The layer is called with

    ```
    w_hat = scale * (w - mean(w)) / sqrt(|w - mean(w)|^2 + epsilon)
    ```

    in place of `w`: a point on the sphere of radius `scale`. For `n` weights per unit,
    this is WS divided by `sqrt(n)`, with `n` times the `epsilon`. `WS` says what a unit
    is, which layers may be wrapped, and what call arguments, shapes, weights and errors
    there are.

    Args:
        layer: A layer with a kernel, see `WS`.
        scale: Positive. `sqrt(2 / (1 - 1 / pi))`, 1.71, keeps the variance of outputs
            if a ReLU comes before the layer. The paper's `sqrt(2)` multiplies it by
            0.68, because these kernels do not pass the mean of their inputs.
        gain: Whether `w_hat` is also multiplied by a learned number per unit.
        gain_initializer: Initializer of that number.
        epsilon: Positive, added to the squared length inside the root.
        **kwargs: Arguments of `keras.layers.Layer`, see `WS`.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((784,)),
    ...     CWN(keras.layers.Dense(128, activation="relu")),
    ...     CWN(keras.layers.Dense(10), scale=1.71, gain=True),
    ... ])

    Reference:

    - Huang et al., Centered Weight Normalization in Accelerating Training of Deep
      Neural Networks, ICCV 2017.
      https://openaccess.thecvf.com/content_iccv_2017/html/Huang_Centered_Weight_Normalization_ICCV_2017_paper.html
    """

    smallest_fan_in = 2

    def __init__(
        self,
        layer: keras.layers.Layer,
        scale: float = 1.0,
        gain: bool = False,
        gain_initializer: Initializer = "ones",
        epsilon: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer, epsilon, **kwargs)
        self.scale = arguments.number("scale", scale, above=0)
        self.gain = arguments.boolean("gain", gain)
        self.gain_initializer = arguments.initializer(
            "gain_initializer", gain_initializer
        )

    def _normalize(self, weight, axes, gain):
        return self.scale * weight_norms.cwn(weight, axes, gain, self.epsilon)

    def _gain_initializer_of(self, kernel):
        return self.gain_initializer if self.gain else None

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "scale": self.scale,
            "gain": self.gain,
            "gain_initializer": initializers.serialize(self.gain_initializer),
        }
