"""What two PyTorch processes compute together, as JSON: run by `tests/devices`.

KERAS_BACKEND=torch python -m tests.programs.ranks
"""

import json
import pathlib
import re
import tempfile
import warnings

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from keras_norms import CBN
from keras_norms.ops import replicas
from tests.support.backend import numpy
from tests.support.device_cases import CASES, build, check_noise, data, errors

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "groups.md"
PROCESSES, BATCH = 2, 13


def part(array, rank):
    return array if rank is None else np.array_split(array, PROCESSES)[rank]


def gathered(value):
    """The values of all processes."""
    values = [None] * PROCESSES
    torch.distributed.all_gather_object(values, value)
    return values


def alone(function, *arguments):
    """What a process computes that has no others."""
    context, replicas._context = replicas._context, lambda: None
    try:
        return function(*arguments)
    finally:
        replicas._context = context


def two_steps(case, rank=None):
    """Of a rank with its part of the batch, or of one process with all of it."""
    layer = build(case, BATCH, synchronized=rank is not None)
    arrays = [torch.tensor(part(array, rank)) for array in data(case, BATCH)]
    x, upstream, *mask = arrays
    x.requires_grad_()
    found = {"outputs": [], "gradients": [], "state": []}
    for _ in range(2):
        y = layer(x, training=True, **dict(zip(["mask"], mask)))
        loss = (y.float() * upstream[..., : y.shape[-1]]).sum()
        weights = [v.value for v in layer.trainable_variables]
        dx, *gradients = torch.autograd.grad(loss, [x, *weights], create_graph=True)
        if gradients:  # Second derivatives pass through the sums, too.
            more = torch.autograd.grad((dx * dx).sum(), weights, allow_unused=True)
            gradients += [each for each in more if each is not None]
        found["outputs"] += [numpy(y), numpy(dx)]
        found["gradients"] += map(numpy, gradients)
        found["state"] += map(numpy, layer.non_trainable_variables)
    return found


def compared(name, rank):
    """The errors of two processes against one."""
    parts = gathered(two_steps(CASES[name], rank))
    outputs, gradients, states = (
        [*zip(*(of[key] for of in parts), strict=True)] for key in parts[0]
    )
    for mine, others in states:
        np.testing.assert_array_equal(mine, others)
    together = {
        "outputs": [*map(np.concatenate, outputs)],
        "gradients": [*map(sum, gradients)],
        "state": parts[0]["state"],
    }
    return {"layer": name, **errors(together, alone(two_steps, CASES[name]))}


def trained(rank=None):
    """The weights after some steps; on several processes in DistributedDataParallel."""
    keras.utils.set_random_seed(0)
    norm = CBN(synchronized=True)
    layers = [keras.layers.Dense(4, "tanh"), norm, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    norm.set_learning_rate(0.05)
    run = model if rank is None else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    # The same number for each, so that the mean of losses is that of the batch.
    data = np.random.default_rng(0).normal(1, 2, (12, 6)).astype("float32")
    inputs, targets = torch.tensor(part(data, rank)).split([5, 1], 1)
    for _ in range(5):
        optimizer.zero_grad()
        (run(inputs, training=True) - targets).square().mean().backward()
        optimizer.step()
    return [numpy(v) for v in model.variables]


def check_not_synchronized(rank):
    """Each normalises alone, keeps what it has seen, and says so once.

    The page of the documentation averages that.
    """
    x = torch.tensor(part(data(CASES["cbn"], 8)[0], rank))
    layer = CBN()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            layer(x, training=True)
    said = [w for w in caught if "synchronized=True" in str(w.message)]
    assert len(said) == 1, [str(w.message) for w in caught]
    first, second = gathered(numpy(layer.moving_mean))
    assert np.abs(first - second).max() > 0.01
    code = re.search(r"for variable in .*?(?=\n```)", PAGE.read_text(), re.DOTALL)
    exec(code[0], {"model": keras.Sequential([layer]), "torch": torch})
    for found in gathered(numpy(layer.moving_mean)):
        np.testing.assert_allclose(found, (first + second) / 2, rtol=1e-6)


def noisy(make, x):
    """The outputs of the two processes."""
    return gathered(numpy(make(synchronized=True)(x, training=True)))


def main(rank, store):
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=PROCESSES
    )
    found = [compared(name, rank) for name in CASES]
    for mine, expected in zip(trained(rank), alone(trained), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
    check_not_synchronized(rank)
    check_noise(noisy)
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(main, (f"{directory}/store",), PROCESSES)
