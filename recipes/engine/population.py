"""Many trainings of one network, in one compiled program, on JAX.

The trials of a population differ in their seed, learning rate, rho and omega. Weights,
statistics, the optimizer's state and these settings have a leading trial axis, over
which `jax.vmap` runs the training step. An epoch is one program: the images stay on the
device, where batches are drawn, shifted and mirrored.

    trials = [{"seed": 0, "learning_rate": 0.1}, {"seed": 1, "learning_rate": 0.1}]
    population = Population(build, trials, images, epochs=120)
    for _ in range(120):
        scores = population.train() | population.evaluate()
    best = population.model(scores["test_accuracy"].argmax())

Trials can be dropped (`keep`), which compiles the program again, and one can replace
another (`replace`), which does not. On many devices, such as a slice of TPUs, each has
some of the trials, and nothing is exchanged.

A trial has the initial weights that `recipes.train` gives its seed, and takes the same
steps, but its batches come from JAX's random numbers.

This is for accelerators, which a small network leaves idle. A CPU gains nothing.
"""

import json
import time

import keras
import numpy as np

from recipes.engine import optimizers
from recipes.engine.errors import check_size
from recipes.engine.recorder import numpy_copy
from recipes.engine.trial import CURRENT, Trial, check_backend

if keras.backend.backend() == "jax":
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

# What may differ between trials.
OWN = ("seed", "rho", "stage_rho", "omega", "learning_rate")


class Population:
    """Trials of one network that train together.

    Args:
        build: Callable, `build(trial)` returns the `keras.Model` of a trial, from
            images to logits, after its seed was set. The models may differ only in
            initial weights, rho and omega: the first one computes for all.
        trials: List of dicts, each with an integer `seed`, a positive float
            `learning_rate`, and whatever `build` needs, in a form JSON can hold.
        images: A `recipes.engine.data.ImageData`.
        epochs: Integer, the length of the whole training, for the schedule.
        batch_size: Integer, the batch of one trial.
        optimizer: One of `recipes.engine.optimizers.OF_NAME`, with the arguments
            `momentum`, `weight_decay` and `gradient_accumulation_steps`.
        augment: Whether training images are cropped at random and mirrored.
        replacement: Whether each image of a batch is drawn from all images.
        amat: Whether CBN layers get the learning rate of each step.
        devices: List of JAX devices, each of which gets the same number of trials.
            `None`: one.

    Attributes:
        trials: List with the dict of each trial that is left.
        epochs: Integers `(trials,)`, the epochs each has trained.
        steps: Number of steps in an epoch.
        seconds: Of the last epoch, without compilation; `None` before.

    Raises:
        ValueError: If the backend is not JAX, a batch is larger than the training data,
            or the devices cannot have the same number of trials.
    """

    def __init__(
        self,
        build,
        trials,
        images,
        *,
        epochs,
        batch_size=128,
        optimizer=None,
        momentum=0.9,
        weight_decay=5e-4,
        gradient_accumulation_steps=None,
        augment=False,
        replacement=False,
        amat=True,
        devices=None,
    ):
        check_backend()
        count, about = len(images.x_train), "the number of training images"
        check_size("batch_size", batch_size, count, about)
        self.trials = [dict(trial) for trial in trials]
        self.epochs = np.zeros(len(trials), int)
        self.steps = count // batch_size
        self.seconds = None
        self._build = build
        mesh = Mesh(np.array(devices or jax.devices()[:1]), ("trial",))
        self._by_trial = NamedSharding(mesh, PartitionSpec("trial"))
        data = (images.x_train, images.y_train), (images.x_test, images.y_test)
        data = jax.device_put(data, NamedSharding(mesh, PartitionSpec()))
        self._train_data, self._test_data = data
        self._programs = {}
        self._trial = Trial(
            self._seeded(self.trials[0]),
            optimizers.OF_NAME[optimizer](
                *(1.0, momentum, weight_decay),
                gradient_accumulation_steps=gradient_accumulation_steps,
            ),
            *(batch_size, self.steps, augment, bool(replacement), amat),
            lambda rate: optimizers.piecewise_schedule(rate, epochs * self.steps),
        )
        rows = [self._trial.start(self._seeded(each), each) for each in self.trials]
        self._place(jax.tree.map(lambda *rows: np.stack(rows), *rows))

    def _seeded(self, trial):
        keras.utils.set_random_seed(trial["seed"])
        return self._build(trial)

    def _place(self, rows):
        """Divides what all trials have among the devices."""
        count = len(self.trials)
        if count % self.devices:
            raise ValueError(
                "Argument `devices` must have a length that divides the number of "
                f"trials, {count}. Received: {self.devices} devices"
            )
        self._state, self._settings = jax.device_put(rows, self._by_trial)

    @property
    def devices(self):
        """The number of devices."""
        return self._by_trial.num_devices

    @property
    def epoch(self):
        """The number of epochs that the oldest trial has trained."""
        return int(self.epochs.max())

    @property
    def diverged(self):
        """Booleans `(trials,)`: whether a training loss was NaN or infinite."""
        return np.asarray(self._state["diverged"])

    def train(self):
        """Trains all trials for an epoch.

        Returns:
            Dict of `train_loss` (mean cross-entropy in nats) and `train_accuracy`,
            float32 arrays `(trials,)`. The loss of a trial that diverged is NaN or
            infinite.
        """
        current = {key: self._state[key] for key in CURRENT}
        done = jax.device_put(self.epochs.astype("uint32"), self._by_trial)
        arguments = current, self._settings, done, self._train_data
        program = self._compiled(self._trial.train_epoch, arguments)
        start = time.perf_counter()
        current, scores = jax.block_until_ready(program(*arguments))
        self.seconds = time.perf_counter() - start
        self._state |= current
        self._state["diverged"] |= ~jnp.isfinite(scores["train_loss"])
        self.epochs += 1
        return jax.tree.map(np.asarray, scores)

    def evaluate(self):
        """Measures all trials on the test images.

        The weights with the highest test accuracy so far are kept, see `model`.

        Returns:
            Dict of `test_loss` and `test_accuracy`, float32 arrays `(trials,)`.
        """
        arguments = self._state, self._test_data
        program = self._compiled(self._trial.evaluate, arguments)
        self._state, scores = program(*arguments)
        return jax.tree.map(np.asarray, scores)

    def _compiled(self, function, arguments):
        """`function` of one trial as a program for all, compiled before it is timed.

        Its first argument is used up; its last is the data, which all trials share.
        """
        name, own = function.__name__, len(arguments) - 1
        if name not in self._programs:
            by_trial = self._by_trial.spec
            # From sharded arrays alone, the compiler would divide grouped convolutions
            # in another way, and exchange data.
            mapped = jax.shard_map(
                jax.vmap(function, (*[0] * own, None)),
                mesh=self._by_trial.mesh,
                in_specs=(*[by_trial] * own, PartitionSpec()),
                out_specs=by_trial,
                check_vma=False,
            )
            program = jax.jit(mapped, donate_argnums=0)
            self._programs[name] = program.lower(*arguments).compile()
        return self._programs[name]

    def keep(self, indices):
        """Drops all trials but those at these distinct places in `trials`."""
        self.trials = [self.trials[index] for index in indices]
        kept = [self.epochs, self._state, self._settings]
        self.epochs, *rows = jax.tree.map(lambda a: a[np.array(indices)], kept)
        self._place(rows)
        self._programs = {}

    def replace(self, index, trial):
        """Puts a new trial, before its first epoch, at a place in `trials`."""
        new = self._trial.start(self._seeded(trial), trial)
        self.trials[index] = dict(trial)
        self.epochs[index] = 0
        old = self._state, self._settings
        self._place(jax.tree.map(lambda a, one: a.at[index].set(one), old, new))

    def model(self, index, best=False):
        """Builds the `keras.Model` of one trial, not compiled.

        Args:
            index: Integer, its place in `trials`.
            best: Whether it has the weights of the first evaluation with the highest
                test accuracy, instead of the current ones.
        """
        model = self._seeded(self.trials[index])
        keys = ["best"] if best else ["trainable", "non_trainable"]
        values = [value for key in keys for value in self._state[key]]
        variables = model.trainable_variables + model.non_trainable_variables
        for variable, value in zip(variables, values, strict=True):
            variable.assign(np.asarray(value[index]))
        return model

    def arrays(self, indices=None):
        """The state of the trials at these places, or of all, for a checkpoint."""
        rows = np.arange(len(self.trials)) if indices is None else np.array(indices)
        trials = [json.dumps(self.trials[row]) for row in rows]
        arrays = {"trials": np.array(trials), "epochs": self.epochs[rows]}
        for i, leaf in enumerate(jax.tree.leaves(self._state)):
            arrays[f"state/{i}"] = numpy_copy(leaf[rows])
        return arrays

    def restore(self, arrays, indices=None):
        """Continues where `arrays` was called.

        Args:
            arrays: What that returned, for the same network and maybe more trials.
            indices: Integers, the places of the trials that continue; all if `None`.
        """
        indices = np.arange(len(self.trials)) if indices is None else np.array(indices)
        stored = trials_of(arrays)
        rows = np.array([stored.index(self.trials[index]) for index in indices])
        leaves, structure = jax.tree.flatten(self._state)
        for i, leaf in enumerate(leaves):
            new = jnp.asarray(arrays[f"state/{i}"][rows], leaf.dtype)
            leaves[i] = leaf.at[indices].set(new)
        self._place((jax.tree.unflatten(structure, leaves), self._settings))
        self.epochs[indices] = arrays["epochs"][rows]


def trials_of(arrays):
    """The list of the trials in what `Population.arrays` returned."""
    return [json.loads(str(trial)) for trial in arrays["trials"]]
