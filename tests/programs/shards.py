"""What JAX devices compute under `keras.distribution`, as JSON: run by `tests/devices`.

    KERAS_BACKEND=jax XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m tests.programs.shards [<name of a case> ...]

Without names all cases, and what else devices do. With `--output=FILE.json` a report of
all cases, and of Keras' layer, is written instead. A process can divide its CPU into
devices only before it uses any.
"""

import pathlib
import re
import tempfile

import jax
import keras
import numpy as np
import pytest
from keras import ops

from benchmarks.compiled import collectives
from keras_norms import AMAT, CBN, FusedCBN, LpNorm
from recipes import train
from recipes.engine import classifier, devices
from recipes.engine.recorder import SCORES
from tests.support import device_cases, small
from tests.support.backend import numpy
from tests.support.device_cases import CASES, build, data, errors

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tpu.md"
BATCH = 16
# How many devices.
SIZES = {
    None: [(2,)],
    "cbn": [(8,)],
    "cbn, ratio": [(2,), (4,)],
    "cbn, groups": [(4,), (8,)],
}


def on(count):
    devices = keras.distribution.list_devices("cpu")[:count]
    distribution = keras.distribution.DataParallel(devices=devices)
    keras.distribution.set_distribution(distribution)
    return distribution


def divided(distribution, array):
    layout = distribution.get_data_layout(array.shape)
    return jax.device_put(array, layout.backend_layout)


def two_steps(layer, arrays):
    """Outputs, gradients and state, and the number of collectives of a step."""
    trainable = [v.value for v in layer.trainable_variables]
    state = [v.value for v in layer.non_trainable_variables]

    def step(trainable, state, x, upstream, *mask):
        def loss(trainable, x):
            arguments = {"training": True, **dict(zip(["mask"], mask))}
            y, updated = layer.stateless_call(trainable, state, x, **arguments)
            # Its gradient waits for the output, as in a network.
            wide = y.astype("float32")
            product = wide * (upstream[..., : y.shape[-1]] + wide / 2)
            return product.sum(), (y, updated)

        gradients, (y, updated) = jax.grad(loss, (0, 1), has_aux=True)(trainable, x)
        return y, updated, *gradients

    program = jax.jit(step).lower(trainable, state, *arrays).compile()
    found = {"outputs": [], "gradients": [], "state": []}
    for _ in range(2):
        y, state, gradients, dx = program(trainable, state, *arrays)
        found["outputs"] += [y, dx]
        found["gradients"] += gradients
        found["state"] += state
    return found, len(collectives(program.as_text()))


def compared(case, count, mean=0.0):
    """The errors of two steps on `count` devices against those on one."""
    x, *others = data(case, BATCH)
    arrays = x + np.float32(mean), *others
    keras.distribution.set_distribution(None)
    expected, _ = two_steps(build(case, BATCH), arrays)
    distribution = on(count)
    shared = [divided(distribution, array) for array in arrays]
    actual, started = two_steps(build(case, BATCH), shared)
    return {**errors(actual, expected), "collectives": started}


def check_large_means():
    """Of 5000 deviations, from the first step on; `test_numerics` has one device."""
    for name in ("cbn, coupled", "noisy", "lp 2, centered"):
        found = compared(CASES[name], 8, mean=1e4)
        assert found["outputs"] < 5e-4, (name, found)


def after_fit():
    """The weights of a small network, and a norm in it."""
    keras.utils.set_random_seed(0)
    model = small.convolutions("", (8, 8, 1), 4, "cbn", "tanh")
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8, 8, 1)), rng.normal(size=(64, 4))
    model.fit(x, y, 16, 2, shuffle=False, verbose=0, callbacks=[AMAT()])
    weights = [numpy(v) for v in model.variables]
    return {"weights": weights}, model.get_layer("conv_norm")


def check_model_parallel():
    """As docs/tpu.md says: the batch along one axis, channels along the other."""
    keras.distribution.set_distribution(None)
    expected, _ = after_fit()
    exec(re.search(r"mesh = .*?(?=\n```)", PAGE.read_text(), re.DOTALL)[0])
    found, norm = after_fit()
    variables = norm.gamma, norm.moving_square, norm.average_weight
    specs = [tuple(v.value.sharding.spec) for v in variables]
    assert specs == [("model",), ("model",), ()]
    assert max(errors(found, expected).values()) < 1e-4


def check_shard_map():
    """Each device normalises alone; gradients of shared weights are added up."""
    keras.distribution.set_distribution(None)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    shared, parts = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("batch")
    x = np.random.default_rng(0).normal(1, 2, (32, 4)).astype("float32")
    dense = keras.layers.Dense(4, dtype="mixed_bfloat16")
    fused = FusedCBN(dense, dtype="mixed_bfloat16")
    for layer, training in (
        *((CBN(), True), (CBN(group_size=2), True), (LpNorm(1), True)),
        *((FusedCBN(keras.layers.Dense(4)), True), (fused, False)),
    ):
        layer.build((None, 4))
        weights = [v.value for v in layer.trainable_variables]
        state = [v.value for v in layer.non_trainable_variables]

        def loss(weights, x, layer=layer, state=state, training=training):
            y, _ = layer.stateless_call(weights, state, x, training=training)
            return ops.mean(ops.cast(y, "float32") ** 3)

        def gradient(weights, x, loss=loss):
            def mean(weights):
                return jax.lax.pmean(loss(weights, x), "batch")

            return jax.grad(mean)(weights)

        both = {"in_specs": (shared, parts), "out_specs": shared}
        found = jax.jit(jax.shard_map(gradient, mesh=mesh, **both))(weights, x)
        alone = [jax.grad(loss)(weights, each) for each in np.split(x, mesh.size)]
        for value, *each in zip(found, *alone, strict=True):
            expected = np.mean(each, 0)
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def check_training():
    """A recipe's is that of one device; of test images that 8 cannot share, too."""
    usual = small.SETTINGS | {"train_size": 154, "validation_size": 90}
    usual |= {"activation": "tanh", "saved_models_dir": None}
    keras.distribution.set_distribution(None)
    found = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        small.use(patch)
        for strategy in (None, devices.get("data_parallel")):
            settings = classifier.Saved(**usual, runs_dir=f"{folder}/{len(found)}")
            lines = train.train(settings, strategy).metrics
            found.append([[line[key] for key in SCORES] for line in lines])
    np.testing.assert_allclose(*found, rtol=1e-4)


if __name__ == "__main__":
    checks = check_large_means, check_model_parallel, check_shard_map, check_training
    device_cases.main(compared, SIZES, *checks)
