"""What the layers that normalise the channels of an activation have in common."""

import keras
from keras import constraints, initializers, regularizers

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms.ops.functions import ops
from keras_norms.ops.moments import moving_averages
from keras_norms.ops.replicas import check_strategy, warn_of_drift
from keras_norms.ops.shapes import in_groups, not_divisible


class ChannelNormalization(keras.layers.Layer):
    """Base of a layer with statistics, `gamma` and `beta` for each channel.

    A subclass calls `build_affine` in `build`, adds its statistics with
    `add_statistic`, and gets `gamma` and `beta` from `affine` in `call`. Statistics and
    affine weights are float64 under the policy float64, and float32 under all others.
    """

    def __init__(
        self,
        axis,
        momentum,
        epsilon,
        center,
        scale,
        synchronized,
        beta_initializer,
        gamma_initializer,
        beta_regularizer,
        gamma_regularizer,
        beta_constraint,
        gamma_constraint,
        group_size,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.axis = arguments.integer("axis", axis)
        self.momentum = arguments.number("momentum", momentum, at_least=0, below=1)
        self.epsilon = arguments.number("epsilon", epsilon, above=0)
        self.center = arguments.boolean("center", center)
        self.scale = arguments.boolean("scale", scale)
        self.synchronized = arguments.boolean("synchronized", synchronized)
        self.beta_initializer = arguments.initializer(
            "beta_initializer", beta_initializer
        )
        self.gamma_initializer = arguments.initializer(
            "gamma_initializer", gamma_initializer
        )
        self.beta_regularizer = arguments.regularizer(
            "beta_regularizer", beta_regularizer
        )
        self.gamma_regularizer = arguments.regularizer(
            "gamma_regularizer", gamma_regularizer
        )
        self.beta_constraint = arguments.constraint("beta_constraint", beta_constraint)
        self.gamma_constraint = arguments.constraint(
            "gamma_constraint", gamma_constraint
        )
        self.group_size = arguments.group_size(group_size, self.synchronized)
        self.supports_masking = True
        self.gamma = None
        self.beta = None

    def build_affine(self, input_shape):
        """Make `gamma` and `beta`. Returns the number of channels."""
        check_strategy(self)
        channels = arguments.channels(self, input_shape)
        if self.group_size and self.axis % len(input_shape) == 0:
            raise ValueError(
                "Argument `group_size` must be None where the first axis is that of "
                f"channels, not of samples. Received: group_size={self.group_size} "
                f"with axis={self.axis}"
            )
        if self.scale:
            self.gamma = self.add_weight(
                name="gamma",
                shape=(channels,),
                dtype=self.statistics_dtype,
                initializer=self.gamma_initializer,
                regularizer=self.gamma_regularizer,
                constraint=self.gamma_constraint,
                autocast=False,
            )
        if self.center:
            self.beta = self.add_weight(
                name="beta",
                shape=(channels,),
                dtype=self.statistics_dtype,
                initializer=self.beta_initializer,
                regularizer=self.beta_regularizer,
                constraint=self.beta_constraint,
                autocast=False,
            )
        self.input_spec = keras.layers.InputSpec(
            ndim=len(input_shape), axes={self.axis: channels}
        )
        return channels

    def add_statistic(self, name, shape, initializer):
        # Replicas that normalise each with their own batch keep one common average.
        # Those that are synchronized compute the same one.
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=initializer,
            dtype=self.statistics_dtype,
            trainable=False,
            autocast=False,
            aggregation="none" if self.synchronized else "mean",
        )

    def update_statistics(self, count, *pairs):
        """Move averages on by `momentum`.

        Args:
            count: How many elements the batch has.
            *pairs: An average of this layer, and the statistic of the batch.
        """
        warn_of_drift(self)
        averages, values = zip(*pairs)
        stored = tuple(ops.cast(average, self.statistics_dtype) for average in averages)
        moved = moving_averages(stored, values, self.momentum, count)
        for average, value in zip(averages, moved):
            average.assign(value)

    def prior(self, moving_mean):
        """What `moments` is told of a mean."""
        # A copy: PyTorch assigns in place, and gradients need what was there before.
        return ops.copy(ops.cast(moving_mean, self.statistics_dtype))

    @property
    def statistics_dtype(self):
        return "float64" if self.compute_dtype == "float64" else "float32"

    def affine(self):
        """`gamma` and `beta` in `statistics_dtype`; ones or zeros where there is none.

        Returns:
            Two tensors of shape `(channels,)`.
        """
        channels = (self.input_spec.axes[self.axis],)
        gamma, beta = (
            ops.full(channels, missing, self.statistics_dtype)
            if weight is None
            else ops.cast(weight, self.statistics_dtype)
            for weight, missing in ((self.gamma, 1), (self.beta, 0))
        )
        return gamma, beta

    def in_groups(self, inputs, gamma, beta, mask):
        """What maps of training take; see `keras_norms.ops.shapes.in_groups`."""
        size, batch = self.group_size, inputs.shape[0]
        if _keras.in_symbolic_scope():
            size = None  # JAX and PyTorch make up a size of the batch there.
        elif size and batch is not None and batch % size:
            raise ValueError(not_divisible(size, batch))
        return in_groups(inputs, gamma, beta, mask, self.axis, size)

    def compute_output_shape(self, input_shape):
        arguments.channels(self, input_shape, known=False)
        return input_shape

    def get_config(self):
        config = super().get_config()
        config.update(
            {
                "axis": self.axis,
                "momentum": self.momentum,
                "epsilon": self.epsilon,
                "center": self.center,
                "scale": self.scale,
                "synchronized": self.synchronized,
                "beta_initializer": initializers.serialize(self.beta_initializer),
                "gamma_initializer": initializers.serialize(self.gamma_initializer),
                "beta_regularizer": regularizers.serialize(self.beta_regularizer),
                "gamma_regularizer": regularizers.serialize(self.gamma_regularizer),
                "beta_constraint": constraints.serialize(self.beta_constraint),
                "gamma_constraint": constraints.serialize(self.gamma_constraint),
                "group_size": self.group_size,
            }
        )
        return config
