"""Training steps compiled by JAX for chips that need not be present."""

import math
import re

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "f64": 8}
_OPERATION = re.compile(rf" = (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
_TENSOR = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


class Chips:
    """Chips in a mesh with one axis, for the batch.

    Args:
        devices: List of the devices of a topology.

    Attributes:
        chips: How many.
        everywhere, by_batch: `jax.sharding.NamedSharding` for what every chip holds
            whole, and for what is divided among them along the first axis.
    """

    def __init__(self, devices):
        self.chips = len(devices)
        mesh = Mesh(np.array(devices), ("batch",))
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.by_batch = NamedSharding(mesh, PartitionSpec("batch"))

    def shapes(self, variables):
        """The shapes of variables that every chip holds, for `jax.jit(...).lower`."""
        return [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=self.everywhere)
            for v in variables
        ]

    def batch(self, per_chip, shape, dtype):
        """The shape of a batch divided among the chips."""
        shape = (per_chip * self.chips, *shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.by_batch)


def compile_step(model, chips, batch_per_chip, loss_last=False):
    """Compile the training step of a Keras model: SGD with momentum, logits.

    Args:
        model: A `keras.Model` that returns logits.
        chips: The `Chips` to compile for.
        batch_per_chip: Integer.
        loss_last: Whether the step returns the loss after the state, not before it as
            Keras' step does. Otherwise, for GPUs, XLA copies each donated scalar.
    """
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(trainable, others, slots, x, y):
        def forward(trainable):
            logits, updated = model.stateless_call(trainable, others, x, training=True)
            return loss(y, logits), updated

        (value, updated), gradients = jax.value_and_grad(forward, has_aux=True)(
            trainable
        )
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        state = trainable, updated, slots
        return (state, value) if loss_last else (value, state)

    arguments = (
        chips.shapes(model.trainable_variables),
        chips.shapes(model.non_trainable_variables),
        chips.shapes(optimizer.variables),
        chips.batch(batch_per_chip, model.input_shape[1:], model.compute_dtype),
        chips.batch(batch_per_chip, (), "int32"),
    )
    return jax.jit(step, donate_argnums=(0, 1, 2)).lower(*arguments).compile()


def collectives(text):
    """The collectives that each run of a compiled program starts.

    Those in branches do not count: they only belong to sums in float32 that are taken
    again if a batch is far from the moving mean.

    Args:
        text: The program, as `compiled.as_text()` gives it.

    Returns:
        List of the kind of each, and the bytes of its result on one chip.
    """
    program = text[text.index("\nENTRY ") :]
    return [(kind, size(result)) for result, kind in _OPERATION.findall(program)]


def size(shape):
    """The bytes of all tensors that the text of a shape names."""
    return sum(
        _BYTES.get(dtype, 4) * math.prod(int(n) for n in sizes.split(",") if n)
        for dtype, sizes in _TENSOR.findall(re.sub(r"\{[^}]*\}", "", shape))
    )


def of_collectives(text):
    """The numbers and bytes of what `collectives` finds, a dict."""
    found = collectives(text)
    kinds = [kind for kind, _ in found]
    return {
        "all_reduces": kinds.count("all-reduce"),
        "collectives": {kind: kinds.count(kind) for kind in sorted({*kinds})},
        "collective_megabytes": sum(size for _, size in found) / 1e6,
    }
