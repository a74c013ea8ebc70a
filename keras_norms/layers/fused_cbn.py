"""FusedCBN: CBN and the linear layers that read it, computed together."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._types import Shape, Tensor
from keras_norms.layers.cbn import CBN
from keras_norms.layers.frozen import is_frozen
from keras_norms.layers.kernels import (
    CONVOLUTIONS,
    DEPTHWISE,
    is_channels_first,
    overrides_call,
)
from keras_norms.layers.recomputation import Recomputable
from keras_norms.ops.linear_of_affine import linear_of_affine, taps_inside


@keras.saving.register_keras_serializable(package="keras_norms")
class FusedCBN(Recomputable):
    """Fused complete batch normalization: `layer(CBN(x))` without writing `CBN(x)`.

    CBN is `scale * x + shift` with vectors over the channels. With kernel `W`

    ```
    conv(scale * x + shift, W) = conv(x, scale * W) + conv(shift, W)
    ```

    where the last convolution reads one constant image, which makes zero padding exact.
    No normalised tensor is written or kept for the backward pass, and the gradients of
    `scale` and `shift` come from the gradient of the kernel.

    Weights, statistics and results are those of the two layers, in training and at
    inference. In two cases they differ by more than rounding:

    * If the mean is much larger than the standard deviation, it is less accurate than
      CBN, because it subtracts the mean last.
    * In float16 the gradient of a kernel overflows if inputs deviate by 1000 or more.
      A `LossScaleOptimizer` then lowers its scale. bfloat16 has the range.

    With a `group_size` in `norm`, training is not fused, because no single kernel can
    hold the scales of all groups. Inference is fused.

    Layers may have LoRA, enabled before or after. Quantized layers (`model.quantize`)
    are not fused. Quantization of `Dense` layers cost as much accuracy as with
    BatchNormalization (`python -m benchmarks.quantization`); docs/results/deployment.md
    has convolutions.

    Args:
        layer: A `Dense`, `Conv1D`, `Conv2D`, `Conv3D`, `DepthwiseConv1D` or
            `DepthwiseConv2D` layer, or a list of such layers that read the same tensor.
        norm: The `CBN` layer before it. Its axis is the channel axis of the layers.
            Defaults to a `CBN` with that axis.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`. `dtype` is that of
            inputs and outputs, by default that of the layers.

    Call arguments:
        inputs: Tensor that fits the layers.
        training: Boolean, that of `CBN`.
        mask: Optional mask for the statistics, that of `CBN`.

    Output shape:
        That of the layer, or a list of those of the layers.

    Raises:
        ValueError: If a layer is not one of those above, is of a derived class that
            overrides `call` (or `convolution_op`), has an activity regularizer or
            causal padding, or disagrees with `norm` about the channel axis or the
            dtype.

    Example:

    >>> x = keras.layers.Activation("relu")(x)
    >>> x = FusedCBN(keras.layers.Conv2D(64, 3, padding="same"), CBN(rho=2))(x)
    """

    def __init__(
        self,
        layer: keras.layers.Layer | Sequence[keras.layers.Layer],
        norm: CBN | None = None,
        **kwargs: Any,
    ) -> None:
        self._several = isinstance(layer, (list, tuple))
        layers: list[Any] = list(layer) if self._several else [layer]
        if not layers:
            raise arguments.wrong("layer", "a layer or a list of layers", layer)
        for each in layers:
            _check(each)
        axis = 1 if is_channels_first(layers[0]) else -1
        policy = _keras.unquantized(layers[0].dtype_policy)
        if not isinstance(norm, (CBN, type(None))):
            raise arguments.wrong("norm", "a CBN layer", norm)
        super().__init__(**{"dtype": policy, **kwargs})
        self.norm = CBN(axis=axis, dtype=policy) if norm is None else norm
        self.layers = layers
        for each in (self.norm, *layers):
            if not self.trainable:
                each.trainable = False
            mine = each.compute_dtype, each.variable_dtype
            if mine != (policy.compute_dtype, policy.variable_dtype):
                argument = "norm" if each is self.norm else "layer"
                raise ValueError(
                    f"Argument `{argument}` must have the dtype of all other layers, "
                    f"{policy.name!r}. Received: {each.dtype_policy.name!r}"
                )
        self.supports_masking = True
        self.input_spec = layers[0].input_spec  # refuses other ranks before `build`

    def build(self, input_shape: Shape) -> None:
        rank = len(input_shape)
        for each in self.layers:
            axis = 1 if is_channels_first(each) else rank - 1
            if self.norm.axis % rank != axis:
                raise ValueError(
                    f"Argument `norm` must normalise axis {axis}, the channel axis of "
                    f"layer '{each.name}'. Received: norm.axis={self.norm.axis}"
                )
        for each in (self.norm, *self.layers):
            if not each.built:
                each.build(input_shape)
        self.input_spec = self.layers[0].input_spec

    def call(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Tensor | list[Tensor]:
        inputs = ops.cast(inputs, self.norm.compute_dtype)
        takes_groups = training and not is_frozen(self.norm)
        size = self.norm.group_size if takes_groups else None
        in_groups = size is not None and size != inputs.shape[0]
        if in_groups or any(each.quantization_mode for each in self.layers):
            # Each group has its own scale, and quantized kernels cannot be scaled.
            inputs = self.norm(inputs, training=training, mask=mask)
            outputs = [each(inputs) for each in self.layers]
        else:
            scale, shift = self.norm.scale_and_shift(inputs, training, mask)
            outputs = [_call(each, inputs, scale, shift) for each in self.layers]
        outputs = [ops.cast(each, self.compute_dtype) for each in outputs]
        return outputs if self._several else outputs[0]

    def compute_output_shape(self, input_shape: Shape) -> Any:
        shapes = [each.compute_output_shape(input_shape) for each in self.layers]
        return shapes if self._several else shapes[0]

    def compute_mask(self, inputs: Tensor, previous_mask: Tensor | None = None) -> Any:
        masks = [
            each.compute_mask(inputs, previous_mask) if each.supports_masking else None
            for each in self.layers
        ]
        return masks if self._several else masks[0]

    def get_config(self) -> dict[str, Any]:
        layer = list(self.layers) if self._several else self.layers[0]
        serialize = keras.saving.serialize_keras_object
        parts = {"layer": serialize(layer), "norm": serialize(self.norm)}
        return {**super().get_config(), **parts}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FusedCBN":
        revive = keras.saving.deserialize_keras_object
        parts = {name: revive(config[name]) for name in ("layer", "norm")}
        return cls(**{**config, **parts})


def can_be_fused(layer: keras.layers.Layer, norm: CBN) -> bool:
    """Whether `FusedCBN(layer, norm)` exists and writes no normalised tensor."""
    try:
        FusedCBN(layer, norm)
    except ValueError:
        return False
    return not layer.quantization_mode


def _check(layer):
    if not isinstance(layer, (keras.layers.Dense, *CONVOLUTIONS, *DEPTHWISE)):
        advice = "a Dense, Conv or DepthwiseConv layer. Put a CBN before this one"
    elif overrides_call(layer):
        advice = (
            "of a class that does not override `call` or `convolution_op`. Put a CBN "
            "before this one"
        )
    elif getattr(layer, "padding", None) == "causal":
        advice = "without causal padding. Put a CBN before this one"
    elif layer.activity_regularizer is not None:
        advice = "without an activity regularizer"
    else:
        return
    raise arguments.wrong("layer", advice, layer)


def _call(layer, inputs, scale, shift):
    """`layer(scale * inputs + shift)`."""
    with _keras.without_autocast():  # in mixed precision, a call would cast them
        # A variable, or with LoRA a tensor.
        kernel = ops.cast(layer.kernel, scale.dtype)
        bias = ops.cast(layer.bias, scale.dtype) if layer.use_bias else None
    if isinstance(layer, keras.layers.Dense):
        # On PyTorch, `ops.matmul` rounds float64 to float32.
        on_torch = keras.backend.backend() == "torch"
        matmul = operator.matmul if on_torch else ops.matmul
        outputs = linear_of_affine(inputs, scale, shift, kernel, bias, matmul)
        return layer.activation(outputs)
    depthwise = isinstance(layer, DEPTHWISE)
    convolution = functools.partial(
        ops.depthwise_conv if depthwise else ops.conv,
        strides=layer.strides,
        padding=layer.padding,
        data_format=layer.data_format,
        dilation_rate=layer.dilation_rate,
    )
    outputs = linear_of_affine(
        inputs,
        scale,
        shift,
        kernel,
        bias,
        convolution,
        groups=1 if depthwise else layer.groups,
        depthwise=depthwise,
        inside=_inside(layer, inputs),
        channels_first=is_channels_first(layer),
    )
    return layer.activation(outputs)


def _inside(layer, inputs):
    """For each spatial axis, `(outputs, taps)`: which taps read no padding."""
    if layer.padding == "valid" or max(layer.kernel_size) == 1:
        return None
    shape = ops.shape(inputs)
    sizes = shape[2:] if is_channels_first(layer) else shape[1:-1]
    steps = layer.kernel_size, layer.strides, layer.dilation_rate
    return [taps_inside(*each) for each in zip(sizes, *steps)]
