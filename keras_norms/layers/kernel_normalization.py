"""Base of the wrappers that normalise the kernel of a layer."""

import math
from typing import Any

import keras
from keras import ops, tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._types import Shape, Tensor
from keras_norms.layers.kernels import check_layer, kernels_of, obstacle


class KernelNormalization(keras.layers.Wrapper):
    """Base of wrappers that call a layer with its kernel normalised.

    The layer keeps its weights, which are trained and saved. It is called in a scope
    that replaces the kernel by a function of it.

    A subclass defines `_normalize` and `_gain_initializer_of`, and may set
    `smallest_fan_in`.
    """

    smallest_fan_in = 1

    def __init__(self, layer: keras.layers.Layer, epsilon: float = 1e-5, **kwargs: Any):
        check_layer(layer)
        super().__init__(layer, **{"dtype": layer.dtype_policy, **kwargs})
        if not self.trainable:
            layer.trainable = False
        layer.quantize = self._refuse_quantization  # as in layers that cannot do it
        self.epsilon = arguments.number("epsilon", epsilon, above=0)
        self.gains: dict[str, keras.Variable] = {}
        self.input_spec = layer.input_spec  # refuses other ranks before `build` does

    def _refuse_quantization(self, *args, **kwargs):
        # `model.quantize` warns of it, and continues with the next layer.
        raise NotImplementedError(
            f"Layer '{self.layer.name}' in '{self.name}' cannot be quantized: its "
            "kernel is normalised in each call. Quantize `keras_norms.fold(model)`."
        )

    def _normalize(self, weight, axes, gain):
        """`weight` with each unit normalised and multiplied by its `gain`, if any."""
        raise NotImplementedError

    def _gain_initializer_of(self, kernel):
        """The initializer of the gain of a kernel, `None` where units have no gain."""
        raise NotImplementedError

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        for kernel in kernels_of(self.layer):
            shape = tuple(getattr(self.layer, kernel.name).shape)
            if math.prod(shape[i] for i in kernel.fan_in) < self.smallest_fan_in:
                raise ValueError(
                    f"{type(self).__name__} cannot normalise `{kernel.name}` of layer "
                    f"'{self.layer.name}': its units have a single weight, which is "
                    "zero without its mean. Use WN, or leave the layer unwrapped. "
                    f"Received: {kernel.name}.shape={shape}"
                )
            initializer = self._gain_initializer_of(kernel)
            if initializer is not None:
                self.gains[kernel.name] = self.add_weight(
                    name=kernel.name.replace("kernel", "gain"),
                    shape=kernel.unit_shape(shape),
                    initializer=initializer,
                    dtype=self.layer.variable_dtype,
                    autocast=False,
                )
        self.input_spec = self.layer.input_spec

    @property
    def _kernels(self):
        if not self.built:
            raise ValueError(
                f"Layer '{self.name}' has no weights yet. Call it or its `build` first."
            )
        return kernels_of(self.layer)

    def _stored(self, kernel):
        """The kernel as it is stored: in a call, mixed precision would cast it."""
        if found := obstacle(self.layer):
            raise ValueError(
                f"Layer '{self.layer.name}' changed after it was wrapped: it {found}."
            )
        with _keras.without_autocast():
            return getattr(self.layer, kernel.name).value

    def _normalized(self, kernel, gain):
        weight = self._normalize(self._stored(kernel), kernel.fan_in, gain)
        return ops.cast(weight, self.layer.variable_dtype)

    def normalized_kernels(self) -> dict[str, Tensor]:
        """The kernels that the wrapped layer is called with.

        Returns:
            A dict from the name of the layer's attribute (`"kernel"`; for a separable
            convolution, `"depthwise_kernel"` and `"pointwise_kernel"`) to a tensor in
            the dtype of the weight.
        """
        return {
            kernel.name: self._normalized(kernel, self.gains.get(kernel.name))
            for kernel in self._kernels
        }

    def call(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Tensor:
        accepted = self.layer.call_signature_parameters
        optional = {
            name: value
            for name, value in (("training", training), ("mask", mask))
            if name in accepted and value is not None
        }
        outputs = self._call_layer(self.normalized_kernels(), inputs, **optional)
        if self.compute_dtype == self.layer.compute_dtype:
            return outputs
        return tree.map_structure(
            lambda each: ops.cast(each, self.compute_dtype), outputs
        )

    def rematerialized_call(self, layer_call, *args, **kwargs):
        # In a `keras.RematScope` it is run once, as the norms are.
        return layer_call

    def _call_layer(self, values, inputs, **optional):
        """Call the layer with `values`, by attribute, in place of its weights."""
        layer, outer = self.layer, _keras.get_stateless_scope()
        scope = keras.StatelessScope(
            collect_losses=outer is None or outer.collect_losses
        )
        if outer is not None:
            # A scope hides the one around it.
            scope.state_mapping.update(outer.state_mapping)
        for name, value in values.items():
            scope.add_update((getattr(layer, name), value))
        before = dict(scope.state_mapping)
        with _keras.running_once([layer]), scope:
            outputs = layer(inputs, **optional)
        for variable in [*layer.variables, *layer.metrics_variables]:
            value = scope.get_current_value(variable)
            if value is not before.get(id(variable)):
                variable.assign(value)
        for loss in scope.losses:
            # In a scope, the layer that added it has noted so already.
            (layer.add_loss if outer is None else outer.add_loss)(loss)
        return outputs

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return self.layer.compute_output_shape(input_shape)

    def compute_mask(
        self, inputs: Tensor, previous_mask: Tensor | None = None
    ) -> Tensor | None:
        if not self.layer.supports_masking:
            return None
        return self.layer.compute_mask(inputs, previous_mask)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "epsilon": self.epsilon}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Any:
        # The method of Keras removes the layer from the dict that it gets.
        return super().from_config(dict(config), custom_objects)
