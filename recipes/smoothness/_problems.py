"""The two networks of Santurkar et al., Appendix A.1, compiled, with their data."""

from collections.abc import Callable
from typing import NamedTuple

import keras

from recipes import data, models
from recipes.models import dln, norms


class Problem(NamedTuple):
    """A compiled model and its data.

    Attributes:
        model: A `keras.Model`.
        batch: Function of a step that returns the batch `(x, y)` it is taken on.
        test: Test inputs and targets, or `None`.
    """

    model: keras.Model
    batch: Callable
    test: tuple | None


def problem(config, data_dir=None, download=False):
    """Builds a network and its data.

    Args:
        config: Dict, as `recipes.probed.complete` returns it.
        data_dir, download: Arguments of `recipes.data.load`.

    Returns:
        A `Problem`.
    """
    if config["network"] == "dln":
        return _dln(config)
    images = data.load(config["dataset"], data_dir, config["train_size"], download)
    images = enlarged(images)
    batches = data.Batches(
        images.x_train, images.y_train, config["batch_size"], config["seed"]
    )
    model = models.build(
        "vgg16", images.x_train.shape[1:], images.num_classes, config["norm"], "relu"
    )
    if config["width"] != 1:
        model = models.scaled(model, config["width"])
    model.compile(
        keras.optimizers.SGD(config["learning_rate"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    some = slice(config["test_size"])
    test = images.x_test[some], images.y_test[some]
    return Problem(model, batches.__getitem__, test)


def enlarged(images):
    """Images of 16x16 and less made 32x32 or larger, each pixel repeated.

    VGG-16 halves its map five times. Digits of 8x8 are a single position by the fourth
    stage, where eight of nine weights of a kernel see zeros alone; without a norm, that
    network does not train.
    """
    times = -(-32 // images.x_train.shape[1]) if images.x_train.shape[1] <= 16 else 1

    def enlarge(x):
        return x.repeat(times, axis=1).repeat(times, axis=2)

    x_train, x_test = enlarge(images.x_train), enlarge(images.x_test)
    return images._replace(x_train=x_train, x_test=x_test)


def _dln(config):
    with models.dtype_policy(config["dtype"]):
        model = dln.dln(norms.get(config["norm"]), depth=config["depth"])
        loss = dln.SumOfSquares(dtype=config["dtype"])
    held = keras.backend.standardize_dtype(model.trainable_variables[0].value.dtype)
    if held != config["dtype"]:
        raise ValueError(
            f"The weights are {held}, not dtype={config['dtype']}. With JAX, set the "
            "environment variable JAX_ENABLE_X64=1, or give --dtype=float32."
        )
    # Steps of microseconds: without these, all time is overhead.
    fast = {"jax": {}, "torch": {}}.get(
        config["backend"],
        {"jit_compile": True, "steps_per_execution": config["every"]},
    )
    model.compile(keras.optimizers.SGD(config["learning_rate"]), loss, **fast)
    batch = dln.regression(config["seed"])
    return Problem(model, lambda step: batch, None)
