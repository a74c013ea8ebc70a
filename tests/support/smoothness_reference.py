"""The deep linear network in NumPy, without norms: x -> W_k ... W_1 x, float64."""

import itertools
import json

import keras
import numpy as np

from recipes.smoothness import _training
from tests.support.backend import numpy

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


def loss_and_gradients(kernels, x, y):
    """|x W_1 ... W_k - y|^2 over the batch, and its gradient in each W_i."""
    inputs = list(itertools.accumulate(kernels, np.matmul, initial=x))
    error = inputs.pop() - y
    upstream, gradients = 2 * error, []
    for kernel, value in zip(reversed(kernels), reversed(inputs)):
        gradients.append(value.T @ upstream)
        upstream = upstream @ kernel.T
    return (error**2).sum(), gradients[::-1]


def descend(kernels, x, y, steps=1):
    """The weights after so many steps of gradient descent."""
    for _ in range(steps):
        _, gradients = loss_and_gradients(kernels, x, y)
        kernels = [w - RATE * g for w, g in zip(kernels, gradients)]
    return kernels


def start():
    """The first weights of `recipes.smoothness` for `SETTINGS`, and the data."""
    keras.utils.set_random_seed(0)
    problem = _training.problem(_training.Descent(**SETTINGS, norm="none", seed=0))
    weights = problem.network().trainable_variables
    kernels = [numpy(kernel).astype("float64") for kernel in weights]
    return kernels, *(a.astype("float64") for a in problem.batches(0)[0])


def distance(arrays, others=None):
    """Of two lists of arrays, or of one from the origin, as of one long vector."""
    others = others or [0] * len(arrays)
    return np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(arrays, others)))
