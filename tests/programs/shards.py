"""What JAX devices compute under `keras.distribution`, as JSON: run by `tests/devices`.

    KERAS_BACKEND=jax XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m tests.programs.shards [<name of a case> ...]

Without names all cases, and what else devices do. With `--output=FILE.json` a report of
all cases, and of Keras' layer, is written instead. A process can divide its CPU into
devices only before it uses any.
"""

import re
import types

import jax
import keras
import numpy as np

from keras_norms import AMAT, CBN
from recipes.engine import classifier, devices, optimizers
from tests.support import device_cases
from tests.support.backend import numpy
from tests.support.device_cases import CASES, build, data, errors

BATCH = 16
# How many devices.
SIZES = {
    None: [(2,)],
    "cbn": [(8,)],
    "cbn, ratio": [(2,), (4,)],
    "cbn, groups": [(4,), (8,)],
}
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|collective-permute)(?:-start)?\("
)


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
    # Those that each run starts, and not those where a mean is far away.
    text = program.as_text()
    return found, len(COLLECTIVE.findall(text[text.index("\nENTRY") :]))


def compared(case, count, mean=0.0):
    """The errors of two steps on `count` devices against those on one."""
    x, *others = data(case, BATCH)
    arrays = x + np.float32(mean), *others
    keras.distribution.set_distribution(None)
    expected, _ = two_steps(build(case, BATCH), arrays)
    distribution = on(count)
    shared = [divided(distribution, array) for array in arrays]
    actual, collectives = two_steps(build(case, BATCH), shared)
    return {**errors(actual, expected), "collectives": collectives}


def check_large_means():
    """Of 5000 deviations, from the first step on; `test_numerics` has one device."""
    for name in ("cbn, coupled", "noisy", "lp 2, centered"):
        found = compared(CASES[name], 8, mean=1e4)
        assert found["outputs"] < 5e-4, (name, found)


def after_fit():
    """The weights of a small network, and its norm."""
    keras.utils.set_random_seed(0)
    norm = CBN(name="norm")
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            keras.layers.Conv2D(8, 3, activation="tanh", name="first"),
            norm,
            keras.layers.Conv2D(8, 3, use_bias=False, name="second"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 6, 6, 3)), rng.normal(size=(64, 4))
    model.fit(x, y, 16, 2, shuffle=False, verbose=0, callbacks=[AMAT()])
    return {"weights": [numpy(v) for v in model.variables]}, norm


def check_model_parallel():
    """A mesh of 4 by 2: the batch along one axis, channels along the other."""
    keras.distribution.set_distribution(None)
    expected, _ = after_fit()
    devices = keras.distribution.list_devices("cpu")
    mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"), devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["(first|second)/kernel"] = (None, None, None, "model")
    layouts["first/bias"] = ("model",)
    layouts["norm/(gamma|beta|moving_mean|moving_square)"] = ("model",)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
    found, norm = after_fit()
    variables = norm.gamma, norm.moving_square, norm.average_weight
    assert [len(v.value.sharding.spec) for v in variables] == [1, 1, 0]
    assert max(errors(found, expected).values()) < 1e-4


def check_evaluation():
    """Every test image counts once, also where 8 devices cannot share them."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(90, 8, 8, 1)).astype("float32")
    labels = rng.integers(10, size=90).astype("int32")
    settings = classifier.Training(model="resnet8", batch_size=16)
    source = types.SimpleNamespace(
        test=(images, labels), image_shape=(8, 8, 1), num_classes=10, steps=1
    )

    def evaluated(*test):
        keras.utils.set_random_seed(0)
        norm = settings.normalisation()
        model = classifier._network(settings, source, norm, optimizers.SGD)
        return model.evaluate(*test, verbose=0, batch_size=45)

    keras.distribution.set_distribution(None)
    alone = evaluated(images, labels)
    strategy = devices.get("data_parallel")
    with strategy.scope():
        test = strategy.distribute(source, settings).test
        np.testing.assert_allclose(evaluated(test), alone, rtol=1e-5)


if __name__ == "__main__":
    checks = check_large_means, check_model_parallel, check_evaluation
    device_cases.main(compared, SIZES, *checks)
