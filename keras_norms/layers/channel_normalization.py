"""Base of the layers that normalise the channels of an activation."""

from typing import Any

import keras

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._types import Constraint, Initializer, Regularizer, Shape, Tensor
from keras_norms.layers.recomputation import Recomputable
from keras_norms.ops.custom_gradient import snapshot
from keras_norms.ops.functions import ops
from keras_norms.ops.moments import moving_averages
from keras_norms.ops.replicas import check_strategy, warn_of_drift
from keras_norms.ops.shapes import in_groups


class ChannelNormalization(Recomputable):
    """Base of a layer with averages, `gamma` and `beta` for each channel.

    A subclass names its averages and passes its arguments on (`of_weights`:
    initializers of the four weights, regularizers and constraints of two, by name). Its
    `call` uses `affine` and `stored`, and in training `in_groups`. All weights are
    float64 under the policy float64, and float32 under all others.
    """

    averages: tuple[str, str]
    # Variables, `None` before the layer is built.
    gamma: Any
    beta: Any
    moving_mean: Any
    gamma_initializer: Initializer
    beta_initializer: Initializer
    moving_mean_initializer: Initializer
    gamma_regularizer: Regularizer
    beta_regularizer: Regularizer
    gamma_constraint: Constraint
    beta_constraint: Constraint

    def __init__(
        self,
        axis,
        momentum,
        epsilon,
        center,
        scale,
        synchronized,
        group_size,
        of_weights,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.axis = arguments.integer("axis", axis)
        self.momentum = arguments.number("momentum", momentum, at_least=0, below=1)
        self.epsilon = arguments.number("epsilon", epsilon, above=0)
        self.center = arguments.boolean("center", center)
        self.scale = arguments.boolean("scale", scale)
        self.synchronized = arguments.boolean("synchronized", synchronized)
        self.group_size = arguments.group_size(group_size, self.synchronized)
        for name, value in of_weights.items():
            check = getattr(arguments, name.rpartition("_")[2])
            setattr(self, name, check(name, value))
        self._of_weights = tuple(of_weights)
        self.supports_masking = True
        for name in ("gamma", "beta", *self.averages):
            setattr(self, name, None)

    def build(self, input_shape: Shape) -> None:
        check_strategy(self)
        channels = arguments.channels(self, input_shape)
        if self.group_size and self.axis % len(input_shape) == 0:
            raise ValueError(
                "Argument `group_size` must be None if the first axis is the channel "
                f"axis. Received: group_size={self.group_size} with axis={self.axis}"
            )
        for name, is_there in (("gamma", self.scale), ("beta", self.center)):
            if is_there:
                weight = self.add_weight(
                    name=name,
                    shape=(channels,),
                    dtype=self.statistics_dtype,
                    initializer=getattr(self, f"{name}_initializer"),
                    regularizer=getattr(self, f"{name}_regularizer"),
                    constraint=getattr(self, f"{name}_constraint"),
                    autocast=False,
                )
                setattr(self, name, weight)
        for name in self.averages:
            initializer = getattr(self, f"{name}_initializer")
            setattr(self, name, self.add_statistic(name, (channels,), initializer))
        self.input_spec = keras.layers.InputSpec(
            ndim=len(input_shape), axes={self.axis: channels}
        )

    def add_statistic(self, name, shape, initializer):
        # Replicas that normalise with their own batches keep one common average.
        # Synchronized ones compute the same one.
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=initializer,
            dtype=self.statistics_dtype,
            trainable=False,
            autocast=False,
            aggregation="none" if self.synchronized else "mean",
        )

    def stored(self) -> tuple[Tensor, ...]:
        """The averages as they are now, in `statistics_dtype`."""
        dtype = self.statistics_dtype
        averages = (getattr(self, name) for name in self.averages)
        return tuple(snapshot(ops.cast(each, dtype)) for each in averages)

    def update_statistics(self, stored, count, *statistics):
        """Update the averages by `momentum`, after a batch of `count` elements."""
        warn_of_drift(self)
        moved = moving_averages(stored, statistics, self.momentum, count)
        for name, value in zip(self.averages, moved):
            getattr(self, name).assign(value)

    @property
    def statistics_dtype(self) -> str:
        return "float64" if self.compute_dtype == "float64" else "float32"

    def affine(self) -> tuple[Tensor, Tensor]:
        """`gamma` and `beta` in `statistics_dtype`; 1 or 0 where there is none."""
        channels, dtype = (self.input_spec.axes[self.axis],), self.statistics_dtype
        gamma, beta = (
            ops.full(channels, missing, dtype)
            if weight is None
            else ops.cast(weight, dtype)
            for weight, missing in ((self.gamma, 1), (self.beta, 0))
        )
        return gamma, beta

    def in_groups(self, inputs, mask):
        """What maps of training take; see `keras_norms.ops.shapes.in_groups`."""
        mask = arguments.broadcast_mask(mask, inputs, self.axis)
        # JAX and PyTorch invent a batch size in a symbolic call.
        size = None if _keras.in_symbolic_scope() else self.group_size
        return in_groups(inputs, *self.affine(), mask, self.axis, size)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        arguments.channels(self, input_shape, known=False)
        return input_shape

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        names = "axis", "momentum", "epsilon", "center", "scale", "synchronized"
        for name in (*names, "group_size"):
            config[name] = getattr(self, name)
        for name in self._of_weights:
            config[name] = keras.saving.serialize_keras_object(getattr(self, name))
        return config
