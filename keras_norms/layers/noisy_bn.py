"""NoisyBN: batch normalization with time-varying noise after it."""

from typing import Any

import keras

from keras_norms._checks import arguments
from keras_norms._types import Constraint, Initializer, Regularizer, Tensor
from keras_norms.layers.channel_normalization import ChannelNormalization
from keras_norms.layers.recomputation import moves_state
from keras_norms.ops import noise, normalize
from keras_norms.ops.functions import ops
from keras_norms.ops.moments import moments
from keras_norms.ops.shapes import out_of_groups


@keras.saving.register_keras_serializable(package="keras_norms")
class NoisyBN(ChannelNormalization):
    """Noisy batch normalization: BN, then noise that shifts and scales its output.

    With `mean` and `var` of each channel `j`, over all other positions `i`:

    ```
    y0_ij = gamma_j * (x_ij - mean_j) / sqrt(var_j + epsilon) + beta_j
    y_ij  = s_ij * y0_ij + m_ij

    mu_j ~ U(-mean_range, mean_range)   m_ij ~ mu_j + U(-mean_jitter, mean_jitter)
    sigma_j ~ U(1, scale_range)         s_ij ~ N(sigma_j, scale_jitter)
    ```

    The distribution of a channel changes from step to step. If a network trains well
    with this layer, stable distributions are not the reason.

    **In training** (`training=True`), `mean` and `var` are those of the batch, the
    moving statistics follow them with `momentum`, and each call draws new noise. The
    gradient treats it as a constant.

    **At inference**, `mean` and `var` are the moving statistics and there is no noise:
    `y = y0`, as in `keras.layers.BatchNormalization`. `layer.trainable = False` means
    inference mode. The moving statistics include the noise of earlier layers: measure
    them again without it, with `recalibrate`, before you test a network.

    Second derivatives, forward mode and `keras.remat` work as in `CBN`.

    Args:
        axis: The channel axis. Use 1 after a convolution with
            `data_format="channels_first"`.
        momentum: In [0, 1), decay of the moving statistics.
        epsilon: Positive, added to the variance inside the root.
        center: Whether there is a `beta`.
        scale: Whether there is a `gamma`.
        mean_range: Not negative, bound of the mean shift of a channel.
        scale_range: At least 1, bound of the mean scale of a channel.
        mean_jitter: Not negative, bound of an element's shift around that of its
            channel.
        scale_jitter: Not negative, standard deviation of an element's scale
            around that of its channel.
        noise_at_inference: Whether there is noise at inference as well.
        seed: 0 to 2^31 - 1, or `None`. The same seed gives the same noise, call by
            call.
        synchronized: Whether statistics are those of all replicas, see `CBN`.
        beta_initializer, gamma_initializer: Initializers of the affine weights.
        moving_mean_initializer, moving_variance_initializer: Those of the averages.
        beta_regularizer, gamma_regularizer: Optional regularizers.
        beta_constraint, gamma_constraint: Optional constraints.
        group_size: Optional positive integer. In training, each group of that many
            consecutive samples is normalised with its own statistics, see `CBN`. The
            moving ones follow their mean over groups. The noise of a channel is that of
            the whole batch.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: Tensor of rank 2 or more.
        training: Boolean, see above.
        mask: Optional boolean tensor, see `CBN`. If it hides a whole channel, the mean
            and variance of the batch are 0 and the moving ones stay.

    Input and output shape:
        Any of rank 2 or more, with a known size of `axis`.

    Weights:
        Those of `keras.layers.BatchNormalization`, in its order: `gamma`, `beta`,
        `moving_mean`, `moving_variance`, each of shape `(channels,)`. They stay in
        float32 in mixed precision.

    Raises:
        ValueError: If an argument is out of its range, and as `CBN` does.

    Example:

    >>> model = keras.Sequential([
    ...     keras.layers.Conv2D(64, 3, use_bias=False),
    ...     NoisyBN(seed=0),
    ...     keras.layers.Activation("relu"),
    ... ])

    Reference:

    - Santurkar, Tsipras, Ilyas and Madry, How Does Batch Normalization Help
      Optimization?, NeurIPS 2018, Section 2.1 and Algorithm 1.
      https://arxiv.org/abs/1805.11604
    """

    averages = "moving_mean", "moving_variance"
    moving_variance: Any
    moving_variance_initializer: Initializer

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        mean_range: float = 0.5,
        scale_range: float = 1.25,
        mean_jitter: float = 0.1,
        scale_jitter: float = 0.1,
        noise_at_inference: bool = False,
        seed: int | None = None,
        synchronized: bool = False,
        beta_initializer: Initializer = "zeros",
        gamma_initializer: Initializer = "ones",
        moving_mean_initializer: Initializer = "zeros",
        moving_variance_initializer: Initializer = "ones",
        beta_regularizer: Regularizer = None,
        gamma_regularizer: Regularizer = None,
        beta_constraint: Constraint = None,
        gamma_constraint: Constraint = None,
        group_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            synchronized=synchronized,
            group_size=group_size,
            of_weights={
                "beta_initializer": beta_initializer,
                "gamma_initializer": gamma_initializer,
                "moving_mean_initializer": moving_mean_initializer,
                "moving_variance_initializer": moving_variance_initializer,
                "beta_regularizer": beta_regularizer,
                "gamma_regularizer": gamma_regularizer,
                "beta_constraint": beta_constraint,
                "gamma_constraint": gamma_constraint,
            },
            **kwargs,
        )
        self.mean_range = arguments.number("mean_range", mean_range, at_least=0)
        self.scale_range = arguments.number("scale_range", scale_range, at_least=1)
        self.mean_jitter = arguments.number("mean_jitter", mean_jitter, at_least=0)
        self.scale_jitter = arguments.number("scale_jitter", scale_jitter, at_least=0)
        self.noise_at_inference = arguments.boolean(
            "noise_at_inference", noise_at_inference
        )
        if seed is not None:
            # What every backend can keep in a variable.
            seed = arguments.integer("seed", seed, at_least=0, at_most=2**31 - 1)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(self.seed)

    @moves_state
    def call(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Tensor:
        inputs = ops.cast(inputs, self.compute_dtype)
        training = training and self.trainable
        stored = self.stored()
        if training:
            x, gamma, beta, mask, axis = self.in_groups(inputs, mask)
            batch = moments(x, gamma.dtype, axis, mask, self.synchronized, stored[0])
            outputs = normalize.batch_normalization(
                x,
                gamma,
                beta,
                batch,
                epsilon=self.epsilon,
                axis=axis,
                mask=mask,
                synchronized=self.synchronized,
            )
            outputs = out_of_groups(outputs, inputs)
            self.update_statistics(stored, *batch)
        else:
            gamma, beta = self.affine()
            outputs = normalize.batch_normalization_inference(
                inputs, gamma, beta, *stored, epsilon=self.epsilon, axis=self.axis
            )
        if training or self.noise_at_inference:
            scale, shift = noise.scale_and_shift(
                outputs,
                self.seed_generator,
                self.compute_dtype,
                mean_range=self.mean_range,
                scale_range=self.scale_range,
                mean_jitter=self.mean_jitter,
                scale_jitter=self.scale_jitter,
                axis=self.axis,
            )
            outputs = scale * outputs + shift
        return outputs

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "mean_range": self.mean_range,
            "scale_range": self.scale_range,
            "mean_jitter": self.mean_jitter,
            "scale_jitter": self.scale_jitter,
            "noise_at_inference": self.noise_at_inference,
            "seed": self.seed,
        }
