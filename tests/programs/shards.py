"""What JAX devices compute under `keras.distribution`, as JSON: run by test_jax.

A process can divide its CPU into devices only before it uses any.
"""

import json
import re

import jax
import keras
import numpy as np

from keras_norms import AMAT, CBN, FusedCBN, LpNorm, NoisyBN
from recipes.engine import classifier, devices, optimizers
from tests.support.device_cases import CASES, build, data, errors

BATCH = 16
# How many devices.
SIZES = {name: [2] for name in CASES} | {"cbn": [2, 4, 8]}
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|collective-permute)(?:-start)?\("
)


def on(count):
    devices = keras.distribution.list_devices("cpu")[:count]
    distribution = keras.distribution.DataParallel(devices=devices)
    keras.distribution.set_distribution(distribution)
    return distribution


def step_of(layer):
    """The training step of a layer: outputs, state, gradients of weights and input."""

    def step(trainable, state, x, upstream, mask=None):
        arguments = {} if mask is None else {"mask": mask}

        def loss(trainable, x):
            y, updated = layer.stateless_call(
                trainable, state, x, training=True, **arguments
            )
            product = y.astype("float32") * upstream[..., : y.shape[-1]]
            return product.sum(), (y, updated)

        gradients, (y, updated) = jax.grad(loss, (0, 1), has_aux=True)(trainable, x)
        return y, updated, *gradients

    return step


def two_steps(layer, arrays):
    trainable = [v.value for v in layer.trainable_variables]
    state = [v.value for v in layer.non_trainable_variables]
    program = jax.jit(step_of(layer)).lower(trainable, state, *arrays).compile()
    found = []
    for _ in range(2):
        y, state, gradients, dx = program(trainable, state, *arrays)
        found.append({"outputs": [y, dx], "gradients": gradients, "state": state})
    merged = {key: [*found[0][key], *found[1][key]] for key in found[0]}
    return merged, every_step(program)


def every_step(program):
    """The collectives that each run starts, and not those where a mean is far away."""
    text = program.as_text()
    return COLLECTIVE.findall(text[text.index("\nENTRY") :])


def compared(name, count):
    case = CASES[name]
    arrays = data(case, BATCH)
    keras.distribution.set_distribution(None)
    expected, _ = two_steps(build(case, BATCH), arrays)
    distribution = on(count)
    layer = build(case, BATCH)
    shared = [
        jax.device_put(a, distribution.get_data_layout(a.shape).backend_layout)
        for a in arrays
    ]
    actual, collectives = two_steps(layer, shared)
    as_numpy = {key: [*map(np.asarray, value)] for key, value in actual.items()}
    return {**errors(as_numpy, expected), "collectives": len(collectives)}


def large_means():
    """Errors of the outputs of two steps against float64: means of 1e4 deviations."""
    rng = np.random.default_rng(0)
    x = (1e4 + rng.normal(size=(BATCH, 50, 3))).astype("float32")
    wide = x.astype("float64")
    centered, variance = wide - wide.mean((0, 1)), wide.var((0, 1))
    expected = {
        CBN: 0.3 + centered / np.sqrt(variance + 1e-5),
        NoisyBN: centered / np.sqrt(variance + 1e-3),
        LpNorm: centered / (np.sqrt(variance) + 0.1),
    }
    names = {CBN: "cbn, coupled", NoisyBN: "noisy", LpNorm: "lp 2, centered"}
    sharding = on(8).get_data_layout(x.shape).backend_layout
    shared = [jax.device_put(a, sharding) for a in (x, x)]
    found = {}
    for cls, name in names.items():
        layer = CASES[name].make()
        layer.build(x.shape)
        outputs, _ = two_steps(layer, shared)
        found[name] = [
            float(np.abs(y - expected[cls]).max()) for y in outputs["outputs"][::2]
        ]
    return found


def collectives():
    """Those of the training step of a layer between two convolutions, on 8 devices."""
    on(8)
    layers = {
        "none": lambda: keras.layers.Activation("linear"),
        "bn": keras.layers.BatchNormalization,
        "cbn": CBN,
        "fused_cbn": lambda: FusedCBN(keras.layers.Conv2D(8, 1), CBN()),
        "noisy_bn": NoisyBN,
        "lp_norm": LpNorm,
        "lp_norm 1": lambda: LpNorm(1),
        "lp_norm 1, centered": lambda: LpNorm(1, norm_of="centered"),
        "lp_norm 3": lambda: LpNorm(3),
        "lp_norm 3, centered": lambda: LpNorm(3, norm_of="centered"),
        "lp_norm inf": lambda: LpNorm(np.inf),
        "lp_norm inf, centered": lambda: LpNorm(np.inf, norm_of="centered"),
    }
    found = {}
    for dtype in ("float32", "mixed_bfloat16"):
        keras.config.set_dtype_policy(dtype)
        found[dtype] = {
            name: len(every_step(compiled_fit(layer())))
            for name, layer in layers.items()
        }
    keras.config.set_dtype_policy("float32")
    return found


def compiled_fit(norm):
    """The program that `fit` runs."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(8, 3),
            keras.layers.Activation("relu"),
            norm,
            keras.layers.Conv2D(8, 3),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(True)
    )
    if isinstance(norm, CBN | FusedCBN):
        amat = AMAT()
        amat.set_model(model)
        amat.on_train_begin()
    x, y = np.zeros((16, 8, 8, 3), "float32"), np.zeros(16, "int32")
    model._symbolic_build(data_batch=(x, y))
    distribution = keras.distribution.distribution()
    batch = [
        jax.device_put(a, distribution.get_data_layout(a.shape).backend_layout)
        for a in (x, y)
    ]
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    return jax.jit(model.train_step).lower(state, batch).compile()


def weights_after(fit):
    model = fit()
    return {
        "weights": [keras.ops.convert_to_numpy(v) for v in model.trainable_variables],
        "state": [keras.ops.convert_to_numpy(v) for v in model.non_trainable_variables],
    }


def small_fit():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            keras.layers.Conv2D(8, 3, name="first"),
            keras.layers.Activation("tanh"),
            CBN(name="norm"),
            keras.layers.Conv2D(8, 3, use_bias=False, name="second"),
            keras.layers.BatchNormalization(name="bn"),
            keras.layers.Flatten(),
            keras.layers.Dense(4, name="logits"),
        ]
    )
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model.compile(
        keras.optimizers.SGD(schedule, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 6, 6, 3)).astype("float32")
    y = rng.integers(4, size=64)
    model.fit(x, y, 16, 2, shuffle=False, verbose=0, callbacks=[AMAT()])
    return model


def model_parallel():
    """A mesh of 4 by 2: the batch along one axis, channels along the other."""
    keras.distribution.set_distribution(None)
    expected = weights_after(small_fit)
    devices = keras.distribution.list_devices("cpu")
    mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"), devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["(first|second)/kernel"] = (None, None, None, "model")
    layouts["first/bias"] = ("model",)
    layouts["norm/(gamma|beta|moving_mean|moving_square)"] = ("model",)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
    shardings = []

    def fit():
        model = small_fit()
        norm = model.get_layer("norm")
        for variable in (norm.gamma, norm.moving_square, norm.average_weight):
            shardings.append(len(set(map(str, variable.value.sharding.spec))))
        return model

    found = errors(weights_after(fit), expected)
    return {**found, "sharded": [bool(count) for count in shardings]}


def evaluation():
    """A recipe's test images on 8 devices, among which their number does not divide."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(90, 8, 8, 1)).astype("float32")
    labels = rng.integers(10, size=90).astype("int32")

    class Source:
        test = images, labels
        image_shape, num_classes, steps = (8, 8, 1), 10, 1

    settings = classifier.Training(model="resnet8", batch_size=16)
    norm = settings.normalisation()

    def evaluated(strategy):
        keras.utils.set_random_seed(0)
        model = classifier._network(settings, Source, norm, optimizers.SGD)
        test = Source.test
        if strategy is not None:
            test = strategy.distribute(Source, settings).test
        return model.evaluate(*([test] if strategy else test), verbose=0, batch_size=45)

    keras.distribution.set_distribution(None)
    alone = evaluated(None)
    strategy = devices.get("data_parallel")
    with strategy.scope():
        return {"alone": alone, "together": evaluated(strategy)}


def uneven():
    """What `fit` says of a last batch that the devices cannot share."""
    on(8)
    model = keras.Sequential([keras.Input((3,)), CBN(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    try:
        model.fit(np.zeros((18, 3)), np.zeros((18, 1)), 16, verbose=0)
    except ValueError as error:
        return str(error)
    return ""


def main():
    found = {
        "errors": {
            name: {f"{count} devices": compared(name, count) for count in counts}
            for name, counts in SIZES.items()
        },
        "large_means": large_means(),
        "collectives": collectives(),
        "model_parallel": model_parallel(),
        "evaluation": evaluation(),
        "uneven": uneven(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
