"""WN: weight normalization."""

import math

import keras
import numpy as np
from keras import ops

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._types import Tensor
from keras_norms.layers.kernel_normalization import KernelNormalization
from keras_norms.layers.kernels import overrides_call, unit_axes
from keras_norms.ops import weight_norms


@keras.saving.register_keras_serializable(package="keras_norms")
class WN(KernelNormalization):
    """WN: weight normalization.

    A wrapper around a layer with a kernel. Let `w` be the weights that one unit of the
    layer sums over, and `g` a learned number per unit. The layer is called with

    ```
    w_hat = g * w / sqrt(|w|^2 + epsilon)
    ```

    in place of `w`: length and direction are trained separately. `g` starts at
    `sqrt(|w|^2 + epsilon)`, so wrapping a layer, trained or not, does not change its
    function. `WS` says what a unit is, which layers may be wrapped, and what call
    arguments, shapes, weights (those with a gain) and errors there are. Units of a
    single weight are allowed too.

    If the wrapped layer gets other weights after the wrapper is built, `g` stays. Call
    `reset_gain()` to make `w_hat` equal to `w` again.

    Args:
        layer: A layer with a kernel, see `WS`.
        epsilon: Positive, added to the squared length inside the root.
        **kwargs: Arguments of `keras.layers.Layer`, see `WS`.

    Example:

    >>> layer = WN(keras.layers.Dense(128, activation="relu"))
    >>> layer.data_init(x[:500])  # Optional: start with normalised pre-activations.

    Reference:

    - Salimans and Kingma, Weight Normalization: A Simple Reparameterization to
      Accelerate Training of Deep Neural Networks, NeurIPS 2016.
      https://arxiv.org/abs/1602.07868

    The paper has no `epsilon` and lets `g` start from data, which is `data_init`.
    """

    def _normalize(self, weight, axes, gain):
        return weight_norms.wn(weight, axes, gain, self.epsilon)

    def _gain_initializer_of(self, kernel):
        return lambda shape, dtype: ops.cast(self._lengths(kernel), dtype)

    def _lengths(self, kernel):
        return weight_norms.norm(self._stored(kernel), kernel.fan_in, self.epsilon)

    def reset_gain(self) -> None:
        """Set `g` to the lengths of the stored kernel: the layer is called with that.

        Use it after the kernel of the wrapped layer was assigned or loaded.
        """
        for kernel in self._kernels:
            self.gains[kernel.name].assign(self._lengths(kernel))

    def data_init(self, x: Tensor) -> None:
        """Start with normalised pre-activations (Salimans and Kingma, Section 3).

        Sets `g` and the bias of each unit. Its outputs for `x` before the activation
        function then have mean 0 and variance 1 over all samples and positions. The
        kernel stays. In a separable convolution it sets the gain of the pointwise
        kernel, and the depthwise stage stays.

        Apply it to one layer after the other, each on the outputs of those before.

        Args:
            x: A batch of inputs, an array or a tensor. If the layer is not built yet,
                this builds it.

        Raises:
            ValueError: If the wrapped layer has no bias for each unit, if a unit has
                the same output everywhere, or if the class of the layer changes outputs
                in another way before the activation function.
        """
        given = x
        x = ops.convert_to_tensor(x if ops.is_tensor(x) else arguments.array("x", x))
        try:
            _keras.assert_input_compatibility(self.layer.input_spec, x, self.layer.name)
        except ValueError as e:
            raise arguments.wrong("x", "a batch of inputs of the layer", given) from e
        if not self.built:
            self.build(tuple(x.shape))
        layer = self.layer
        if getattr(layer, "bias", None) is None:
            raise ValueError(
                f"`data_init` cannot center the outputs of layer '{layer.name}', which "
                "has no bias. Use `use_bias=True` (in EinsumDense, `bias_axes`)."
            )
        zeros = ops.zeros(layer.bias.shape, layer.variable_dtype)
        outputs = self._before_activation(x, None, zeros)
        units = unit_axes(layer, len(outputs.shape))
        others = tuple(i for i in range(len(outputs.shape)) if i not in units)
        deviation, mean, unit_outputs = weight_norms.decompose(outputs, others)
        deviation, mean = map(ops.convert_to_numpy, (deviation, mean))
        if constant := int(np.sum(~(deviation > 0))):
            raise ValueError(
                "`data_init` needs inputs for which the outputs of each unit vary. "
                f"Received: x.shape={tuple(x.shape)}, for which {constant} of "
                f"{deviation.size} units of layer '{layer.name}' are constant."
            )
        bias = self._as_bias(np.expand_dims(-mean / deviation, others))
        gain = self.gains[self._kernels[-1].name]
        order = [sorted(units).index(axis) for axis in units]
        inverse = np.reshape(np.transpose(1 / deviation, order), gain.shape)
        if overrides_call(layer):
            self._check_normalised(x, inverse, bias, unit_outputs)
        gain.assign(inverse)
        layer.bias.assign(bias)

    def _check_normalised(self, x, gain, bias, expected):
        """Raise unless outputs are `gain` times the outputs for 1, plus `bias`."""
        dtype = self.layer.variable_dtype
        gain, bias = (ops.convert_to_tensor(v, dtype) for v in (gain, bias))
        outputs = ops.cast(self._before_activation(x, gain, bias), "float32")
        expected = ops.cast(expected, "float32")
        if not ops.all(ops.abs(outputs - expected) < 1e-2):
            raise ValueError(
                f"`data_init` cannot normalise the outputs of '{self.layer.name}', "
                f"whose class, {type(self.layer).__name__}, overrides `call`: gain and "
                "bias do not scale and shift them."
            )

    def _before_activation(self, x, gain, bias):
        """Outputs with that gain of the last kernel, or 1, and that bias."""
        layer, last = self.layer, self._kernels[-1]
        values = self.normalized_kernels()
        values[last.name] = self._normalized(last, gain)
        values["bias"] = bias
        activation = layer.activation
        layer.activation = None
        try:
            return self._call_layer(values, x)
        finally:
            layer.activation = activation

    def _as_bias(self, shift):
        """`shift`, of the rank of outputs, in the shape of the bias."""
        layer = self.layer
        shape = tuple(layer.bias.shape)
        if not isinstance(layer, keras.layers.EinsumDense):
            return np.reshape(shift, shape)
        # The bias of EinsumDense is added to the last axes of outputs.
        added = shift.shape[shift.ndim - len(shape) :]
        if math.prod(added) == shift.size and all(
            size in (1, full) for size, full in zip(added, shape)
        ):
            return np.broadcast_to(np.reshape(shift, added), shape)
        raise ValueError(
            f"`data_init` cannot center the outputs of layer '{layer.name}', in which "
            "units share a bias. Name each axis that kernel and output share in "
            f"`bias_axes`. Received: equation={layer.equation!r}, "
            f"bias_axes={layer.bias_axes!r}"
        )
