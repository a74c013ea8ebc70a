"""WS, CWN and WN: values and gradients against NumPy, and behaviour as Keras layers."""

import math
import warnings

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, ops

from keras_norms.layers.weight_normalization import CWN, WN, WS
from tests.support.autodiff import (
    BACKEND,
    MODES,
    compiled,
    second_derivative,
    training_step,
)
from tests.support.cbn_reference import finite_differences, relative_error
from tests.support.weight_reference import (
    CASES,
    AsLayer,
    LayerReference,
    WeightReference,
)

tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")
has_float64 = pytest.mark.skipif(
    BACKEND == "jax", reason="float64 is a process-wide switch of JAX"
)
has_channels_first = pytest.mark.skipif(
    BACKEND == "tensorflow", reason="TensorFlow convolves channels last on a CPU"
)

WRAPPERS = {"ws": WS, "cwn": CWN, "wn": WN}
# Of each wrapper, one form with every weight and number in use.
FORMS = {
    "ws": (WS, {"gain": True, "epsilon": 0.1}),
    "cwn": (CWN, {"gain": True, "epsilon": 0.1, "scale": 1.5}),
    "wn": (WN, {"epsilon": 0.1}),
}


# Every layer with one form, and one layer with all.
PAIRS = {(name, list(FORMS)[i % len(FORMS)]) for i, name in enumerate(CASES)}
PAIRS = sorted(PAIRS | {("dense", form) for form in FORMS})
# JAX compiles each operation anew, or all of them at once.
FAST_MODE = "jit_compile" if BACKEND == "jax" else "eager"


def numpy(x):
    return ops.convert_to_numpy(ops.convert_to_tensor(x))


def data(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=rtol, atol=atol)


def assert_same(actual, expected, rtol=1e-5, atol=1e-6):
    """Two lists of weights hold the same numbers."""
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def randomize(layer, seed=0):
    """Give each weight of a layer random values that are not centered at 0."""
    rng = np.random.default_rng(seed)
    for weight in layer.weights:
        weight.assign(rng.normal(0.5, 1.0, weight.shape))


def values_of(layer):
    return {v.name: numpy(v).astype("float64") for v in layer.weights}


def quick_to_build(layer):
    """`layer` without random numbers: JAX compiles a program for each shape of them."""
    for kind in ("kernel", "depthwise", "pointwise"):
        if hasattr(layer, f"{kind}_initializer"):
            setattr(layer, f"{kind}_initializer", keras.initializers.Ones())
    return layer


def made(name, form, seed=0, **kwargs):
    """A wrapper with random weights, and its reference for the input of the case."""
    case, (wrapper, arguments) = CASES[name], FORMS[form]
    layer = wrapper(quick_to_build(case.make(**kwargs)), **arguments)
    layer.build(case.input_shape)
    randomize(layer, seed)
    x = data(*case.input_shape, seed=seed)
    scale = arguments.get("scale", 1.0)
    norm = WeightReference(form, arguments["epsilon"], scale)
    return layer, LayerReference(case, norm, x.astype("float64"))


def kernels_of(layer, mode=FAST_MODE):
    return compiled(layer.normalized_kernels, mode)()


def wrapped(wrapper, layer, shape, **kwargs):
    """A wrapper that is built for inputs of that shape."""
    layer = wrapper(layer, **kwargs)
    layer.build(shape)
    return layer


# Values and derivatives


def quadratic_loss(shape, rng):
    """sum(g * y + h * y^2 / 2), and its derivative with respect to y in NumPy."""
    g, h = rng.normal(size=shape), rng.normal(size=shape)

    def loss(y):
        weights = [ops.convert_to_tensor(v, "float32") for v in (g, h)]
        return ops.sum(weights[0] * y + 0.5 * weights[1] * y * y)

    return loss, lambda y: g + h * y


def of_weights(layer, x):
    """The layer's output as a function of one vector with all trainable weights."""
    shapes = [tuple(v.shape) for v in layer.trainable_variables]
    ends = np.cumsum([math.prod(shape) for shape in shapes])

    def split(vector):
        parts = [vector[end - math.prod(s) : end] for s, end in zip(shapes, ends)]
        reshape = np.reshape if isinstance(vector, np.ndarray) else ops.reshape
        return [reshape(part, shape) for part, shape in zip(parts, shapes)]

    def output(vector):
        return layer.stateless_call(split(vector), [], ops.convert_to_tensor(x))[0]

    weights = [numpy(v).reshape(-1) for v in layer.trainable_variables]
    return AsLayer(output), np.concatenate(weights), split


def check_values_and_derivatives(name, form, mode):
    layer, reference = made(name, form)
    check_gradients(layer, reference, mode)
    check_second_derivative(layer, reference, mode)


def check_gradients(layer, reference, mode):
    weights = values_of(layer)
    kernels = kernels_of(layer, mode)
    wanted = reference.kernels(weights)
    assert kernels.keys() == wanted.keys()
    for key in wanted:
        assert relative_error(kernels[key], wanted[key]) < 1e-5

    expected = reference.forward(weights)
    loss, upstream = quadratic_loss(expected.shape, np.random.default_rng(1))
    step = training_step(layer, loss, mode)
    y, dx, *gradients = step(reference.x.astype("float32"))
    assert y.shape == expected.shape
    assert relative_error(y, expected) < 1e-5
    wanted = reference.gradients(upstream(expected), weights)
    names = [v.name for v in layer.trainable_variables]
    assert sorted(names) == sorted(wanted)
    for key, actual in zip(names, gradients):
        assert relative_error(actual, wanted[key]) < 1e-5
    assert np.all(np.isfinite(dx))


def check_second_derivative(layer, reference, mode):
    """Of the loss, with respect to all weights together."""
    rng = np.random.default_rng(2)
    shape = reference.forward(values_of(layer)).shape
    loss, upstream = quadratic_loss(shape, rng)
    function, vector, split = of_weights(layer, reference.x.astype("float32"))
    names = [v.name for v in layer.trainable_variables]
    direction = rng.normal(size=vector.shape).astype("float32")

    def directional(vector):
        weights = dict(zip(names, split(vector)))
        gradients = reference.gradients(upstream(reference.forward(weights)), weights)
        return sum(
            np.sum(part * gradients[key]) for key, part in zip(names, split(direction))
        )

    expected = finite_differences(directional, vector.astype("float64"))
    actual = second_derivative(function, vector, loss, direction, mode)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_values_and_derivatives(name, form):
    check_values_and_derivatives(name, form, FAST_MODE)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != FAST_MODE])
def test_values_and_derivatives_in_other_modes(mode):
    check_values_and_derivatives("dense" if mode == "eager" else "conv2d", "cwn", mode)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["dense", "conv1d_transpose", "separable_conv1d"])
def test_reference_gradients_are_finite_differences(name, form):
    layer, reference = made(name, form)
    weights = values_of(layer)
    g = data(*reference.forward(weights).shape, seed=3, dtype="float64")
    for key, gradient in reference.gradients(g, weights).items():

        def loss(value, key=key):
            return np.sum(g * reference.forward({**weights, key: value}))

        expected = finite_differences(loss, weights[key])
        assert relative_error(gradient, expected) < 1e-7


# What the formulas promise


TINY = {"epsilon": 1e-12}
SOME = ["dense", "conv1d_transpose", "depthwise_conv2d", "separable_conv1d"]


@pytest.mark.parametrize("name", SOME)
def test_cwn_is_on_the_unit_sphere_and_ws_is_root_n_times_cwn(name):
    case = CASES[name]
    layer = quick_to_build(case.make())
    layer.build(case.input_shape)
    randomize(layer)
    on_sphere = kernels_of(wrapped(CWN, layer, case.input_shape, **TINY))
    standard = kernels_of(wrapped(WS, layer, case.input_shape, **TINY))
    for key, axes in case.fan_in.items():
        kernel = numpy(on_sphere[key])
        n = math.prod(kernel.shape[i] for i in axes)
        units = kernel.sum(axes).shape
        assert_close(np.sum(kernel**2, axes), np.ones(units))
        assert_close(np.sum(kernel, axes), np.zeros(units))
        assert_close(standard[key], np.sqrt(n) * kernel)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_wn_changes_nothing_at_the_start(name, trained):
    case = CASES[name]
    layer, x = case.make(activation="tanh"), data(*case.input_shape)
    if trained:
        layer.build(x.shape)
        randomize(layer)
    wrapper = wrapped(WN, layer, x.shape, epsilon=0.1)
    assert_close(wrapper(x), layer(x), rtol=1e-6)
    for key, kernel in wrapper.normalized_kernels().items():
        assert_close(kernel, getattr(layer, key), rtol=1e-6, atol=1e-7)


def dense_gradient(layer, x, g):
    """The gradient of sum(g * y) by the kernel of a wrapped Dense layer."""
    step = training_step(layer, lambda y: ops.sum(ops.convert_to_tensor(g) * y))
    gradients = dict(zip([v.name for v in layer.trainable_variables], step(x)[2:]))
    return gradients["kernel"]


@pytest.mark.parametrize("wrapper", WRAPPERS.values())
def test_the_gradient_is_orthogonal_to_the_weights(wrapper):
    layer = wrapped(wrapper, layers.Dense(3), (None, 4), **TINY)
    randomize(layer)
    gradient = dense_gradient(layer, data(5, 4), data(5, 3, seed=1))
    kernel = numpy(layer.layer.kernel)
    size = np.linalg.norm(kernel, axis=0) * np.linalg.norm(gradient, axis=0)
    assert np.all(np.abs(np.sum(kernel * gradient, 0)) < 1e-6 * size)
    if wrapper is not WN:
        assert np.all(np.abs(gradient.sum(0)) < 1e-6 * np.abs(gradient).sum(0))


@pytest.mark.parametrize("wrapper", [WS, CWN])
def test_outputs_do_not_depend_on_size_and_mean_of_the_weights(wrapper):
    layer = wrapped(wrapper, layers.Dense(3), (None, 4), **TINY)
    randomize(layer)
    before = numpy(layer(data(5, 4)))
    kernel = layer.layer.kernel
    kernel.assign(3.0 * numpy(kernel) + 0.7)
    assert_close(layer(data(5, 4)), before)


@pytest.mark.parametrize("size", [1e-18, 1e-9, 1.0, 1e9, 1e18])
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_any_size(form, size):
    layer, reference = made("dense", form)
    weights = values_of(layer)
    layer.layer.kernel.assign(weights["kernel"] * size)
    weights = values_of(layer)
    expected = reference.kernels(weights)["kernel"]
    assert relative_error(layer.normalized_kernels()["kernel"], expected) < 1e-5
    g = data(5, 3, seed=1)
    gradient = dense_gradient(layer, reference.x.astype("float32"), g)
    wanted = reference.gradients(g, weights)["kernel"]
    if size < 1e9:
        assert relative_error(gradient, wanted) < 1e-5
    else:  # Where epsilon counts for less than rounding, the rest is a difference.
        assert relative_error(gradient * size, wanted * size) < 1e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [0.0, 0.3, 1e15])
def test_units_whose_weights_are_equal(form, value):
    layer, reference = made("dense", form)
    weights = values_of(layer)
    weights["kernel"][:, 1] = value
    layer.layer.kernel.assign(weights["kernel"])
    kernel = numpy(layer.normalized_kernels()["kernel"])
    if form != "wn":
        assert np.all(kernel[:, 1] == 0)
    expected = reference.kernels(values_of(layer))["kernel"]
    assert_close(kernel, expected)
    gradient = dense_gradient(layer, data(5, 4), data(5, 3, seed=1))
    assert np.all(np.isfinite(gradient))


@settings(max_examples=3 if BACKEND == "jax" else 15, deadline=None)
@given(draw=st.data())
def test_any_layer_is_called_with_its_normalized_kernels(draw):
    """Shapes, arguments and dtypes that no other test has."""
    numbers = st.integers(1, 3)
    rank, inputs, outputs = draw.draw(numbers), draw.draw(numbers), draw.draw(numbers)
    size = [draw.draw(st.integers(2, 3)) for _ in range(rank)]
    kinds = ["Dense", f"Conv{rank}D", f"Conv{rank}DTranspose"]
    kinds += [f"DepthwiseConv{rank}D", f"SeparableConv{rank}D"] * (rank < 3)
    kind = draw.draw(st.sampled_from(kinds))
    arguments = {"use_bias": draw.draw(st.booleans())}
    if kind != "Dense":
        arguments["kernel_size"] = size
        arguments["padding"] = draw.draw(st.sampled_from(["valid", "same"]))
    if not kind.startswith("Depthwise"):
        arguments["units" if kind == "Dense" else "filters"] = outputs
    if kind.startswith(("Depthwise", "Separable")):
        arguments["depth_multiplier"] = draw.draw(numbers)
    form = draw.draw(st.sampled_from(sorted(FORMS)))
    wrapper, of_form = FORMS[form]
    x = data(2, *[n + 1 for n in size], inputs + 1)
    layer = quick_to_build(getattr(layers, kind)(**arguments))
    layer = wrapped(wrapper, layer, x.shape, **of_form)
    randomize(layer)

    kernels = kernels_of(layer)
    norm = WeightReference(form, of_form["epsilon"], of_form.get("scale", 1.0))
    for key, value in kernels.items():
        # Written again from the words of the specification.
        axes = {
            "Dense": (0,),
            f"Conv{rank}D": tuple(range(rank + 1)),
            f"Conv{rank}DTranspose": (*range(rank), rank + 1),
        }.get(kind, tuple(range(rank)))
        axes = tuple(range(rank + 1)) if key == "pointwise_kernel" else axes
        weight = numpy(getattr(layer.layer, key)).astype("float64")
        gain = numpy(layer.gains[key]).astype("float64")
        assert relative_error(value, norm.forward(weight, gain, axes)) < 1e-5

    plain = quick_to_build(getattr(layers, kind)(**arguments))
    plain.build(x.shape)
    for key, value in kernels.items():
        getattr(plain, key).assign(value)
    if plain.use_bias:
        plain.bias.assign(layer.layer.bias)
    y, expected = (compiled(f, FAST_MODE)(x) for f in (layer, plain))
    assert_close(y, expected)
    assert tuple(layer.compute_output_shape(x.shape)) == tuple(expected.shape)


# Configuration, shapes and models


ARGUMENTS = {
    "ws": {"gain": True, "epsilon": 1e-3},
    "cwn": {
        "scale": 2.0,
        "gain": True,
        "gain_initializer": keras.initializers.Constant(0.5),
        "epsilon": 1e-3,
    },
    "wn": {"epsilon": 1e-3},
}


@pytest.mark.parametrize("form", WRAPPERS)
def test_config_round_trip(form):
    wrapper, arguments = WRAPPERS[form], ARGUMENTS[form]
    inner = layers.Conv2D(4, 3, activation="relu", dtype="mixed_bfloat16")
    layer = wrapper(inner, name="custom", trainable=False, **arguments)
    config = layer.get_config()
    default = wrapper(layers.Conv2D(4, 3)).get_config()
    assert all(config[name] != default[name] for name in arguments)
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(layer)
    )
    assert type(again) is wrapper
    assert again.get_config() == config
    assert again.layer.get_config() == inner.get_config()
    assert wrapper.from_config(config).name == wrapper.from_config(config).name


@pytest.mark.parametrize("wrapper", WRAPPERS.values())
def test_registered_name(wrapper):
    name = keras.saving.get_registered_name(wrapper)
    assert name == f"keras_norms>{wrapper.__name__}"


@pytest.mark.parametrize("name", CASES)
def test_shapes(name):
    case = CASES[name]
    layer = WN(quick_to_build(case.make()))
    symbolic = layer(keras.Input(case.input_shape[1:]))
    kernels = {key: np.ones(getattr(layer.layer, key).shape) for key in case.fan_in}
    expected = case.output(np.ones(case.input_shape), kernels, 0.0).shape
    assert tuple(symbolic.shape) == (None, *expected[1:])
    assert tuple(layer.compute_output_shape(case.input_shape)) == expected
    assert {key: tuple(gain.shape) for key, gain in layer.gains.items()} == {
        key: tuple(np.delete(kernels[key].shape, axes))
        for key, axes in case.fan_in.items()
    }


def test_dynamic_sizes():
    inputs = keras.Input((None, None, 2))
    layer = WS(layers.Conv2D(3, 2))
    model = keras.Model(inputs, layers.GlobalMaxPooling2D()(layer(inputs)))
    model.compile("sgd", "mse")
    for size in [(2, 4, 5), (3, 6, 2)]:
        x = data(*size, 2)
        expected = numpy(layer(x)).max((1, 2))
        assert_close(model.predict_on_batch(x), expected)
        model.train_on_batch(x, np.zeros((size[0], 3)))


def test_weights_by_name():
    def names(layer):
        layer = wrapped(type(layer), layer.layer, (None, 4), **layer_arguments(layer))
        return [v.name for v in layer.trainable_weights]

    def layer_arguments(layer):
        return {"gain": layer.gain} if hasattr(layer, "gain") else {}

    assert names(WS(layers.Dense(3))) == ["kernel", "bias"]
    assert names(CWN(layers.Dense(3))) == ["kernel", "bias"]
    assert names(WS(layers.Dense(3), gain=True)) == ["gain", "kernel", "bias"]
    assert names(CWN(layers.Dense(3), gain=True)) == ["gain", "kernel", "bias"]
    assert names(WN(layers.Dense(3))) == ["gain", "kernel", "bias"]


def test_gain_initializers():
    shape = (None, 4)
    assert_close(
        wrapped(WS, layers.Dense(3), shape, gain=True).gains["kernel"], [1] * 3
    )
    arguments = {"gain": True, "gain_initializer": keras.initializers.Constant(0.5)}
    layer = wrapped(CWN, layers.Dense(3), shape, scale=4.0, **TINY, **arguments)
    assert_close(layer.gains["kernel"], [0.5] * 3)
    kernel = numpy(layer.normalized_kernels()["kernel"])
    assert_close(np.sum(kernel**2, 0), [4.0] * 3)


IMAGES = data(8, 6, 6, 2)
LABELS = np.arange(8) % 2


def network(*every_kind, **compile_arguments):
    """A network of wrapped layers, with every kind of them for images if asked."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            WS(layers.Conv2D(3, 3, padding="same", activation="relu"), gain=True),
            *every_kind,
            layers.GlobalAveragePooling2D(),
            CWN(layers.Dense(4, activation="tanh"), scale=2.0),
            WN(layers.Dense(2)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, **compile_arguments)
    return model


def fit(model, epochs=2):
    model.fit(IMAGES, LABELS, 4, epochs, shuffle=False, verbose=0)
    return model


def test_fit_trains_everything():
    model = network(
        CWN(layers.DepthwiseConv2D(3, depth_multiplier=2), gain=True),
        WN(layers.SeparableConv2D(4, 2, activation="tanh")),
        WS(layers.Conv2DTranspose(3, 2, strides=2)),
        layers.Reshape((6, 6, 3)),
        CWN(layers.EinsumDense("abcd,de->abce", (6, 6, 5), bias_axes="e")),
    )
    before = model.get_weights()
    history = model.fit(IMAGES, LABELS, 4, 4, shuffle=False, verbose=0).history
    after = model.get_weights()
    assert len(model.trainable_weights) == len(before)
    assert all(np.any(a != b) for a, b in zip(before, after))
    assert history["loss"][-1] < history["loss"][0]


@tensorflow_only
def test_jit_compile_changes_nothing():
    def trained_weights(jit_compile):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                WS(layers.Dense(5, activation="tanh"), gain=True),
                CWN(layers.Dense(4, activation="tanh")),
                WN(layers.Dense(3)),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
        model.fit(data(8, 4), data(8, 3, seed=1), 4, 2, shuffle=False, verbose=0)
        return model.get_weights()

    assert_same(trained_weights(True), trained_weights(False))


def test_a_call_leaves_the_stored_kernel_alone():
    layer, reference = made("separable_conv1d", "wn")
    before = layer.get_weights()
    layer(reference.x, training=True)
    assert_same(layer.get_weights(), before, rtol=0, atol=0)


@pytest.fixture(scope="module")
def trained():
    return fit(network())


def test_saved_models_hold_the_stored_kernels(tmp_path, trained):
    trained.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(loaded.get_weights(), trained.get_weights(), rtol=0, atol=0)
    assert_close(loaded(IMAGES), trained(IMAGES))


def test_saved_weights(tmp_path, trained):
    other = network()
    trained.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same(other.get_weights(), trained.get_weights(), rtol=0, atol=0)
    assert_close(other.layers[0].layer.kernel, trained.layers[0].layer.kernel)


def test_clone_model(trained):
    clone = keras.models.clone_model(trained)
    clone.set_weights(trained.get_weights())
    assert_close(clone(IMAGES), trained(IMAGES))
    assert clone.layers[2].scale == 2.0


def test_a_layer_may_be_called_twice():
    layer, inputs = WS(layers.Dense(3)), keras.Input((4,))
    model = keras.Model(inputs, layer(inputs) + layer(2 * inputs))
    model.compile("sgd", "mse")
    assert len(model.weights) == 2
    x = data(5, 4)
    assert_close(model(x), numpy(layer(x)) + numpy(layer(2 * x)))
    model.fit(x, data(5, 3), verbose=0)


@pytest.mark.parametrize("time", [3, None])
def test_inside_of_time_distributed(time):
    x = data(2, 3, 4)
    layer = CWN(layers.Dense(5), gain=True)
    model = keras.Sequential(
        [keras.Input((time, 4)), layers.TimeDistributed(layer), layers.Dense(1)]
    )
    expected = numpy(layer(x.reshape(6, 4))).reshape(2, 3, 5)
    assert_close(model.layers[0](x), expected)
    model.compile("sgd", "mse")
    model.fit(x, data(2, 3, 1), verbose=0)


def test_inside_of_a_subclassed_model():
    """Its layers are built in a scope in which weights have no values yet."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = WN(layers.Dense(3, kernel_initializer="random_normal"))

        def call(self, x):
            return self.norm(x)

    model = Model()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x = data(5, 4)
    model.fit(x, data(5, 3), verbose=0)
    kernel = model.norm.layer.kernel
    length = np.sqrt(np.sum(numpy(kernel) ** 2, 0) + 1e-5)
    assert_close(model.norm.gains["kernel"], length)
    assert_close(model.norm.normalized_kernels()["kernel"], kernel)
    assert_close(model(x), model.norm.layer(x))


# The wrapped layer


def test_regularizers_count_once_and_act_on_the_stored_kernel():
    x, y = data(5, 4), np.zeros((5, 3))
    layer = WS(layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.25)))
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    randomize(layer)
    kernel = numpy(layer.layer.kernel)
    layer.layer.bias.assign(np.zeros(3))
    assert [numpy(v) for v in layer.losses] == [
        pytest.approx(0.25 * np.sum(kernel**2), rel=1e-5)
    ]
    error = np.mean(numpy(layer(x)) ** 2)
    expected = pytest.approx(error + 0.25 * np.sum(kernel**2), rel=1e-5)
    assert model.evaluate(x, y, verbose=0) == expected
    assert model.train_on_batch(x, y) == expected

    # Without data, decay is what is left of the gradient.
    layer.layer.kernel.assign(kernel)
    layer.layer.bias.assign(np.zeros(3))
    model.train_on_batch(np.zeros((5, 4)), y)
    assert_close(layer.layer.kernel, kernel * (1 - 0.1 * 2 * 0.25))


def test_constraints_act_on_the_stored_kernel():
    layer = CWN(layers.Dense(3, kernel_constraint=keras.constraints.NonNeg()))
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(data(5, 4), data(5, 3), verbose=0)
    assert np.all(numpy(layer.layer.kernel) >= 0)
    assert np.any(numpy(layer.normalized_kernels()["kernel"]) < 0)


def test_activity_regularizers():
    x = data(5, 4)
    layer = WS(layers.Dense(3, activity_regularizer=keras.regularizers.L1(0.5)))
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", "mse")
    y = numpy(layer(x))
    expected = 0.5 * np.abs(y).sum() / 5
    assert [numpy(v) for v in layer.losses] == [pytest.approx(expected, rel=1e-5)]
    layer(x)
    assert len(layer.losses) == 1
    assert model.evaluate(x, y, verbose=0) == pytest.approx(expected, rel=1e-4)
    assert model.train_on_batch(x, y) == pytest.approx(expected, rel=1e-4)


@keras.saving.register_keras_serializable(package="tests")
class Noisy(layers.Dense):
    """A Dense layer with all that a layer may do in a call besides."""

    def __init__(self, units, **kwargs):
        super().__init__(units, **kwargs)
        self.seed_generator = keras.random.SeedGenerator(3)
        self.metric = keras.metrics.Sum()

    def build(self, input_shape):
        self.calls = self.add_weight(
            name="calls", shape=(), initializer="zeros", trainable=False, autocast=False
        )
        super().build(input_shape)

    def call(self, inputs, training=False, mask=None):
        outputs = super().call(inputs)
        if mask is not None:
            outputs = outputs * ops.cast(mask, outputs.dtype)[:, None]
        if not training:
            return outputs
        self.calls.assign_add(1.0)
        if BACKEND != "jax":  # Its trainer has no metrics inside of layers.
            self.metric.update_state(ops.sum(inputs))
        self.add_loss(ops.mean(outputs))
        noise = keras.random.normal(ops.shape(outputs), seed=self.seed_generator)
        return outputs + ops.cast(noise, outputs.dtype)


def test_the_state_and_the_losses_of_a_derived_layer():
    x = data(5, 4)
    layer = WS(Noisy(3))
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    quiet = numpy(layer(x))
    noisy = [numpy(layer(x, training=True)) for _ in range(2)]
    assert np.abs(noisy[0] - noisy[1]).max() > 0.1
    assert len(layer.losses) == 1
    assert_close(layer.losses[0], quiet.mean(), atol=1e-5)
    model.fit(np.concatenate([x, x]), np.zeros((10, 3)), 5, verbose=0)
    assert_close(layer.layer.calls, 4.0)
    if BACKEND != "jax":  # The trainer has reset it before.
        assert_close(layer.layer.metric.result(), 2 * x.sum(), rtol=1e-4)
    loss = model.train_on_batch(x, quiet)
    assert 0.3 < np.ravel(loss)[0] - quiet.mean() < 3.0
    assert_close(layer(x), quiet)


def test_a_derived_layer_may_use_the_weights_of_another():
    keras.utils.set_random_seed(0)
    first = layers.Dense(4)

    class Tied(layers.Dense):
        def call(self, inputs):
            return ops.matmul(super().call(inputs), first.kernel)

    model = keras.Sequential([keras.Input((4,)), first, WS(Tied(4)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    x, y = data(5, 4), data(5, 1)
    losses = [model.train_on_batch(x, y) for _ in range(2)]
    history = model.fit(x, y, epochs=2, verbose=0).history["loss"]
    assert losses[0] > losses[1] > history[0] > history[1]


def test_masks_reach_a_derived_layer():
    x, mask = data(3, 4), np.array([True, False, True])
    layer = WS(Noisy(2))
    y, masked = numpy(layer(x)), numpy(layer(x, mask=mask))
    assert_close(masked, y * mask[:, None])


def test_masks_go_on_to_the_next_layer():
    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    inputs = keras.Input((3,), dtype="int32")
    x = WN(layers.Dense(2))(layers.Embedding(4, 5, mask_zero=True)(inputs))
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(x))
    y = numpy(keras.Model(inputs, x)(tokens))
    assert_close(model(tokens), np.stack([y[0, :2].mean(0), y[1, 0]]))
    # Also while the model is made.
    assert tuple(keras.Model(inputs, x).output._keras_mask.shape) == (None, 3)


def test_a_mask_ends_where_the_wrapped_layer_ends_it():
    embedding = layers.Embedding(4, 5, mask_zero=True)
    x = embedding(np.array([[1, 2, 0], [3, 0, 0]]))
    layer = wrapped(WS, layers.Conv1D(2, 2), (None, 3, 5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = layer(x)
    assert getattr(y, "_keras_mask", None) is None
    assert sum("destroy the mask" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize("where", ["wrapper", "layer", "argument", "before build"])
def test_frozen_kernels_stay_and_are_normalized(where):
    x = data(5, 4)
    inner = layers.Dense(3)
    layer = CWN(inner, gain=True, trainable=where != "argument")
    if where == "before build":
        inner.trainable = False
    model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(3)])
    if where in ("wrapper", "layer"):
        (layer if where == "wrapper" else inner).trainable = False
    names = [v.path for v in model.trainable_weights]
    frozen_gain = where in ("wrapper", "argument")
    assert len(names) == (2 if frozen_gain else 3), names
    before, expected = numpy(inner.kernel), numpy(layer(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, data(5, 3), verbose=0)
    assert_close(inner.kernel, before, rtol=0, atol=0)
    assert np.abs(expected - numpy(inner(x))).max() > 0.01
    if frozen_gain:
        assert_close(layer(x), expected, rtol=0, atol=0)


# Precision


POLICIES = [("mixed_float16", 2e-3), ("mixed_bfloat16", 2e-2)]


@pytest.mark.parametrize(("policy", "tolerance"), POLICIES)
@pytest.mark.parametrize("inside_of_a_model", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_mixed_precision(form, policy, tolerance, inside_of_a_model):
    """Half precision cannot hold this kernel: 100 plus digits that count."""
    wrapper, arguments = FORMS[form]
    layer = wrapper(layers.Dense(3, dtype=policy), **arguments)
    exact = wrapper(layers.Dense(3), **arguments)
    call = layer
    if inside_of_a_model:
        call = keras.Sequential([keras.Input((4,)), layer])
        call.dtype_policy = keras.dtype_policies.get(policy)
    for each in (layer, exact):
        if not each.built:
            each.build((None, 4))
        randomize(each)
        each.layer.kernel.assign(100 + 0.1 * data(4, 3))
    x = numpy(ops.cast(ops.cast(data(5, 4), layer.compute_dtype), "float32"))
    y = call(x)
    assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
    assert layer.compute_dtype == policy.removeprefix("mixed_")
    assert_close(ops.cast(y, "float32"), exact(x), tolerance, tolerance)
    kernels = [each.normalized_kernels()["kernel"] for each in (layer, exact)]
    assert_close(*kernels, rtol=1e-6)
    assert {keras.backend.standardize_dtype(v.dtype) for v in layer.weights} == {
        "float32"
    }


def test_fit_in_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
        before = model.get_weights()
        after = fit(model, epochs=1).get_weights()
    finally:
        keras.config.set_dtype_policy("float32")
    assert all(w.dtype == "float32" and np.all(np.isfinite(w)) for w in after)
    assert all(np.any(a != b) for a, b in zip(before, after))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float16", 1e-3), pytest.param("float64", 1e-13, marks=has_float64)],
)
def test_other_dtypes(form, dtype, tolerance):
    """Weights in float16 are normalised in float32, in float64 in float64."""
    layer, reference = made("conv2d", form, dtype=dtype)
    layer.layer.kernel.assign(1e3 * numpy(layer.layer.kernel))
    expected = reference.kernels(values_of(layer))["kernel"]
    kernel = layer.normalized_kernels()["kernel"]
    assert keras.backend.standardize_dtype(kernel.dtype) == dtype
    assert relative_error(kernel, expected) < tolerance

    plain = reference.case.make(dtype=dtype)
    plain.build(reference.x.shape)
    plain.kernel.assign(kernel)
    plain.bias.assign(layer.layer.bias)
    y = layer(reference.x)
    assert keras.backend.standardize_dtype(y.dtype) == dtype
    assert relative_error(y, numpy(plain(reference.x))) < 1e-15


def test_mixed_precision_keeps_the_state_of_a_derived_layer():
    """A counter of 4096 calls would stay as it is in bfloat16."""
    layer = wrapped(WS, Noisy(3, dtype="mixed_bfloat16"), (None, 4))
    layer.layer.calls.assign(4096.0)
    layer(data(5, 4), training=True)
    assert_close(layer.layer.calls, 4097.0, rtol=0)


# WN from trained weights and from data


def test_reset_gain():
    layer = wrapped(WN, layers.SeparableConv1D(3, 3), (None, 6, 2))
    for seed, key in enumerate(("depthwise_kernel", "pointwise_kernel")):
        weight = getattr(layer.layer, key)
        weight.assign(data(*weight.shape, seed=seed))
    kernels = layer.normalized_kernels()
    assert (
        np.abs(numpy(kernels["depthwise_kernel"] - layer.layer.depthwise_kernel)).max()
        > 0.1
    )
    layer.reset_gain()
    for key, kernel in layer.normalized_kernels().items():
        assert_close(kernel, getattr(layer.layer, key))


def statistics(y, units):
    others = tuple(i for i in range(y.ndim) if i not in [u % y.ndim for u in units])
    return y.mean(others), y.std(others)


@pytest.mark.parametrize(
    ("name", "built"),
    [(name, False) for name in CASES if name in SOME or "einsum" in name]
    + [(name, True) for name in SOME],
)
def test_data_init(name, built):
    case = CASES[name]
    layer = WN(case.make(activation="relu"))
    x = 3 * data(7, *case.input_shape[1:]) + 1
    if built:
        layer.build(x.shape)
        randomize(layer)
    kernels = {key: numpy(getattr(layer.layer, key)) for key in case.fan_in if built}
    layer.data_init(x)
    for key, kernel in kernels.items():
        assert_close(getattr(layer.layer, key), kernel, rtol=0, atol=0)
    y = case.output(
        x.astype("float64"),
        {k: numpy(v) for k, v in layer.normalized_kernels().items()},
        numpy(layer.layer.bias),
    )
    mean, deviation = statistics(y, case.units)
    assert_close(mean, np.zeros(mean.shape), atol=1e-5)
    assert_close(deviation, np.ones(mean.shape), atol=1e-5)
    assert layer.layer.activation is keras.activations.relu
    assert_close(layer(x), np.maximum(y, 0), atol=1e-5)


@has_channels_first
def test_data_init_with_channels_first():
    layer = WN(layers.Conv2D(3, 2, data_format="channels_first"))
    x = 3 * data(7, 2, 4, 5) + 1
    layer.data_init(x)
    mean, deviation = statistics(numpy(layer(x)), (1,))
    assert_close(mean, np.zeros(3), atol=1e-5)
    assert_close(deviation, np.ones(3), atol=1e-5)


def test_data_init_where_the_activation_is_a_layer():
    activation = layers.LeakyReLU()
    layer = WN(layers.Dense(3, activation=activation))
    x = data(20, 4)
    layer.data_init(x)
    assert layer.layer.activation is activation
    y = numpy(layer(x))
    y = np.where(y < 0, y / 0.3, y)
    assert_close(y.std(0), np.ones(3), atol=1e-5)


def test_data_init_counts_no_call():
    layer = WN(Noisy(3))
    layer.data_init(data(20, 4))
    assert_close(layer.layer.calls, 0.0)
    assert layer.losses == []


@pytest.mark.parametrize(
    "layer",
    [layers.Dense(3, use_bias=False), layers.EinsumDense("abc,cd->abd", (None, 3))],
)
def test_data_init_needs_a_bias(layer):
    with pytest.raises(ValueError, match="has no bias.*use_bias=True"):
        WN(layer).data_init(data(5, 6, 4))


def test_data_init_needs_a_bias_for_each_unit():
    layer = WN(layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="e"))
    with pytest.raises(ValueError, match="bias_axes.*Received.*bias_axes='e'"):
        layer.data_init(data(5, 6, 4))


def test_data_init_accepts_more_biases_than_units():
    layer = WN(layers.EinsumDense("abc,cd->abd", (6, 3), bias_axes="bd"))
    x = 2 * data(5, 6, 4) + 1
    layer.data_init(x)
    mean, deviation = statistics(numpy(layer(x)), (2,))
    assert_close(mean, np.zeros(3), atol=1e-5)
    assert_close(deviation, np.ones(3), atol=1e-5)


def test_data_init_needs_data_that_vary():
    layer = WN(layers.Dense(3))
    with pytest.raises(ValueError, match="vary.*x.shape=.1, 4.*3 of 3 units"):
        layer.data_init(data(1, 4))
    layer.layer.kernel.assign(np.eye(4, 3))
    before = layer.get_weights()
    with pytest.raises(ValueError, match="1 of 3 units"):
        layer.data_init(data(5, 4) * [1, 0, 1, 1])
    assert_same(layer.get_weights(), before, rtol=0, atol=0)


# Wrong arguments


NOT_LAYERS = [None, "dense", 3, layers.Dense, [layers.Dense(3)]]
WITHOUT_KERNEL = [
    layers.Embedding(4, 5),
    layers.BatchNormalization(),
    layers.Activation("relu"),
    layers.LSTM(3),
    layers.SimpleRNNCell(3),
    layers.MultiHeadAttention(2, 3),
]


@pytest.mark.parametrize("wrapper", WRAPPERS.values())
@pytest.mark.parametrize("layer", NOT_LAYERS + WITHOUT_KERNEL, ids=repr)
def test_layers_without_a_kernel_are_refused(wrapper, layer):
    with pytest.raises(ValueError, match="`layer`.*Dense.*kernel") as error:
        wrapper(layer)
    assert str(error.value).endswith(f"Received: layer={layer!r}")


@pytest.mark.parametrize(
    "make",
    [
        lambda: WS(layers.Dense(3)),
        lambda: WN(layers.Dense(3)),
        lambda: layers.SpectralNormalization(layers.Dense(3)),
        lambda: layers.TimeDistributed(layers.Dense(3)),
    ],
)
def test_wrappers_are_refused(make):
    with pytest.raises(ValueError, match="not a wrapper. Wrap the layer inside"):
        CWN(make())


def test_models_are_refused():
    model = keras.Sequential([layers.Dense(3)])
    with pytest.raises(ValueError, match="not a model. Wrap its layers one by one"):
        WS(model)


def with_lora():
    layer = layers.Dense(3)
    layer.build((None, 4))
    layer.enable_lora(2)
    return layer


def quantized():
    layer = layers.Dense(3)
    layer.build((None, 4))
    layer.quantize("int8")
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_lora, "LoRA.*lora_rank=2.*Leave it unwrapped"),
        (lambda: layers.Conv2D(3, 2, lora_rank=1), "LoRA.*lora_rank=1"),
        (quantized, "quantized.*int8.*normalized_kernels"),
        (lambda: layers.Dense(3, dtype="int8_from_float32"), "quantized.*int8"),
    ],
)
def test_layers_whose_kernel_is_no_single_weight_are_refused(make, message):
    with pytest.raises(ValueError, match=f"`layer`.*{message}"):
        WS(make())


class Halved(layers.Dense):
    @property
    def kernel(self):
        return self._kernel / 2


@pytest.mark.parametrize("wrapper", WRAPPERS.values())
def test_a_class_that_overrides_the_kernel_is_refused(wrapper):
    with pytest.raises(ValueError, match="overrides the kernel.*Received: layer="):
        wrapper(Halved(3))


class Doubled(layers.Dense):
    def call(self, inputs):
        return 2 * super().call(inputs)


def test_a_class_that_overrides_call_reads_the_normalised_kernel():
    x = data(5, 4)
    layer = WN(Doubled(3))
    y = numpy(layer(x))
    assert_close(y, layer.layer(x))
    layer.gains["kernel"].assign(3 * layer.gains["kernel"])
    assert_close(layer(x), 3 * y)
    before = layer.get_weights()
    with pytest.raises(ValueError, match="Doubled, overrides `call`"):
        layer.data_init(3 * x + 1)
    assert_same(layer.get_weights(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: layer.enable_lora(2), "changed after.*LoRA"),
        (lambda layer: layer.quantize("int8"), "changed after.*quantized"),
    ],
)
def test_a_kernel_that_is_no_single_weight_any_more_is_refused(change, message):
    layer = wrapped(WN, layers.Dense(3), (None, 4))
    change(layer.layer)
    for use in (lambda: layer(data(5, 4)), layer.normalized_kernels, layer.reset_gain):
        with pytest.raises(ValueError, match=message):
            use()


@pytest.mark.parametrize("wrapper", [WS, CWN])
@pytest.mark.parametrize(
    ("layer", "shape", "name"),
    [
        (layers.Dense(3), (None, 1), "kernel"),
        (layers.DepthwiseConv2D(1), (None, 4, 4, 3), "kernel"),
        (layers.SeparableConv1D(3, 1), (None, 6, 2), "depthwise_kernel"),
        (layers.SeparableConv1D(3, 2), (None, 6, 1), "pointwise_kernel"),
        (layers.EinsumDense("ab,b->ab", 4), (None, 4), "kernel"),
    ],
)
def test_a_unit_with_one_weight_is_refused(wrapper, layer, shape, name):
    layer = quick_to_build(type(layer).from_config(layer.get_config()))
    with pytest.raises(ValueError, match=f"`{name}`.*Use WN.*{name}.shape="):
        wrapper(layer).build(shape)


def test_wn_takes_units_with_one_weight():
    for layer, shape in [
        (layers.DepthwiseConv2D(1, depth_multiplier=2), (2, 4, 4, 3)),
        (layers.EinsumDense("ab,b->ab", 4), (2, 4)),
    ]:
        wrapper = WN(layer)
        assert_close(wrapper(data(*shape)), layer(data(*shape)))


def refusal(name, value, wrapper=WN):
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        wrapper(layers.Dense(3), **{name: value})
    assert f"Received: {name}={value!r}" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("wrapper", WRAPPERS.values())
@pytest.mark.parametrize("value", [0, -1e-5, None, "1", True, np.nan, np.inf], ids=repr)
def test_epsilon_must_be_positive(wrapper, value):
    assert "positive" in refusal("epsilon", value, wrapper)


@pytest.mark.parametrize("value", [0, -1.0, None, True, np.nan], ids=repr)
def test_scale_must_be_positive(value):
    assert "positive" in refusal("scale", value, CWN)


@pytest.mark.parametrize("wrapper", [WS, CWN])
@pytest.mark.parametrize("value", [None, 1, "yes"], ids=repr)
def test_gain_must_be_boolean(wrapper, value):
    assert "True or False" in refusal("gain", value, wrapper)


@pytest.mark.parametrize("wrapper", WRAPPERS.values())
def test_a_dtype_of_its_own_is_that_of_inputs_and_outputs(wrapper):
    x = data(5, 4)
    layer = wrapper(layers.Dense(3))
    assert layer.dtype_policy == layer.layer.dtype_policy
    y = layer(x.astype("float16"))
    layer = wrapper(layer.layer, dtype="float16")
    half = layer(x)
    assert keras.backend.standardize_dtype(half.dtype) == "float16"
    assert layer.layer.compute_dtype == "float32"
    assert {weight.dtype for weight in layer.weights} == {"float32"}
    assert_close(half, y, rtol=1e-3, atol=1e-3)


def test_weights_are_there_after_build_only():
    layer = WN(layers.Dense(3))
    for use in (layer.normalized_kernels, layer.reset_gain):
        with pytest.raises(ValueError, match="`build`"):
            use()


def test_an_input_that_does_not_fit_is_refused():
    layer = wrapped(WS, layers.Dense(3), (None, 4))
    with pytest.raises(ValueError, match="incompatible with the layer"):
        layer(keras.Input((5,)))
