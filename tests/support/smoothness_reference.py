"""The deep linear network in NumPy, without norms: x -> W_k ... W_1 x, float64."""

import keras
import numpy as np
import pytest

from recipes.smoothness import _training

# A problem that takes no time; float32, so that JAX needs no setting.
SETTINGS = {"network": "dln", "depth": 4, "dtype": "float32"}
SETTINGS |= {"steps": 4, "every": 2}
RATE = _training.USUAL["dln"]["learning_rate"]


def loss_and_gradients(kernels, x, y):
    """|x W_1 ... W_k - y|^2 over the batch, and its gradient in each W_i."""
    inputs = [x]
    for kernel in kernels:
        inputs.append(inputs[-1] @ kernel)
    error = inputs.pop() - y
    upstream, gradients = 2 * error, []
    for kernel, value in zip(reversed(kernels), reversed(inputs)):
        gradients.append(value.T @ upstream)
        upstream = upstream @ kernel.T
    return (error**2).sum(), gradients[::-1]


def descend(kernels, x, y, rate, steps=1):
    """The weights after so many steps of gradient descent."""
    for _ in range(steps):
        _, gradients = loss_and_gradients(kernels, x, y)
        kernels = [w - rate * g for w, g in zip(kernels, gradients)]
    return kernels


def start(seed=0):
    """The first weights of `recipes.smoothness` for `SETTINGS`, and the data."""
    keras.utils.set_random_seed(seed)
    problem = _training.problem(_training.Descent(**SETTINGS, norm="none", seed=seed))
    kernels = [
        keras.ops.convert_to_numpy(v).astype("float64")
        for v in problem.network().trainable_variables
    ]
    return kernels, *(a.astype("float64") for a in problem.batches(0)[0])


def length(arrays):
    return np.sqrt(sum((a**2).sum() for a in arrays))


def check_not_disturbed(settings, lines):
    """That a training which was measured is the same without."""
    plain = _training.train(settings, "plain", lambda *_: {}).metrics
    for line, other in zip(lines, plain, strict=True):
        for key in {"train_loss", "test_loss"} & line.keys():
            assert line[key] == pytest.approx(other[key], rel=1e-5)
