"""One trial of a population: its epochs and its evaluation, as functions of arrays.

`recipes.engine.population` runs them for many trials at once, by `jax.vmap`.
"""

import functools

import keras
import numpy as np

from keras_norms.layers import layers_of
from recipes.engine import optimizers
from recipes.engine.data import PAD, TEST_BATCH_SIZE
from recipes.engine.errors import UserError

if keras.backend.backend() == "jax":
    import jax
    import jax.numpy as jnp

CURRENT = ("trainable", "non_trainable", "optimizer")
_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


class Trial:
    """How a network trains. What differs between trials is passed to its methods.

    Args:
        model: The `keras.Model` that computes. It must not be used elsewhere: the omega
            of its layers becomes 1, and its convolutions are those of this module.
        optimizer: A Keras optimizer of its own.
        batch_size, augment, replacement, amat: See `Population`.
        steps: Integer, number of steps in an epoch.
        schedule: Callable from the learning rate of a trial to that of the step.
    """

    def __init__(
        self, model, optimizer, batch_size, steps, augment, replacement, amat, schedule
    ):
        self._model, self._optimizer = model, optimizer
        for layer in layers_of(model, keras.layers.Conv2D):
            if layer.groups == 1 and layer.dilation_rate == (1, 1):
                layer.convolution_op = functools.partial(convolution, layer)
        optimizer.build(model.trainable_variables)
        self._batch_size, self._steps = batch_size, steps
        self._replacement = replacement
        self._augment, self._amat, self._schedule = augment, amat, schedule
        (self._rate,) = _places(optimizer.variables, [optimizer._learning_rate])
        # AMAT's eta depends on the product of omega and the rate, so layers get that.
        told = []
        if amat:
            optimizers.give_omegas(model)
            for layer in optimizers.followers(model):
                layer.set_learning_rate(0.0)
                told.append(layer.learning_rate)
        self._told = _places(model.non_trainable_variables, told)

    def start(self, model, trial):
        """The state of a trial before its first step, and its settings, for `model`."""
        trainable = _values(model.trainable_variables)
        non_trainable = _values(model.non_trainable_variables)
        told = optimizers.followers(model) if self._amat else []
        state = {
            "trainable": trainable,
            "non_trainable": non_trainable,
            "optimizer": _values(self._optimizer.variables),
            "best": trainable + non_trainable,
            "best_accuracy": np.float32(-1),
            "diverged": np.bool_(False),
        }
        return state, {
            "seed": np.array(trial["seed"], "uint32"),
            "learning_rate": np.array(trial["learning_rate"], "float32"),
            "omega": np.array([layer.omega for layer in told], "float32"),
        }

    def train_epoch(self, current, settings, epoch, data):
        """Trains for an epoch.

        Args:
            current: Dict with the entries `CURRENT` of the state.
            settings: See `start`; has the `omega` of each layer that follows the rate.
            epoch: Integer, from 0.
            data: Training images and labels.

        Returns:
            `current` after the epoch, and a dict of `train_loss` and `train_accuracy`.
        """
        images, labels = data
        order_key, key = epoch_keys(settings["seed"], epoch)
        count = len(images)
        order = jax.random.choice(order_key, count, (count,), self._replacement)
        order = order[: self._steps * self._batch_size].reshape(self._steps, -1)

        def step(current, number):
            x, y = images[order[number]], labels[order[number]]
            if self._augment:
                x = crop_and_flip(x, jax.random.fold_in(key, number))
            return self._train_step(current, settings, x, y)

        current, scores = jax.lax.scan(step, current, jnp.arange(self._steps))
        return current, jax.tree.map(jnp.mean, scores)

    def _train_step(self, current, settings, x, y):
        trainable, non_trainable, optimizer = (list(current[key]) for key in CURRENT)
        rate = self._schedule(settings["learning_rate"])(optimizer[0])  # its iteration
        optimizer[self._rate] = rate.astype(optimizer[self._rate].dtype)
        told = rate / (self._optimizer.gradient_accumulation_steps or 1)
        for place, omega in zip(self._told, settings["omega"], strict=True):
            non_trainable[place] = (omega * told).astype(non_trainable[place].dtype)

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
        for place in self._told:  # as AMAT leaves it
            non_trainable[place] = told.astype(non_trainable[place].dtype)
        current = dict(zip(CURRENT, (trainable, non_trainable, optimizer), strict=True))
        return current, {"train_loss": value, "train_accuracy": accuracy}

    def evaluate(self, state, data):
        """Measures a trial, and keeps its weights if they are the best so far.

        It returns the state, and a dict of `test_loss` and `test_accuracy`.
        """
        count = len(data[0])
        batch = min(max(self._batch_size, TEST_BATCH_SIZE), count)
        weights = state["trainable"], state["non_trainable"]

        def measure(first):
            # The last batch begins early, and counts only images not yet counted.
            start = jnp.minimum(first, count - batch)
            x, y = (jax.lax.dynamic_slice_in_dim(a, start, batch) for a in data)
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
    """Raises a UserError unless the backend is JAX."""
    if keras.backend.backend() != "jax":
        raise UserError(
            "A population trains on the backend JAX (KERAS_BACKEND=jax). "
            f"Received: backend {keras.backend.backend()!r}"
        )


def epoch_keys(seed, epoch):
    """Two JAX keys: the order of the images of an epoch, and their augmentation."""
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), epoch))


def convolution(layer, x, kernel):
    """What a `keras.layers.Conv2D` without groups computes, as a matrix product.

    `jax.vmap` makes the convolutions of many trials a grouped one, and the gradients of
    their kernels another, with windows as large as the image. Both are slow.

    Args:
        layer: The layer, which has strides, padding and data format.
        x: Images as the layer gets them.
        kernel: Array `(height, width, channels, filters)`.
    """
    first = layer.data_format == "channels_first"
    x = jnp.moveaxis(x, 1, -1) if first else x
    pads, cuts = [], []
    for count, size, stride in zip(x.shape[1:3], kernel.shape, layer.strides):
        places = -(-count // stride)
        pad = max((places - 1) * stride + size - count, 0)
        if layer.padding != "same":
            places, pad = (count - size) // stride + 1, 0
        pads.append((pad // 2, pad - pad // 2))
        last = (places - 1) * stride + 1
        cuts.append([slice(i, i + last, stride) for i in range(size)])
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    windows = [x[:, rows, columns] for rows in cuts[0] for columns in cuts[1]]
    kernel = keras.ops.convert_to_tensor(kernel)
    y = jnp.concatenate(windows, -1) @ kernel.reshape(-1, kernel.shape[-1])
    return jnp.moveaxis(y, -1, 1) if first else y


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
