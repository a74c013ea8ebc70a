"""LpNorm: normalization by the average l_p norm."""

import math
from typing import Any

import keras

from keras_norms._checks import arguments
from keras_norms._types import Constraint, Initializer, Regularizer, Tensor
from keras_norms.layers.channel_normalization import ChannelNormalization
from keras_norms.layers.recomputation import moves_state
from keras_norms.ops import lp_norm
from keras_norms.ops.functions import ops
from keras_norms.ops.shapes import out_of_groups


@keras.saving.register_keras_serializable(package="keras_norms")
class LpNorm(ChannelNormalization):
    """l_p normalization: subtracts the mean, divides by an average l_p norm.

    With `mean` and `s_p` of each channel:

    ```
    s_p = mean(|x|^p)^(1/p)        s_inf = max|x|
    y   = gamma * (x - mean) / (s_p + epsilon) + beta
    ```

    **In training** (`training=True`), `mean` and `s_p` are those of the batch, and
    their moving averages follow with `momentum`. **At inference**, they are the moving
    averages. `layer.trainable = False` means inference mode.

    Place it where `keras.layers.BatchNormalization` would be. With `p=2` and
    `norm_of="centered"` it is BatchNormalization in training, except for the place of
    `epsilon`. Its moving average is of standard deviations, not of variances.

    Second derivatives, forward mode and `keras.remat` work as in `CBN`.

    Args:
        p: At least 1, `math.inf` (or `"inf"`) included.
        axis: The channel axis. Use 1 after a convolution with
            `data_format="channels_first"`.
        norm_of: `"input"` or `"centered"`: whether `s_p` is taken of `x`, as in the
            paper, or of `x - mean`.
        momentum: In [0, 1), decay of the moving averages.
        epsilon: Positive, added to the norm.
        center: Whether there is a `beta`.
        scale: Whether there is a `gamma`.
        synchronized: Whether statistics are those of all replicas, see `CBN`.
        beta_initializer, gamma_initializer: Initializers of the affine weights.
        moving_mean_initializer, moving_norm_initializer: Those of the averages.
        beta_regularizer, gamma_regularizer: Optional regularizers.
        beta_constraint, gamma_constraint: Optional constraints.
        group_size: Optional positive integer. In training, each group of that many
            consecutive samples is normalised with its own statistics, see `CBN`. The
            moving ones follow their mean over groups.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: Tensor of rank 2 or more.
        training: Boolean, see above.
        mask: Optional boolean tensor, see `CBN`. If it hides a whole channel, the mean
            and norm of the batch are 0, the hidden elements are divided by `epsilon`,
            and the moving averages stay.

    Input and output shape:
        Any of rank 2 or more, with a known size of `axis`.

    Weights:
        `gamma` and `beta`, trainable, `moving_mean` and `moving_norm`, each of shape
        `(channels,)`. They stay in float32 in mixed precision.

    Raises:
        ValueError: If an argument is out of its range, and as `CBN` does.

    Example:

    >>> model = keras.Sequential([
    ...     keras.layers.Conv2D(64, 3, use_bias=False),
    ...     LpNorm(p=1),
    ...     keras.layers.Activation("relu"),
    ... ])

    Reference:

    - Santurkar, Tsipras, Ilyas and Madry, How Does Batch Normalization Help
      Optimization?, NeurIPS 2018, Section 3.3. https://arxiv.org/abs/1805.11604

    The paper gives no formula and no `epsilon`. It takes the norm before it removes the
    mean, which is `norm_of="input"`. The gradient of the maximum goes in equal parts to
    all elements that attain it.
    """

    averages = "moving_mean", "moving_norm"
    moving_norm: Any
    moving_norm_initializer: Initializer

    def __init__(
        self,
        p: float | str = 2,
        axis: int = -1,
        norm_of: str = "input",
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        synchronized: bool = False,
        beta_initializer: Initializer = "zeros",
        gamma_initializer: Initializer = "ones",
        moving_mean_initializer: Initializer = "zeros",
        moving_norm_initializer: Initializer = "ones",
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
                "moving_norm_initializer": moving_norm_initializer,
                "beta_regularizer": beta_regularizer,
                "gamma_regularizer": gamma_regularizer,
                "beta_constraint": beta_constraint,
                "gamma_constraint": gamma_constraint,
            },
            **kwargs,
        )
        is_text = isinstance(p, str) and p == "inf"
        self.p = math.inf if is_text else arguments.real(p)
        if not self.p >= 1:
            raise arguments.wrong("p", "a number of at least 1, `math.inf` included", p)
        self.norm_of = arguments.choice("norm_of", norm_of, ("input", "centered"))

    @moves_state
    def call(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Tensor:
        inputs = ops.cast(inputs, self.compute_dtype)
        stored = self.stored()
        if not training or not self.trainable:
            gamma, beta = self.affine()
            return lp_norm.lp_inference(
                inputs, gamma, beta, *stored, epsilon=self.epsilon, axis=self.axis
            )
        x, gamma, beta, mask, axis = self.in_groups(inputs, mask)
        common = {
            "p": self.p,
            "centered": self.norm_of == "centered",
            "axis": axis,
            "mask": mask,
            "synchronized": self.synchronized,
        }
        batch = lp_norm.lp_statistics(x, gamma.dtype, prior=stored[0], **common)
        outputs = lp_norm.lp_normalization(
            x, gamma, beta, batch, epsilon=self.epsilon, **common
        )
        self.update_statistics(stored, batch.count, batch.mean, batch.norm)
        return out_of_groups(outputs, inputs)

    def get_config(self) -> dict[str, Any]:
        p = "inf" if self.p == math.inf else self.p  # JSON has no infinity.
        return {**super().get_config(), "p": p, "norm_of": self.norm_of}
