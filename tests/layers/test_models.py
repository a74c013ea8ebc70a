"""Every layer in models: training, saving, copying, mixed precision, any size."""

import copy

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import AMAT, CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from tests.support.any_layer import FORMS, ONE_EACH, QUIET
from tests.support.backend import (
    BACKEND,
    later,
    later_on_jax,
    not_torch,
    numpy,
    once,
    precision,
    some,
    tensorflow_only,
    torch_only,
)
from tests.support.processes import run

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(1, 2, (8, 6, 6, 2)).astype("float32")
LABELS = np.arange(8) % 2


def network(rate=0.1, size=6, **compile_arguments):
    """Each layer where every weight of it matters."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((size, size, 2)),
            WS(layers.Conv2D(3, 3, use_bias=False)),
            NoisyBN(momentum=0.9, **QUIET),
            layers.Activation("tanh"),
            FusedCBN(layers.Conv2D(4, 2, activation="tanh"), CBN(rho=2.0)),
            CBN(rho=0.5),
            WN(layers.SeparableConv2D(4, 2, activation="tanh")),
            LpNorm(3, norm_of="centered", momentum=0.9),
            CWN(layers.DepthwiseConv2D(2), scale=2.0, gain=True),
            layers.GlobalAveragePooling2D(),
            WN(layers.Dense(2)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, **compile_arguments)
    return model


def fit(model):
    model.fit(IMAGES, LABELS, 4, shuffle=False, verbose=0, callbacks=[AMAT()], epochs=1)


def weights(model):
    """But for the counters that a schedule adds."""
    return [v for v in model.weights if v.name != "step"]


def assert_same(model, other, tolerance=1e-5):
    for weight, wanted in zip(weights(model), weights(other), strict=True):
        np.testing.assert_allclose(
            numpy(weight), numpy(wanted), tolerance, tolerance, err_msg=weight.path
        )


def assert_training_moves_all_but_rho(model):
    before = [numpy(weight) for weight in weights(model)]
    fit(model)
    for weight, old in zip(weights(model), before, strict=True):
        new = numpy(weight)
        assert new.dtype == "float32" and np.all(np.isfinite(new)), weight.path
        assert np.any(new != old) == (weight.name != "rho"), weight.path


def test_training_saving_and_copying(tmp_path):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    model = network(schedule)
    assert_training_moves_all_but_rho(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    fresh = network()
    fresh.load_weights(tmp_path / "model.weights.h5")
    clone = keras.models.clone_model(model)
    for variable, value in zip(weights(clone), weights(model), strict=True):
        variable.assign(value)
    y = numpy(model(IMAGES))
    for other in (loaded, fresh, clone):
        assert_same(other, model, tolerance=0)
        np.testing.assert_allclose(numpy(other(IMAGES)), y, rtol=1e-5, atol=1e-6)
    for each in (loaded, model):
        fit(each)
    assert_same(loaded, model)


def test_layers_before_they_are_built(tmp_path):
    layer = FusedCBN(layers.Dense(2), CBN(rho=2.0))
    assert copy.deepcopy(layer).get_config() == layer.get_config()
    keras.Sequential([layer]).save(path := tmp_path / "model.keras")
    assert not keras.models.load_model(path).built
    with pytest.raises(ValueError, match="never built"):
        CBN().load_own_variables({"rho": np.ones(())})


@pytest.mark.parametrize("policy", ["mixed_bfloat16", *later("mixed_float16")])
def test_mixed_precision(policy):
    with precision(policy):
        assert_training_moves_all_but_rho(network())


@later_on_jax
def test_images_of_any_size():
    # JAX would compile each operation alone for each size.
    model, other = network(size=None), network(run_eagerly=BACKEND != "jax")
    for samples, *size in [(2, 6, 7), (1, 8, 6)]:
        x = RNG.normal(1, 2, (samples, *size, 2)).astype("float32")
        for each in (model, other):
            each.train_on_batch(x, LABELS[:samples])
        assert_same(model, other)


@tensorflow_only
def test_images_of_one_pixel():
    """TensorFlow would fuse three layers into an operation that it does not have."""
    steps = layers.Conv2D(1024, 3, use_bias=False), CBN(), layers.Activation("tanh")
    model = keras.Sequential([keras.Input((3, 3, 2)), *steps])
    x = np.ones((1024, 3, 3, 2), "float32")
    y = model.predict(x, batch_size=1024, verbose=0)
    np.testing.assert_allclose(y[:2], numpy(model(x[:2])), rtol=1e-5, atol=1e-6)


@not_torch  # where nothing is fused with what the layer computes
@pytest.mark.parametrize(
    "steps",
    [
        [layers.Dense(32, "sigmoid"), CBN(group_size=4), layers.Dense(3)],
        *later(
            [
                layers.Dense(64, "sigmoid"),
                layers.Reshape((4, 4, 4)),
                *(CBN(), layers.Conv2D(3, 3)),
            ],
            [
                layers.Dense(24, "tanh"),
                layers.Reshape((3, 8)),
                *(CBN(group_size=4), layers.Dense(3)),
            ],
        ),
    ],
)
def test_a_compiled_step_is_the_step(steps):
    """XLA may overwrite what the norm reads in another shape while it is still read."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), *steps])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 6)).astype("float32")
    y = rng.normal(size=(16, *model.output_shape[1:])).astype("float32")
    start, found = model.get_weights(), []
    for options in {"jit_compile": True}, {"jit_compile": False, "run_eagerly": True}:
        model.set_weights(start)
        model.compile(keras.optimizers.SGD(1.0), "mse", **options)
        model.fit(x, y, shuffle=False, verbose=0)
        found.append(model.layers[0].get_weights()[0] - start[0])
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-4 * np.abs(found[1]).max())


@torch_only
@pytest.mark.parametrize(
    "name", some(ONE_EACH, ["CBN", "LpNorm(2.5, centered)", "WS(dense)"])
)
def test_pytorch_compiles_what_it_computes(name):
    """An axis may be symbolic, as where layers of a model differ in it."""
    import torch

    layer = FORMS[name].make()
    layer.build(FORMS[name].shape)
    copied = copy.deepcopy(layer)
    compiled = torch.compile(copied, backend="eager", dynamic=True)
    x = torch.tensor(RNG.normal(1, 2, FORMS[name].shape).astype("float32"))
    y, wanted = (numpy(call(x, training=True)) for call in (compiled, layer))
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    assert_same(copied, layer)


@torch_only
@pytest.mark.skipif(
    keras.__version__.startswith(("3.12.", "3.13.")),
    reason="this Keras fixes the batch size, without any norm too",
)
@pytest.mark.parametrize(
    ("cls", "arguments"), [(CBN, ()), (NoisyBN, ()), (LpNorm, (np.inf,))]
)
def test_pytorch_exports_for_batches_of_any_size(cls, arguments):
    import torch

    model = keras.Sequential([keras.Input((6, 6, 2)), cls(*arguments)])
    sizes = (({0: torch.export.Dim("batch", min=2)},),)
    x = (torch.tensor(IMAGES),)
    exported = torch.export.export(model.eval(), x, dynamic_shapes=sizes)
    many = torch.tensor(np.tile(IMAGES, (200, 1, 1, 1)))  # large for a CPU
    np.testing.assert_array_equal(numpy(exported.module()(many)), numpy(model(many)))


@once
@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["numpy", "openvino"])
def test_inference_where_there_are_no_gradients(backend):
    program = "tests.programs.inference"
    printed = run("-m", program, KERAS_BACKEND=backend)
    assert printed.splitlines()[-1] == "works"
