"""Gradient descent as in the papers, and the learning rate during training."""

import bisect

import keras
from keras import ops

from keras_norms.layers import layers_of
from keras_norms.layers.learning_rate import FollowsLearningRate


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class SGD(keras.optimizers.Optimizer):
    """Gradient descent with momentum and coupled weight decay, as in PyTorch.

        g = gradient + weight_decay * w
        v = momentum * v - learning_rate * g
        w = w + v

    The `weight_decay` of `keras.optimizers.SGD` is decoupled: it stays out of the
    momentum, and at momentum 0.9 shrinks the weights ten times less. Here every
    trainable weight decays, including biases and the affine weights of norms, and the
    loss that training reports does not contain the penalty.

    Momentum and weight decay are variables: a compiled network can use other values.

    Args:
        learning_rate: Float or `keras.optimizers.schedules.LearningRateSchedule`.
        momentum: Float in [0, 1].
        weight_decay: Float >= 0.
    """

    def __init__(self, learning_rate=0.1, momentum=0.9, weight_decay=5e-4, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.initial_momentum = momentum
        # Not `self.weight_decay`, which would switch on the decoupled decay as well.
        self.initial_weight_decay = weight_decay

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.momentum = self._scalar("momentum", self.initial_momentum)
        decay = self._scalar("coupled_weight_decay", self.initial_weight_decay)
        self.coupled_weight_decay = decay
        self.velocities = self.add_optimizer_variables(variables, "velocity")

    def _scalar(self, name, value):
        initializer = keras.initializers.Constant(value)
        return self.add_variable((), initializer, name=name)

    def update_step(self, gradient, variable, learning_rate):
        given = learning_rate, self.momentum, self.coupled_weight_decay, gradient
        given = [ops.cast(value, variable.dtype) for value in given]
        rate, momentum, decay, gradient = given
        velocity = self.velocities[self._get_variable_index(variable)]
        step = momentum * velocity - rate * (gradient + decay * variable)
        self.assign(velocity, step)
        self.assign_add(variable, step)

    def get_config(self):
        return {
            **super().get_config(),
            "momentum": self.initial_momentum,
            "weight_decay": self.initial_weight_decay,
        }


def adam(learning_rate, momentum, weight_decay, **kwargs):
    """AdamW (decoupled weight decay), with the arguments of `SGD`."""
    return keras.optimizers.AdamW(
        learning_rate, weight_decay, beta_1=momentum, **kwargs
    )


OF_NAME = {None: SGD, "adam": adam}  # of the setting
DROPS = (1 / 2, 5 / 6)  # of the rate: epochs 60 and 100 of the papers' 120


def piecewise_schedule(learning_rate, total_steps, drops=DROPS):
    """A `PiecewiseConstantDecay` of the rate, which falls to a tenth a few times.

    Args:
        learning_rate: Float, the rate of the first step.
        total_steps: Integer, the number of steps of the whole training.
        drops: Where it falls, shares of these steps.
    """
    # Keras holds a value up to and including its boundary.
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        boundaries=[int(total_steps * share) - 1 for share in drops],
        values=[learning_rate / 10**i for i in range(len(drops) + 1)],
    )


class Rate(keras.callbacks.Callback):
    """Sets the learning rate where a piecewise schedule changes it.

    A schedule in the optimizer is part of the compiled step. A rate that is set is not,
    and one compiled network can train with other rates. CBN layers get the rate as from
    the `AMAT` callback. AMAT needs only `omega * rate`, and omega is part of the
    compiled step: these layers have omega 1 and get that product. With gradient
    accumulation it is divided by the number of batches per update, as AMAT does.

    Args:
        schedule: A `keras.optimizers.schedules.PiecewiseConstantDecay`.
        omegas: Dict from the name of each layer that gets the rate to its omega.
    """

    def __init__(self, schedule, omegas):
        super().__init__()
        self._schedule, self._omegas = schedule, omegas

    def on_train_begin(self, logs=None):
        self._rate = None
        # Counts batches; `optimizer.iterations` counts updates of the weights.
        self._step = int(ops.convert_to_numpy(self.model.optimizer.variables[0]))
        layers = followers(self.model)
        self._layers = [layer for layer in layers if layer.name in self._omegas]

    def on_train_batch_begin(self, batch, logs=None):
        place = bisect.bisect_left(self._schedule.boundaries, self._step)
        rate = self._schedule.values[place]
        self._step += 1
        if rate == self._rate:
            return
        # During an epoch JAX's trainer holds the state, and takes new values back.
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        self.model.optimizer.learning_rate = rate
        batches = self.model.optimizer.gradient_accumulation_steps or 1
        for layer in self._layers:
            layer.set_learning_rate(self._omegas[layer.name] * rate / batches)
        self._rate = rate


def followers(model):
    """The layers of a model to which AMAT would pass the learning rate."""
    return layers_of(model, FollowsLearningRate)


def give_omegas(model):
    """Sets the omega of all such layers to 1; returns the old values by name."""
    omegas = {layer.name: layer.omega for layer in followers(model)}
    for layer in followers(model):
        layer.omega = 1.0
    return omegas
