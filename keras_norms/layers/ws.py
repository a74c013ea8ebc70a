"""WS: weight standardization."""

from typing import Any

import keras

from keras_norms._checks import arguments
from keras_norms.layers.kernel_normalization import KernelNormalization
from keras_norms.ops import weight_norms


@keras.saving.register_keras_serializable(package="keras_norms")
class WS(KernelNormalization):
    """WS: weight standardization.

    A wrapper around a layer with a kernel. Let `w` be the weights that one unit of the
    layer sums over. The layer is called with

    ```
    w_hat = (w - mean(w)) / sqrt(var(w) + epsilon)
    ```

    in place of `w`. The layer stores and saves `w`, its regularizers and constraints
    act on `w`, and the gradient goes through the normalisation.

    A unit is an output channel of a `Dense` or (transposed) convolution layer, an
    element of the axes that kernel and output share in `EinsumDense`, and a pair of
    input channel and multiplier in a depthwise convolution. Both kernels of a separable
    convolution are normalised.

    Without a gain, `w_hat` has a variance of `var(w) / (var(w) + epsilon)`, near 1
    (0.96 for 4,096 inputs with Keras' initializer). Outputs grow with the root of the
    fan-in: use WS before a normalisation of activations.

    Args:
        layer: `Dense`, `EinsumDense`, `Conv1D` to `3D`, `Conv1DTranspose` to `3D`,
            `DepthwiseConv1D` or `2D`, `SeparableConv1D` or `2D`, or a layer of a
            derived class. A `call` that this class overrides reads `w_hat` as the
            kernel; a class that overrides `kernel` is refused. The layer may be built
            and trained.
        gain: Whether `w_hat` is multiplied by a learned number per unit, which
            starts at 1.
        epsilon: Positive, added to the variance inside the root.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`. `dtype` is that of
            inputs and outputs, by default that of the wrapped layer, which computes in
            its own.

    Call arguments:
        inputs: The input of the wrapped layer.
        training, mask: Passed on if the wrapped layer takes them.

    Input and output shape:
        Those of the wrapped layer.

    Weights:
        With `gain=True`, `gain`, one number per unit in the order of the kernel's axes
        (for a separable convolution, `depthwise_gain` and `pointwise_gain`). They are
        in `gains`, by the name of the kernel.

    Raises:
        ValueError: If `layer` has no kernel, is of a class that overrides it, has LoRA
            enabled, is quantized, is a wrapper or a model, or if a unit has only one
            weight.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((32, 32, 3)),
    ...     WS(keras.layers.Conv2D(64, 3, use_bias=False)),
    ...     keras.layers.GroupNormalization(8),
    ...     keras.layers.ReLU(),
    ... ])

    Reference:

    - Qiao et al., Micro-Batch Training with Batch-Channel Normalization and Weight
      Standardization, 2019. https://arxiv.org/abs/1903.10520

    The gain is not part of the paper, which leaves scaling to the layer that follows.
    """

    smallest_fan_in = 2

    def __init__(
        self,
        layer: keras.layers.Layer,
        gain: bool = False,
        epsilon: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer, epsilon, **kwargs)
        self.gain = arguments.boolean("gain", gain)

    def _normalize(self, weight, axes, gain):
        return weight_norms.ws(weight, axes, gain, self.epsilon)

    def _gain_initializer_of(self, kernel):
        return "ones" if self.gain else None

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "gain": self.gain}
