"""One trial of a population: its epochs and its evaluation, as functions of arrays.

`recipes.engine.population` runs them for many trials at once, by `jax.vmap`.
"""

import keras
import numpy as np

from recipes.engine import optimizers
from recipes.engine.data import PAD

if keras.backend.backend() == "jax":
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

CURRENT = ("trainable", "non_trainable", "optimizer")
_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


class Trial:
    """How a network trains. What differs between trials are arguments of its functions.

    Args:
        model: The `keras.Model` that computes. It must not be used elsewhere: the omega
            of its layers becomes 1.
        batch_size, momentum, weight_decay, augment, amat: See `Population`.
        steps: Integer, number of steps in an epoch.
        schedule: Callable from the learning rate of a trial to that of the step.
    """

    def __init__(
        self,
        model,
        batch_size,
        steps,
        momentum,
        weight_decay,
        augment,
        amat,
        schedule,
    ):
        self._model = model
        self._optimizer = optimizers.SGD(1.0, momentum, weight_decay)
        self._optimizer.build(model.trainable_variables)
        self._batch_size = batch_size
        self._steps = steps
        self._augment = augment
        self._schedule = schedule
        self._rate = _places(
            self._optimizer.variables, [self._optimizer._learning_rate]
        )[0]
        # AMAT's eta depends on the product of omega and the rate: layers are told that.
        told = []
        if amat:
            optimizers.give_omegas(model)
            for layer in optimizers.followers(model):
                layer.set_learning_rate(0.0)
                told.append(layer.learning_rate)
        self._told = _places(model.non_trainable_variables, told)

    def start(self, model):
        """The state of a trial at its start, a dict of arrays.

        Args:
            model: The `keras.Model` of the trial, with its initial weights.
        """
        trainable = _values(model.trainable_variables)
        non_trainable = _values(model.non_trainable_variables)
        return {
            "trainable": trainable,
            "non_trainable": non_trainable,
            "optimizer": _values(self._optimizer.variables),
            "best": trainable + non_trainable,
            "best_accuracy": np.float32(-1),
            "diverged": np.bool_(False),
        }

    def train_epoch(self, current, settings, epoch, data):
        """Trains for an epoch.

        Args:
            current: Dict with the entries `CURRENT` of the state.
            settings: Dict of `seed`, `learning_rate`, and `omega`, one number for each
                layer that AMAT would tell the rate.
            epoch: Integer, from 0.
            data: Training images and labels.

        Returns:
            `current` after the epoch, and a dict of `train_loss` and `train_accuracy`.
        """
        images, labels = data
        order_key, key = epoch_keys(settings["seed"], epoch)
        order = jax.random.permutation(order_key, len(images))
        order = order[: self._steps * self._batch_size].reshape(self._steps, -1)

        def step(current, number):
            x, y = images[order[number]], labels[order[number]]
            if self._augment:
                x = crop_and_flip(x, jax.random.fold_in(key, number))
            return self._train_step(current, settings, x, y)

        numbers = jnp.arange(self._steps)
        current, (losses, accuracies) = jax.lax.scan(step, current, numbers)
        scores = {"train_loss": losses.mean(), "train_accuracy": accuracies.mean()}
        return current, scores

    def _train_step(self, current, settings, x, y):
        trainable, non_trainable, optimizer = (list(current[key]) for key in CURRENT)
        rate = self._schedule(settings["learning_rate"])(optimizer[0])  # its iteration
        optimizer[self._rate] = rate.astype(optimizer[self._rate].dtype)
        for place, omega in zip(self._told, settings["omega"], strict=True):
            non_trainable[place] = (omega * rate).astype(non_trainable[place].dtype)

        def loss(trainable):
            logits, updated, penalties = self._model.stateless_call(
                trainable, non_trainable, x, training=True, return_losses=True
            )
            accuracy = (logits.argmax(-1) == y).mean()
            return sum(penalties, _LOSS(y, logits).mean()), (accuracy, updated)

        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, (accuracy, non_trainable)), gradients = gradient(trainable)
        trainable, optimizer = self._optimizer.stateless_apply(
            optimizer, gradients, trainable
        )
        for place in self._told:
            # As AMAT leaves it.
            non_trainable[place] = rate.astype(non_trainable[place].dtype)
        current = dict(zip(CURRENT, (trainable, non_trainable, optimizer), strict=True))
        return current, (value, accuracy)

    def evaluate(self, state, data):
        """Measures a trial, and keeps its weights if they are the best so far.

        Args:
            state: The state.
            data: Test images and labels.

        Returns:
            The state, and a dict of `test_loss` and `test_accuracy`.
        """
        images, labels = data
        count = len(images)
        batch = min(self._batch_size, count)
        weights = state["trainable"], state["non_trainable"]

        def measure(first):
            # The last batch begins earlier than it should, and counts what is new.
            start = jnp.minimum(first, count - batch)
            x, y = (
                jax.lax.dynamic_slice_in_dim(a, start, batch) for a in (images, labels)
            )
            logits, _ = self._model.stateless_call(*weights, x, training=False)
            new = start + jnp.arange(batch) >= first
            hits = (logits.argmax(-1) == y) & new
            return jnp.where(new, _LOSS(y, logits), 0).sum(), hits.sum()

        losses, hits = jax.lax.map(measure, jnp.arange(0, count, batch))
        accuracy = hits.sum() / count
        better = (accuracy > state["best_accuracy"]) & ~state["diverged"]
        best, best_accuracy = jax.tree.map(
            lambda new, old: jnp.where(better, new, old),
            (weights[0] + weights[1], accuracy),
            (state["best"], state["best_accuracy"]),
        )
        state = {**state, "best": best, "best_accuracy": best_accuracy}
        return state, {"test_loss": losses.sum() / count, "test_accuracy": accuracy}


def check_backend():
    """Raises a ValueError unless the backend is JAX."""
    if keras.backend.backend() != "jax":
        raise ValueError(
            "A population trains on the backend JAX (KERAS_BACKEND=jax). "
            f"Received: backend {keras.backend.backend()!r}"
        )


def program_of(function, axes, mesh):
    """A function of one trial as a `jax.jit` of all, whose first argument is used up.

    Args:
        function: Such as the methods of `Trial`.
        axes: For each argument 0, where there is one for each trial, or `None`.
        mesh: A `jax.sharding.Mesh` with the axis `"trial"`.
    """
    # Of sharded arrays alone, the compiler would divide grouped convolutions otherwise,
    # and exchange them.
    specs = [PartitionSpec(None if axis is None else "trial") for axis in axes]
    mapped = jax.shard_map(
        jax.vmap(function, axes),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=PartitionSpec("trial"),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


def epoch_keys(seed, epoch):
    """Two JAX keys: the order of the images of an epoch, and their augmentation."""
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), epoch))


def crop_and_flip(x, key):
    """What `recipes.engine.data.crop_and_flip` does, with a JAX key."""
    n, height, width, _ = x.shape
    padded = jnp.pad(x, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    keys = jax.random.split(key, 3)
    top, left = (jax.random.randint(k, (n, 1), 0, 2 * PAD + 1) for k in keys[:2])
    rows, columns = top + np.arange(height), left + np.arange(width)
    mirrored = jax.random.bernoulli(keys[2], shape=(n, 1))
    columns = jnp.where(mirrored, columns[:, ::-1], columns)
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _values(variables):
    return [np.asarray(variable.value) for variable in variables]


def _places(variables, chosen):
    identities = [id(variable) for variable in variables]
    return [identities.index(id(variable)) for variable in chosen]
