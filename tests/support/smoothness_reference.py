"""The deep linear network without norms under gradient descent; small problems."""

import json

import keras

from keras_norms import diagnostics
from recipes.smoothness import _training

# Problems that take no time; float32, so that JAX needs no setting.
SETTINGS = {"network": "dln", "depth": 4, "dtype": "float32"}
SETTINGS |= {"steps": 4, "every": 2}
IMAGES = {"train_size": 96, "batch_size": 32, "width": 1, "steps": 4, "every": 2}
RATE = _training.USUAL["dln"]["learning_rate"]


def run(recipe, runs_dir, config=SETTINGS, **changes):
    """Runs a recipe. Returns its settings, the directory and the rows in there."""
    config = {"runs_dir": str(runs_dir), "workers": 1} | config
    settings = recipe.Settings(**config | changes)
    directory = recipe.run(settings)
    rows = json.loads((directory / "results.json").read_text())["rows"]
    return settings, directory, rows


def descended(steps):
    """The network of `recipes.smoothness` after a number of steps, and its batch."""
    keras.utils.set_random_seed(0)
    problem = _training.problem(_training.Descent(**SETTINGS, norm="none", seed=0))
    model, (x, y) = problem.network(), problem.batches(0)[0]
    for _ in range(steps):
        gradient = diagnostics.value_and_grad(model, x, y).gradient
        for kernel, slope in zip(model.trainable_variables, gradient):
            kernel.assign_sub(RATE * slope)
    return model, x, y
