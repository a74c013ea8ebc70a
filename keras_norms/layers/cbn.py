"""CBN: complete batch normalization."""

import functools
import math
import warnings
from typing import Any

import keras

from keras_norms._checks import arguments
from keras_norms._types import Constraint, Initializer, Regularizer, Shape, Tensor
from keras_norms.layers.channel_normalization import ChannelNormalization
from keras_norms.layers.learning_rate import FollowsLearningRate
from keras_norms.layers.recomputation import moves_state
from keras_norms.ops import normalize
from keras_norms.ops.custom_gradient import snapshot
from keras_norms.ops.functions import ops
from keras_norms.ops.replicas import warn_of_drift
from keras_norms.ops.shapes import out_of_groups, reduction_axes


@keras.saving.register_keras_serializable(package="keras_norms")
class CBN(FollowsLearningRate, ChannelNormalization):
    """Complete batch normalization. Place it before each `Conv` or `Dense` layer.

    It goes after the activation, and not before the layer that reads the raw input.
    Leave `BatchNormalization` out. Per channel, with the averages `mu_A` of the mean
    and `sq_A` of the mean square:

    ```
    mu_A = eta * mu_A + (1 - eta) * mean(x)
    x'   = x - mu_A + beta
    sq_A = eta * sq_A + (1 - eta) * mean(x'^2)
    y    = (gamma / rho) * x' / sqrt(sq_A + epsilon)
    ```

    **In training** (`training=True`), the averages first take in the current batch and
    are then used, with `eta = max(1 - omega * learning_rate, 0)`. The callback
    `keras_norms.AMAT` tells the layer the learning rate. Without it, each batch is
    normalised with its own statistics, and the stored averages, which inference uses,
    follow `momentum`. Averages are debiased: the first batch counts alone. If a batch
    has a mean or mean square that is not finite, the output of that channel is NaN and
    its averages stay.

    **At inference**, the stored averages are used, and `y` is affine in `x`. As in
    `keras.layers.BatchNormalization`, `layer.trainable = False` means inference mode.

    **In groups** (`group_size=k`, "ghost batches"), each `k` consecutive samples of a
    training batch are normalised as a batch of their own. The new averages are means
    over the groups (docs/groups.md).

    **Batches of one** sample before `Dense` layers have no variance. Where `eta` is 0,
    the output is `gamma / rho * sign(beta)` for any input. Elsewhere SGD diverges at
    rates above about `rho**2 / channels`. The layer warns if it knows the size. Train
    with 16 or more samples, at a smaller rate, or with `layer.trainable = False`.

    Gradients of gradients work in reverse mode. Forward mode (`jax.jvp`,
    `tf.autodiff.ForwardAccumulator`) is an error in training. With `keras.remat`,
    averages move once a step (docs/recomputation.md).

    Args:
        axis: Integer, the channel axis. Use 1 after a convolution with
            `data_format="channels_first"`.
        rho: Positive float. The output has the root mean square `gamma / rho`. The
            paper tries 1/4 to 8; 1 and 2 are good first choices. It is a scalar weight:
            `layer.rho = 2.0` takes effect at once. (On JAX, the trainer holds all state
            during an epoch: a callback must read `self.model` first.) It is not
            trained.
        omega: Non-negative float. A batch enters the averages with the weight
            `omega * learning_rate`, at most 1. With Adam, use `0.1 / learning_rate`
            (docs/results/adam.md). A compiled step keeps the value that it was
            compiled with.
        momentum: Float in [0, 1), decay of the averages while the learning rate is
            unknown.
        epsilon: Positive float, added to the mean square inside the root.
        center: Boolean, whether there is a `beta`.
        scale: Boolean, whether there is a `gamma`.
        decouple: Boolean. `False` is the coupled form of batch normalization,
            `y = (gamma / rho) * (x - mu_A) / sqrt(var_A + epsilon) + beta`.
        mean_gradient: `"shift"` or `"ratio"`, how the gradient passes the moving mean.
            The values of `y` are the same. `"shift"` sends it to the batch mean with
            weight 1, `"ratio"` with weight `mu_A / mean(x)` (at most 10 in magnitude),
            as in the paper.
        synchronized: Boolean, whether statistics are those of all replicas of a
            `tf.distribute` strategy or of `torch.distributed`. On one device it changes
            nothing. On JAX, statistics are always those of the whole batch. If `False`,
            the averages are the mean over replicas on TensorFlow, and differ between
            processes on PyTorch, with a warning.
        beta_initializer, gamma_initializer: Initializers of the affine weights.
        moving_mean_initializer, moving_square_initializer: Those of the averages.
        beta_regularizer, gamma_regularizer: Optional regularizers.
        beta_constraint, gamma_constraint: Optional constraints.
        group_size: Optional positive integer, see above. Not with `synchronized`. It
            must divide the batch size.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: Tensor of rank 2 or more.
        training: Boolean, see above.
        mask: Optional boolean tensor. Where it is `False`, elements are kept out of the
            statistics. Its shape is that of `inputs` without the channel axis, or the
            first axes of that, or any shape of the rank of `inputs` that broadcasts to
            `inputs`. If it hides a whole channel, the averages stay and are used.
            Inference ignores it.

    Input and output shape:
        Any of rank 2 or more, with a known size of `axis`.

    Weights:
        `gamma` and `beta`, trainable, of shape `(channels,)`; `moving_mean` and
        `moving_square`, of shape `(channels,)`; the scalars `average_weight` (how much
        of the averages is filled, 0 to 1), `rho`, and `learning_rate` (negative while
        unknown). All are float32, or float64 under the policy float64. On JAX the
        `AMAT` callback adds a counter, `step`, if the learning rate follows a schedule.

    Raises:
        ValueError: If an argument is out of its range, if `axis` is not an axis of the
            input or has no known size, if a mask does not fit the input, or if
            `group_size` does not divide the batch size (if TensorFlow knows the size
            only at run time, a `tf.errors.InvalidArgumentError`).

    Example:

    >>> model = keras.Sequential([
    ...     keras.layers.Dense(64, activation="sigmoid"),
    ...     CBN(),
    ...     keras.layers.Dense(10),
    ... ])
    >>> model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    >>> model.fit(x, y, callbacks=[AMAT()])

    Reference:

    - Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and Beyond,
      TPAMI 2023, Eqs. 4-9 and Algorithm 1. https://doi.org/10.1109/TPAMI.2023.3319005
    - Hoffer, Hubara and Soudry, Train Longer, Generalize Better, NeurIPS 2017,
      Algorithm 1: ghost batches. https://arxiv.org/abs/1705.08741

    This layer differs from the printed Algorithm 1:

    * The algorithm normalises with averages that do not hold the current batch yet,
      which diverges where `eta` is 0. This layer includes the batch, as Appendix I of
      the paper does.
    * The last line of the algorithm squares `eta`; Eq. 9 and this layer do not.
    * The printed gradient is `mean_gradient="ratio"`. Its weight has no bound where the
      batch mean is near 0, so the default is `"shift"`.
    * Averages are debiased, and `epsilon` is inside the root (Eqs. 4-9 have none).
    * A batch enters with weight 1e-6 at least: averages start at learning rate 0 too.
    * The paper does not say how to average without AMAT. Here `momentum` is used.

    At rates of `1 / omega` and more, as in the paper's first 60 epochs, `eta` is 0, and
    inference has the statistics of the last batch alone. `recalibrate` measures better
    ones.
    """

    averages = "moving_mean", "moving_square"
    moving_square: Any
    moving_square_initializer: Initializer

    def __init__(
        self,
        axis: int = -1,
        rho: float = 1.0,
        omega: float = 10.0,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        decouple: bool = True,
        mean_gradient: str = "shift",
        synchronized: bool = False,
        beta_initializer: Initializer = "zeros",
        gamma_initializer: Initializer = "ones",
        moving_mean_initializer: Initializer = "zeros",
        moving_square_initializer: Initializer = "ones",
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
                "moving_square_initializer": moving_square_initializer,
                "beta_regularizer": beta_regularizer,
                "gamma_regularizer": gamma_regularizer,
                "beta_constraint": beta_constraint,
                "gamma_constraint": gamma_constraint,
            },
            **kwargs,
        )
        self.initial_rho = arguments.number("rho", rho, above=0)
        self.omega = arguments.number("omega", omega, at_least=0)
        self.decouple = arguments.boolean("decouple", decouple)
        self.mean_gradient = arguments.choice(
            "mean_gradient", mean_gradient, ("shift", "ratio")
        )
        self.average_weight: Any = None
        self._rho: Any = None

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        self.average_weight = self.add_statistic("average_weight", (), "zeros")
        self._rho = self.add_scalar("rho", self.initial_rho, self.statistics_dtype)
        self.build_learning_rate()

    @property
    def rho(self) -> Any:
        """The weight, which takes assignments; `None` before the layer is built."""
        return self._rho

    @rho.setter
    def rho(self, value: float) -> None:
        self.initial_rho = arguments.number("rho", value, above=0)
        if self._rho is not None:
            self._rho.assign(self.initial_rho)

    @moves_state
    def call(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Tensor:
        inputs = ops.cast(inputs, self.compute_dtype)
        if training and self.trainable:
            (outputs,) = self._train(normalize.cbn_training, inputs, mask)
            return out_of_groups(outputs, inputs)
        gamma, beta = self.affine()
        return normalize.cbn_inference(
            inputs, gamma, beta, *self._state_and_rho(), self._settings(self.axis)
        )

    @moves_state
    def scale_and_shift(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what `call` does as two vectors: `scale * inputs + shift`.

        Use it instead of `call`: in training it updates the statistics too.

        Args:
            inputs, training, mask: See the call arguments.

        Returns:
            Two tensors of shape `(channels,)`, float32 in mixed precision. In training
            with `group_size`, a row for each group: `(groups, channels)`.
        """
        if training and self.trainable:
            inputs = ops.cast(inputs, self.compute_dtype)
            scale, shift = self._train(normalize.cbn_scale_and_shift, inputs, mask)
            return scale, shift
        gamma, beta = self.affine()
        return normalize.cbn_stored_scale_and_shift(
            gamma, beta, *self._state_and_rho(), self._settings(self.axis)
        )

    def _train(self, function, inputs, mask):
        """Apply a function of `normalize` to a batch, and move the state."""
        state, rho = self._state_and_rho()
        state = state._replace(weight=snapshot(state.weight))
        rate = ops.cast(self.learning_rate_of_this_step(), self.statistics_dtype)
        x, gamma, beta, mask, axis = self.in_groups(inputs, mask)
        sizes = [x.shape[i] for i in reduction_axes(len(x.shape), axis)]
        if None not in sizes and math.prod(sizes) == 1:
            _explain_batches_of_one_once()
        settings = self._settings(axis)
        *outputs, state = function(x, gamma, beta, state, rho, rate, settings, mask)
        warn_of_drift(self)
        self.moving_mean.assign(state.mean)
        self.moving_square.assign(state.square)
        self.average_weight.assign(state.weight)
        return outputs

    def _settings(self, axis):
        return normalize.CBNSettings(
            epsilon=self.epsilon,
            axis=axis,
            omega=self.omega,
            momentum=self.momentum,
            decouple=self.decouple,
            mean_gradient=self.mean_gradient,
            synchronized=self.synchronized,
        )

    def _state_and_rho(self) -> tuple[normalize.CBNState, Tensor]:
        mean, square = self.stored()
        weight, rho = (
            ops.cast(each, self.statistics_dtype)
            for each in (self.average_weight, self.rho)
        )
        return normalize.CBNState(mean, square, weight), rho

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "rho": self.initial_rho,
            "omega": self.omega,
            "decouple": self.decouple,
            "mean_gradient": self.mean_gradient,
        }


@functools.cache
def _explain_batches_of_one_once():
    warnings.warn(
        "CBN is trained with one element for each channel, which has no variance: its "
        "output may not depend on the input, or training may diverge. Use larger "
        "batches, a learning rate well below `rho**2 / channels`, or "
        "`layer.trainable = False`.",
        stacklevel=2,
    )
