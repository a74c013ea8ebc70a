"""The training step of each recipe network on slices of TPUs, and how it scales.

It compiles the step that `recipes.train` runs under `keras.distribution.DataParallel`:
forward, AMAT with the schedule, backward, SGD with coupled weight decay, loss and
accuracy. The network can train if its step needs no more memory than a chip has.

How it scales is predicted, not measured. For a given batch per chip, one chip takes at
least

    chip = max(operations / peak, bytes moved / bandwidth of the memory)

with the compiler's counts. A collective goes around each axis of the slice, there and
back at 1 us per hop, and sends its bytes twice through the links that the slice uses:

    collective = 2 * hops * 1 us + 2 * bytes / bandwidth of the links

Efficiency is chip / (chip + all collectives), as if none overlapped with other work. In
fact the chip takes longer than its floor, and the sum of the gradients, most of the
bytes, can overlap with the backward pass: it is a low estimate. The figures for chips
are from https://cloud.google.com/tpu/docs; 1 us is an assumption.
"""

from benchmarks.tpu import compiler  # isort: skip  # before JAX

import typing

import jax
import keras
import numpy as np

from keras_norms import AMAT, CBN
from keras_norms.layers import layers_of
from recipes import models
from recipes.engine import optimizers
from recipes.models import norms

# Name -> size of images, number of classes.
NETWORKS = {
    "resnet20": (32, 10),
    "vgg16": (32, 10),
    "resnet18": (224, 1000),
    "resnet50": (224, 1000),
    "efficientnetb0": (224, 1000),
}
TOPOLOGIES = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "v5e:16x16", "v6e:16x16"]
SECONDS_A_HOP = 1e-6


class Chip(typing.NamedTuple):
    """The limits of a chip."""

    teraflops: float  # bfloat16
    memory: float  # GB
    memory_bandwidth: float  # GB/s
    link: float  # GB/s, to one neighbour


CHIPS = {
    "v4": Chip(275, 32, 1200, 50),
    "v5e": Chip(197, 16, 819, 50),
    "v5p": Chip(459, 95, 2765, 100),
    "v6e": Chip(918, 32, 1600, 100),
}


def compile_step(network, norm, topology, batch_per_chip, dtype, group_size=None):
    """The compiled training step of a recipe network on a slice.

    Args:
        network: A name in `NETWORKS`.
        norm: A name in `recipes.models.norms.NORMS`.
        topology: As in `compiler.chips`.
        batch_per_chip: Integer.
        dtype: Name of a dtype policy.
        group_size: The `group_size` of the CBN layers.
    """
    size, classes = NETWORKS[network]
    shape = (size, size, 3)
    model = models.build(network, shape, classes, norm, "relu", dtype=dtype)
    for layer in layers_of(model, CBN):
        layer.group_size = group_size
    model.compile(
        optimizers.SGD(optimizers.piecewise_schedule(0.1, 10_000), 0.9, 5e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    if norms.get(norm).amat:
        amat = AMAT()
        amat.set_model(model)
        amat.on_train_begin()
    x, y = np.zeros((1, *shape), "float32"), np.zeros(1, "int32")
    model._symbolic_build(data_batch=(x, y))
    chips = compiler.chips(topology)
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple(map(chips.shapes, variables))
    batch = [chips.batch(batch_per_chip, a.shape[1:], a.dtype) for a in (x, y)]
    shardings = jax.tree.map(lambda shape: shape.sharding, state)
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(None, shardings))
    return step.lower(state, tuple(batch)).compile()


def prediction(row):
    """How training scales from one chip to a slice, by the model of this module.

    Args:
        row: Dict with `slice` and what `compiler.cost` returns.

    Returns:
        Dict of `memory_share`, the share of a chip's memory; `chip_milliseconds`,
        `collective_milliseconds`, and `efficiency`.
    """
    generation, shape = row["slice"].split(":")
    chip = CHIPS[generation]
    milliseconds = max(
        row["gigaflops"] / chip.teraflops,
        1e3 * row["gigabytes_moved"] / chip.memory_bandwidth,
    )
    sizes = [int(size) for size in shape.split("x")]
    # 16 chips in a row form a ring, with two ways to the farthest one.
    hops = sum(size // 2 if size >= 16 else size - 1 for size in sizes)
    neighbours = sum(min(size - 1, 2) for size in sizes)
    waiting = 2 * hops * SECONDS_A_HOP * sum(row["collectives"].values())
    sent = row["collective_megabytes"] / 1e3
    sending = 2 * sent / (neighbours * chip.link) if neighbours else 0
    collective = 1e3 * (waiting + sending)
    return {
        "memory_share": row["memory_gigabytes"] / chip.memory,
        "chip_milliseconds": milliseconds,
        "collective_milliseconds": collective,
        "efficiency": milliseconds / (milliseconds + collective),
    }
