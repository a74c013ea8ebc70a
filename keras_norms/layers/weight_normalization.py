"""WS, CWN and WN: wrappers that normalise the kernel of a layer."""

import math

import keras
import numpy as np
from keras import initializers, ops, tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms.layers.kernels import (
    check_layer,
    check_unchanged,
    kernels_of,
    overrides_call,
    unit_axes,
)
from keras_norms.ops import spheres


class NormalizesKernel(keras.layers.Wrapper):
    """Base of wrappers that call a layer with its kernel normalised.

    The layer keeps its weights, which are trained and saved. It is called in a scope
    in which a function of the kernel takes the place of the kernel.

    A subclass defines `normalize`, `gain_initializer_of`, which returns `None` where
    units have no gain, and `smallest_fan_in`.
    """

    smallest_fan_in = 1

    def __init__(self, layer, epsilon, **kwargs):
        check_layer(layer)
        super().__init__(layer, **{"dtype": layer.dtype_policy, **kwargs})
        if not self.trainable:
            layer.trainable = False
        self.epsilon = arguments.number("epsilon", epsilon, above=0)
        self.gains = {}

    def normalize(self, weight, axes, gain):
        """`weight` with each unit normalised and multiplied by its `gain`, if any."""
        raise NotImplementedError

    def gain_initializer_of(self, kernel):
        raise NotImplementedError

    def build(self, input_shape):
        super().build(input_shape)
        self._kernels = kernels_of(self.layer)
        for kernel in self._kernels:
            self._check_fan_in(kernel)
        gains = {kernel.name: self._add_gain(kernel) for kernel in self._kernels}
        self.gains = {name: gain for name, gain in gains.items() if gain is not None}
        self.input_spec = self.layer.input_spec

    def _check_fan_in(self, kernel):
        shape = tuple(getattr(self.layer, kernel.name).shape)
        fan_in = math.prod(shape[i] for i in kernel.fan_in)
        if fan_in < self.smallest_fan_in:
            raise ValueError(
                f"{type(self).__name__} cannot normalise `{kernel.name}` of layer "
                f"'{self.layer.name}', in which a unit has a single weight: less its "
                "mean it is zero. Use WN, or leave the layer unwrapped. "
                f"Received: {kernel.name}.shape={shape}"
            )

    def _add_gain(self, kernel):
        initializer = self.gain_initializer_of(kernel)
        if initializer is None:
            return None
        return self.add_weight(
            name=kernel.name.replace("kernel", "gain"),
            shape=kernel.unit_shape(getattr(self.layer, kernel.name).shape),
            initializer=initializer,
            dtype=self.layer.variable_dtype,
            autocast=False,
        )

    def _stored(self, kernel):
        """The kernel as it is stored: in a call, mixed precision would cast it."""
        check_unchanged(self.layer)
        with _keras.without_autocast():
            return getattr(self.layer, kernel.name).value

    def _check_built(self):
        if not self.built:
            raise ValueError(
                f"Layer '{self.name}' has no weights yet. Call it, or its `build`."
            )

    def _normalized(self, kernel, gain):
        weight = self.normalize(self._stored(kernel), kernel.fan_in, gain)
        return ops.cast(weight, self.layer.variable_dtype)

    def normalized_kernels(self):
        """The kernels that the wrapped layer is called with.

        Returns:
            A dict from the name of the layer's attribute (`"kernel"`; for a separable
            convolution, `"depthwise_kernel"` and `"pointwise_kernel"`) to a tensor in
            the dtype of the weight.
        """
        self._check_built()
        return {
            kernel.name: self._normalized(kernel, self.gains.get(kernel.name))
            for kernel in self._kernels
        }

    def call(self, inputs, training=None, mask=None):
        accepted = self.layer.call_signature_parameters
        optional = {"training": training, "mask": mask}
        optional = {
            name: value
            for name, value in optional.items()
            if name in accepted and value is not None
        }
        outputs = self._call_layer(self.normalized_kernels(), inputs, **optional)
        if self.compute_dtype == self.layer.compute_dtype:
            return outputs
        return tree.map_structure(
            lambda each: ops.cast(each, self.compute_dtype), outputs
        )

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
        with scope:
            outputs = layer(inputs, **optional)
        for variable in [*layer.variables, *layer.metrics_variables]:
            value = scope.get_current_value(variable)
            if value is not before.get(id(variable)):
                variable.assign(value)
        for loss in scope.losses:
            # They are known to be the layer's, or a layer's in it, where scopes count.
            (layer.add_loss if outer is None else outer.add_loss)(loss)
        return outputs

    def compute_output_shape(self, input_shape):
        return self.layer.compute_output_shape(input_shape)

    def compute_mask(self, inputs, previous_mask=None):
        if not self.layer.supports_masking:
            return None
        return self.layer.compute_mask(inputs, previous_mask)

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        # The method of Keras takes the layer out of the dict that it is given.
        return super().from_config(dict(config), custom_objects)


@keras.saving.register_keras_serializable(package="keras_norms")
class WS(NormalizesKernel):
    """WS: weight standardization.

    A wrapper around a layer with a kernel. With `w` the weights that one unit of the
    layer sums over, the layer is called with

    ```
    w_hat = (w - mean(w)) / sqrt(var(w) + epsilon)
    ```

    in place of `w`. The layer stores and saves `w`, its regularizers and constraints
    act on `w`, and the gradient goes through the normalisation.

    A unit is an output channel of a `Dense` or (transposed) convolution layer, an
    element of the axes that kernel and output share in `EinsumDense`, and a pair of
    input channel and multiplier in a depthwise convolution. Both kernels of a separable
    convolution are normalised.

    Without a gain, `w_hat` has unit variance, so that outputs grow with the root of the
    fan-in: use it before a normalisation of activations.

    Args:
        layer: `Dense`, `EinsumDense`, `Conv1D` to `3D`, `Conv1DTranspose` to `3D`,
            `DepthwiseConv1D` or `2D`, `SeparableConv1D` or `2D`, or a layer of a class
            derived from one of these. A `call` of that class' own reads `w_hat` as the
            kernel; a `kernel` of its own is refused. It may be built and trained.
        gain: Boolean, whether `w_hat` is multiplied by a learned number per unit, which
            starts at 1.
        epsilon: Positive float, added to the variance inside the root.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`. `dtype` is that of
            the wrapped layer; another one is that of inputs and outputs, as in the
            wrappers of Keras, and the layer computes in its own.

    Call arguments:
        inputs: The input of the wrapped layer.
        training: Passed on where the wrapped layer takes it.
        mask: Passed on where the wrapped layer takes it.

    Input shape:
        That of the wrapped layer.

    Output shape:
        That of the wrapped layer.

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

    def __init__(self, layer, gain=False, epsilon=1e-5, **kwargs):
        super().__init__(layer, epsilon, **kwargs)
        self.gain = arguments.boolean("gain", gain)

    def normalize(self, weight, axes, gain):
        return spheres.ws(weight, axes, gain, self.epsilon)

    def gain_initializer_of(self, kernel):
        return initializers.Ones() if self.gain else None

    def get_config(self):
        return {**super().get_config(), "gain": self.gain}


@keras.saving.register_keras_serializable(package="keras_norms")
class CWN(NormalizesKernel):
    """CWN: centered weight normalization.

    A wrapper around a layer with a kernel. With `w` the weights that one unit of the
    layer sums over, the layer is called with

    ```
    w_hat = scale * (w - mean(w)) / sqrt(|w - mean(w)|^2 + epsilon)
    ```

    in place of `w`: a point on the sphere of radius `scale`. For `n` weights per unit,
    this is WS divided by `sqrt(n)`. What a unit is, which layers may be wrapped, and
    what is stored and saved, is the same as for `WS`.

    Args:
        layer: A layer with a kernel, see `WS`.
        scale: Positive float. `sqrt(2)` keeps the variance of outputs where a ReLU
            comes before the layer.
        gain: Boolean, whether `w_hat` is also multiplied by a learned number per unit.
        gain_initializer: Initializer of that number.
        epsilon: Positive float, added to the squared length inside the root.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`. `dtype` is that of
            the wrapped layer; another one is that of inputs and outputs, as in the
            wrappers of Keras, and the layer computes in its own.

    Call arguments:
        inputs: The input of the wrapped layer.
        training: Passed on where the wrapped layer takes it.
        mask: Passed on where the wrapped layer takes it.

    Input shape:
        That of the wrapped layer.

    Output shape:
        That of the wrapped layer.

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
    ...     keras.Input((784,)),
    ...     CWN(keras.layers.Dense(128, activation="relu")),
    ...     CWN(keras.layers.Dense(10), scale=2**0.5, gain=True),
    ... ])

    Reference:

    - Huang et al., Centered Weight Normalization in Accelerating Training of Deep
      Neural Networks, ICCV 2017.
      https://openaccess.thecvf.com/content_iccv_2017/html/Huang_Centered_Weight_Normalization_ICCV_2017_paper.html
    """

    smallest_fan_in = 2

    def __init__(
        self,
        layer,
        scale=1.0,
        gain=False,
        gain_initializer="ones",
        epsilon=1e-5,
        **kwargs,
    ):
        super().__init__(layer, epsilon, **kwargs)
        self.scale = arguments.number("scale", scale, above=0)
        self.gain = arguments.boolean("gain", gain)
        self.gain_initializer = arguments.initializer(
            "gain_initializer", gain_initializer
        )

    def normalize(self, weight, axes, gain):
        return self.scale * spheres.cwn(weight, axes, gain, self.epsilon)

    def gain_initializer_of(self, kernel):
        return self.gain_initializer if self.gain else None

    def get_config(self):
        return {
            **super().get_config(),
            "scale": self.scale,
            "gain": self.gain,
            "gain_initializer": initializers.serialize(self.gain_initializer),
        }


@keras.saving.register_keras_serializable(package="keras_norms")
class WN(NormalizesKernel):
    """WN: weight normalization.

    A wrapper around a layer with a kernel. With `w` the weights that one unit of the
    layer sums over and `g` a learned number per unit, the layer is called with

    ```
    w_hat = g * w / sqrt(|w|^2 + epsilon)
    ```

    in place of `w`, so that length and direction are trained apart. `g` starts at
    `sqrt(|w|^2 + epsilon)`: wrapping a layer, also a trained one, leaves its function
    as it was. What a unit is, which layers may be wrapped, and what is stored and
    saved, is the same as for `WS`.

    If you give the wrapped layer other weights after the wrapper is built, `g` stays.
    `reset_gain()` then makes `w_hat` equal to `w` again.

    Args:
        layer: A layer with a kernel, see `WS`.
        epsilon: Positive float, added to the squared length inside the root.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`. `dtype` is that of
            the wrapped layer; another one is that of inputs and outputs, as in the
            wrappers of Keras, and the layer computes in its own.

    Call arguments:
        inputs: The input of the wrapped layer.
        training: Passed on where the wrapped layer takes it.
        mask: Passed on where the wrapped layer takes it.

    Input shape:
        That of the wrapped layer.

    Output shape:
        That of the wrapped layer.

    Weights:
        `gain`, which is `g`, one number per unit in the order of the kernel's axes (for
        a separable convolution, `depthwise_gain` and `pointwise_gain`). They are in
        `gains`, by the name of the kernel.

    Raises:
        ValueError: If `layer` has no kernel, is of a class that overrides it, has LoRA
            enabled, is quantized, or is a wrapper or a model.

    Example:

    >>> layer = WN(keras.layers.Dense(128, activation="relu"))
    >>> layer.data_init(x[:500])  # Optional: start with normalised pre-activations.

    Reference:

    - Salimans and Kingma, Weight Normalization: A Simple Reparameterization to
      Accelerate Training of Deep Neural Networks, NeurIPS 2016.
      https://arxiv.org/abs/1602.07868

    The paper has no `epsilon` and lets `g` start from data, which is `data_init`.
    """

    def __init__(self, layer, epsilon=1e-5, **kwargs):
        super().__init__(layer, epsilon, **kwargs)

    def normalize(self, weight, axes, gain):
        return spheres.wn(weight, axes, gain, self.epsilon)

    def gain_initializer_of(self, kernel):
        def lengths(shape, dtype=None):
            return ops.cast(self._lengths(kernel), dtype)

        return lengths

    def _lengths(self, kernel):
        return spheres.norm(self._stored(kernel), kernel.fan_in, self.epsilon)

    def reset_gain(self):
        """Set `g` so that the wrapped layer is called with its kernel as it is stored.

        Use it after the kernel of the wrapped layer was assigned or loaded.
        """
        self._check_built()
        for kernel in self._kernels:
            self.gains[kernel.name].assign(self._lengths(kernel))

    def data_init(self, x):
        """Start with normalised pre-activations (Salimans and Kingma, Section 3).

        Sets `g` and the bias such that, for each unit, the outputs for `x` before the
        activation function have mean 0 and variance 1 over all samples and positions.
        The kernel stays. In a separable convolution, this is done with the gain of the
        pointwise kernel, and the depthwise stage is left as it is.

        Apply it to one layer after the other, each on the outputs of those before.

        Args:
            x: A batch of inputs, an array or a tensor. If the layer is not built yet,
                this builds it.

        Raises:
            ValueError: If the wrapped layer has no bias for each unit, if a unit has
                the same output everywhere, or if the layer is of a class that does more
                to outputs before the activation function.
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
                "has no bias. Make it with `use_bias=True` (`bias_axes` in "
                "EinsumDense)."
            )
        zeros = ops.zeros(layer.bias.shape, layer.variable_dtype)
        outputs = self._before_activation(x, None, zeros)
        units = unit_axes(layer, len(outputs.shape))
        others = tuple(i for i in range(len(outputs.shape)) if i not in units)
        deviation, mean, unit_outputs = spheres.decompose(outputs, others)
        deviation = ops.convert_to_numpy(deviation)
        mean = ops.convert_to_numpy(mean)
        constant = int(np.sum(~(deviation > 0)))
        if constant:
            raise ValueError(
                "`data_init` needs inputs for which the outputs of each unit vary. "
                f"Received: x.shape={tuple(x.shape)}, for which {constant} of "
                f"{deviation.size} units of layer '{layer.name}' do not."
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
                f"whose class, {type(self.layer).__name__}, overrides `call`: they do "
                "not follow from those of the kernel by its gain and bias."
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
