"""What two PyTorch processes compute together, as JSON: run by `tests/devices`.

KERAS_BACKEND=torch python -m tests.programs.ranks
"""

import json
import pathlib
import re
import sys
import tempfile
import warnings

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from keras_norms import CBN, NoisyBN
from keras_norms.ops import replicas
from tests.support.backend import numpy
from tests.support.device_cases import CASES, build, data, errors

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "groups.md"
PROCESSES, BATCH = 2, 13


def part(array, rank):
    return array if rank is None else np.array_split(array, PROCESSES)[rank]


def two_steps(case, rank=None):
    """Of a rank with its part of the batch, or of one process with all of it."""
    layer = build(case, BATCH, synchronized=rank is not None)
    arrays = [torch.tensor(part(array, rank)) for array in data(case, BATCH)]
    x, upstream, *mask = arrays
    x.requires_grad_()
    found = {"outputs": [], "gradients": [], "state": []}
    for _ in range(2):
        y = layer(x, training=True, **({"mask": mask[0]} if mask else {}))
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
    """The errors of two processes against one; `None` but for the first process."""
    parts = gathered(two_steps(CASES[name], rank))
    if rank:
        return None
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
    alone = _alone(lambda: two_steps(CASES[name]))
    return {"layer": name, **errors(together, alone)}


def gathered(value):
    """The values of all processes."""
    values = [None] * PROCESSES
    torch.distributed.all_gather_object(values, value)
    return values


def check_training(rank):
    """A model in DistributedDataParallel is after some steps that of one process."""
    rng = np.random.default_rng(0)
    x = rng.normal(1, 2, (12, 5)).astype("float32")
    y = rng.normal(size=(12, 1)).astype("float32")

    def trained(rank):
        keras.utils.set_random_seed(0)
        norm = CBN(synchronized=True)
        layers = [keras.layers.Dense(4, "tanh"), norm, keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        norm.set_learning_rate(0.05)
        run = model if rank is None else DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        # The same number for each, so that the mean of losses is that of the batch.
        inputs, targets = (torch.tensor(part(array, rank)) for array in (x, y))
        for _ in range(5):
            optimizer.zero_grad()
            (run(inputs, training=True) - targets).square().mean().backward()
            optimizer.step()
        return [numpy(v) for v in model.variables]

    for mine, alone in zip(trained(rank), _alone(lambda: trained(None)), strict=True):
        np.testing.assert_allclose(mine, alone, rtol=1e-5, atol=1e-6)


def _alone(function):
    """What a process computes that has no others."""
    context, replicas._context = replicas._context, lambda: None
    try:
        return function()
    finally:
        replicas._context = context


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
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    exec(code, {"model": keras.Sequential([layer]), "torch": torch})
    for found in gathered(numpy(layer.moving_mean)):
        np.testing.assert_allclose(found, (first + second) / 2, rtol=1e-6)


def check_noise(rank):
    """An element has its own on each process, a channel that of the whole batch."""
    x = torch.tensor(data(CASES["noisy"], 6)[0])
    for jitter in (0.1, 0.0):
        layer = NoisyBN(
            seed=3, mean_jitter=jitter, scale_jitter=jitter, synchronized=True
        )
        first, second = gathered(numpy(layer(x, training=True)))
        apart = np.abs(first - second).max()
        assert apart > 0.1 if jitter else apart < 1e-5, apart


def main(rank, store):
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=PROCESSES
    )
    found = [compared(name, rank) for name in CASES]
    for check in (check_training, check_not_synchronized, check_noise):
        check(rank)
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:]:
        main(int(sys.argv[1]), sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as directory:
            store = str(pathlib.Path(directory) / "store")
            torch.multiprocessing.spawn(main, (store,), PROCESSES)
