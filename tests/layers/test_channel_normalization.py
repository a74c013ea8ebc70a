"""What every layer of channel statistics does as a Keras layer."""

import functools
import inspect
import json

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_norms import CBN, LpNorm, NoisyBN
from tests.support.autodiff import BACKEND, MODES, training_step

# Noise depends on the position: without it, elements can be compared.
quiet_bn = functools.partial(
    NoisyBN, mean_range=0, scale_range=1, mean_jitter=0, scale_jitter=0
)
# A layer is made by LAYERS[name](**arguments). What is not tested here of CBN is tested
# in `test_cbn_layer`.
LAYERS = {
    "NoisyBN": quiet_bn,
    "LpNorm(2)": LpNorm,
    "LpNorm(3, centered)": functools.partial(LpNorm, 3, norm_of="centered"),
    "LpNorm(inf)": functools.partial(LpNorm, np.inf),
}
CLASSES = {
    CBN: {
        "rho": 0.5,
        "omega": 3.0,
        "decouple": False,
        "mean_gradient": "ratio",
        "moving_square_initializer": "zeros",
    },
    NoisyBN: {
        "mean_range": 0.7,
        "scale_range": 1.5,
        "mean_jitter": 0.2,
        "scale_jitter": 0.3,
        "noise_at_inference": True,
        "seed": 7,
        "moving_variance_initializer": "zeros",
    },
    LpNorm: {
        "p": 1.5,
        "norm_of": "centered",
        "moving_norm_initializer": keras.initializers.Constant(2),
    },
}
EVERY_LAYER = [*LAYERS.values(), functools.partial(NoisyBN, seed=1)]
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
# The noise too.
every_layer = pytest.mark.parametrize("make", EVERY_LAYER, ids=[*LAYERS, "noise"])
classes = pytest.mark.parametrize("cls", CLASSES)
# Compiled where there is a compiler: eagerly, JAX compiles each operation.
COMPILED = MODES[1:] or MODES


def data(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2 + 1).astype("float32")


def numpy(x):
    return ops.convert_to_numpy(ops.convert_to_tensor(x))


def run(layer, x, training=True, **kwargs):
    """The output of a call; on JAX as one program, not compiled piece by piece."""
    if BACKEND != "jax":
        return numpy(layer(x, training=training, **kwargs))
    if not layer.built:
        layer.build(x.shape)
    variables = layer.trainable_variables, layer.non_trainable_variables
    values = [[v.value for v in vs] for vs in variables]
    y, other = jax_program(layer, training, layer.trainable)(*values, x, kwargs)
    for variable, value in zip(variables[1], other, strict=True):
        variable.assign(value)
    return numpy(y)


@functools.cache
def jax_program(layer, training, trainable):
    import jax

    def call(trainable, other, x, kwargs):
        return layer.stateless_call(trainable, other, x, training=training, **kwargs)

    return jax.jit(call)


def state(layer):
    return [numpy(v) for v in layer.non_trainable_weights]


def trained(layer, x, **kwargs):
    """`layer` after two training calls, with weights off their initial values."""
    layer.build(x.shape)
    for seed, weight in enumerate(layer.trainable_weights):
        weight.assign(data(*weight.shape, seed=seed))
    run(layer, x, **kwargs)
    run(layer, 2 * x + 1, **kwargs)
    return layer


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=rtol, atol=atol)


def assert_all_close(actual, expected, rtol=1e-5, atol=1e-6):
    for value, wanted in zip(actual, expected, strict=True):
        assert_close(value, wanted, rtol, atol)


# Configuration


EVERY_ARGUMENT = {
    "axis": 1,
    "momentum": 0.9,
    "epsilon": 1e-2,
    "center": False,
    "scale": False,
    "synchronized": BACKEND != "torch",
    "beta_initializer": keras.initializers.Constant(0.1),
    "gamma_initializer": "zeros",
    "moving_mean_initializer": "ones",
    "beta_regularizer": "l2",
    "gamma_regularizer": keras.regularizers.L1(0.1),
    "beta_constraint": "non_neg",
    "gamma_constraint": keras.constraints.MaxNorm(2),
    "name": "custom",
    "dtype": "mixed_bfloat16",
    "trainable": False,
}


@classes
def test_config_round_trip(cls):
    arguments = EVERY_ARGUMENT | CLASSES[cls]
    named = set(inspect.signature(cls).parameters) - {"kwargs"}
    assert named == arguments.keys() - {"name", "dtype", "trainable"}
    layer = cls(**arguments)
    config, default = layer.get_config(), cls().get_config()
    same = {name for name in arguments if config[name] == default[name]}
    assert same == ({"synchronized"} if BACKEND == "torch" else set())
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(layer)
    )
    assert type(again) is cls
    assert again.get_config() == config
    for name in CLASSES[cls].keys() - {"rho"}:  # A weight, made from the argument.
        if not name.endswith("_initializer"):
            assert getattr(again, name) == arguments[name]


@classes
def test_registered_name(cls):
    name = f"keras_norms>{cls.__name__}"
    assert keras.saving.get_registered_name(cls) == name
    assert keras.saving.get_registered_object(name) is cls


@pytest.mark.parametrize("p", [np.inf, "inf", 1, np.float32(2.5)], ids=repr)
def test_p_survives_json(p):
    layer = LpNorm(p)
    text = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(json.loads(json.dumps(text)))
    assert again.p == layer.p == float(p)


# Shapes


SHAPES = [((6, 3), 0), ((4, 5, 3), 1), ((2, 4, 5, 3), -1), ((2, 4, 2, 5, 3), -4)]
SHAPES += [((1, 1, 1), -1)]


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@every_layer
def test_shapes(make, shape, axis):
    layer = make(axis=axis)
    assert layer.compute_output_shape(shape) == shape
    outputs = run(layer, data(*shape)), layer(data(*shape))
    symbolic = make(axis=axis)(keras.Input(batch_shape=shape), training=True)
    for y in (*outputs, symbolic):
        assert tuple(y.shape) == shape
        assert keras.backend.standardize_dtype(y.dtype) == "float32"
    for weight in layer.weights:
        assert tuple(weight.shape) in ((shape[axis],), ())
    unknown = [None] * len(shape)
    assert list(layer.compute_output_shape(unknown)) == unknown


@pytest.mark.parametrize("rank", [3, 5])
@layers
def test_channels_first_is_channels_last_transposed(make, rank):
    x = data(3, 4, 5, 2, 6)[(slice(None),) * (rank - 1) + (0,) * (5 - rank)]
    moved = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    last, first = trained(make(), x), trained(make(axis=1), moved)
    assert_all_close(state(first), state(last))
    for training in (True, False):
        expected, actual = run(last, x, training), run(first, moved, training)
        assert_close(np.moveaxis(actual, 1, -1), expected)


@every_layer
def test_dynamic_sizes(make):
    inputs = keras.Input((None, None, 3))
    layer = make()
    model = keras.Model(inputs, keras.layers.GlobalMaxPooling2D()(layer(inputs)))
    # Nothing is learned, so that the layer alone does the same.
    model.compile(keras.optimizers.SGD(0.0), "mse")
    expected = make()
    for i, size in enumerate([(2, 4, 5), (1, 6, 2)]):
        x = data(*size, 3, seed=i)
        model.train_on_batch(x, np.zeros((size[0], 3)))
        run(expected, x)
    assert_all_close(state(layer), state(expected))
    assert model.predict(x, verbose=0).shape == (1, 3)


# Wrong inputs


@layers
@pytest.mark.parametrize("axis", [3, -4])
def test_axis_must_be_one_of_the_input(make, axis):
    expected = (
        rf"`axis` must be an axis of the input, -3 to 2. Received: axis={axis} with "
        r"input_shape=\(2, 3, 4\)"
    )
    with pytest.raises(ValueError, match=expected):
        make(axis=axis)(data(2, 3, 4))
    with pytest.raises(ValueError, match=expected):
        make(axis=axis).compute_output_shape((2, 3, 4))


@layers
def test_inputs_that_do_not_fit(make):
    with pytest.raises(ValueError, match="`axis`.*known.*axis=1.*None, None, 3"):
        make(axis=1)(keras.Input((None, 3)))
    with pytest.raises(ValueError, match="rank 2 or more.*Received: input_shape="):
        make()(data(4))
    layer = make()
    layer(data(2, 3))
    with pytest.raises(ValueError, match="expected axis -1 .* value 3.*shape .2, 4"):
        layer(data(2, 4))
    with pytest.raises(ValueError, match="`mask`.*Received: mask.shape=.4, 5"):
        make()(data(4, 6, 3), training=True, mask=np.ones((4, 5), bool))


@classes
def test_wrong_common_arguments(cls):
    for name, value in {
        "axis": 1.0,
        "momentum": 1.0,
        "epsilon": 0.0,
        "center": 1,
        "scale": None,
        "synchronized": "yes",
    }.items():
        with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
            cls(**{name: value})
    for name in inspect.signature(cls).parameters:
        if name.endswith(("_initializer", "_regularizer", "_constraint")):
            with pytest.raises(ValueError, match="no_such_thing"):
                cls(**{name: "no_such_thing"})


# Modes


@layers
def test_inference_is_affine_and_without_memory(make):
    x, z = data(6, 4, 3), data(6, 4, 3, seed=1)
    layer = trained(make(), x)
    before = state(layer)
    y, other, between = (run(layer, v, False) for v in (x, z, 0.25 * x + 0.75 * z))
    assert_close(between, 0.25 * y + 0.75 * other, atol=1e-5)
    assert_close(run(layer, x[:1], False), y[:1])
    for value, start in zip(state(layer), before, strict=True):
        np.testing.assert_array_equal(value, start)


@every_layer
def test_frozen_is_inference(make):
    x = data(6, 4, 3)
    layer = trained(make(), x)
    expected = run(layer, x, False)
    layer.trainable = False
    before = state(layer)
    np.testing.assert_array_equal(run(layer, x), expected)
    for value, start in zip(state(layer), before, strict=True):
        np.testing.assert_array_equal(value, start)
    layer.trainable = True
    assert np.abs(run(layer, x) - expected).max() > 0.1


@pytest.mark.parametrize(("center", "scale"), [(False, True), (True, False)])
@layers
def test_without_center_or_scale(make, center, scale):
    x = data(6, 4, 3)
    full, part = make(), make(center=center, scale=scale)
    for training in (True, True, False):
        assert_close(run(part, x, training), run(full, x, training))
    names = [v.name for v in part.trainable_weights]
    assert names == ["gamma"] * scale + ["beta"] * center
    assert (part.gamma is None, part.beta is None) == (not scale, not center)


# Training


def classifier(norm, **compile_arguments):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4, 4, 3)),
            keras.layers.Conv2D(4, 3, activation="tanh"),
            norm,
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, **compile_arguments)
    return model


IMAGES, LABELS = data(8, 4, 4, 3), np.arange(8) % 2


def fit(model, epochs=1):
    model.fit(IMAGES, LABELS, 4, epochs, shuffle=False, verbose=0)
    return [numpy(v) for v in model.weights]


@every_layer
def test_fit_trains_everything(make):
    model = classifier(make())
    before = model.get_weights()
    after = fit(model)
    for value, start, weight in zip(after, before, model.weights, strict=True):
        assert np.all(np.isfinite(value)), weight.path
        assert np.any(value != start), weight.path
    assert model.predict(IMAGES, verbose=0).shape == (8, 2)
    if BACKEND == "tensorflow":  # Off by default; on JAX it was on.
        assert_all_close(fit(classifier(make(), jit_compile=True)), after)


@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize(
    "make",
    [
        keras.layers.BatchNormalization,
        functools.partial(CBN, center=False),
        functools.partial(NoisyBN, seed=1),
        *[
            functools.partial(LpNorm, p, norm_of=norm_of)
            for p, norm_of in ((1, "input"), (2, "input"), (3, "centered"))
        ],
        *[
            functools.partial(LpNorm, np.inf, norm_of=norm_of)
            for norm_of in ("input", "centered")
        ],
    ],
    ids=repr,
)
def test_a_weight_in_front_has_no_gradient_along_itself(make, mode):
    """The output does not change with the length of w, if epsilon does not matter."""
    rng = np.random.default_rng(2)
    dense = keras.layers.Dense(6, activation=None, use_bias=False)
    model = keras.Sequential([keras.Input((5,)), dense, make(epsilon=1e-20)])
    g = rng.normal(size=(16, 6)).astype("float32")

    def loss(y):
        return ops.sum(ops.convert_to_tensor(g) * ops.tanh(y))

    _, _, gradient, *_ = training_step(model, loss, mode)(data(16, 5))
    weight = numpy(dense.kernel).astype("float64")
    lengths = np.linalg.norm(weight, axis=0) * np.linalg.norm(gradient, axis=0)
    assert np.linalg.norm(gradient, axis=0).min() > 0.1
    cosines = np.sum(weight * gradient, 0) / lengths
    assert np.abs(cosines).max() < 1e-5


def test_centered_l2_norm_is_batch_normalization():
    x, g = data(8, 5, 4), data(8, 5, 4, seed=1)
    # Next to a variance near 4, an epsilon of 1e-20 is lost in both.
    lp = LpNorm(2, norm_of="centered", epsilon=1e-20, momentum=0)
    bn = keras.layers.BatchNormalization(epsilon=1e-20, momentum=0)

    def loss(y):
        return ops.sum(ops.convert_to_tensor(g) * y * y)

    results = []
    for layer in (lp, bn):
        layer.build(x.shape)
        for seed, weight in enumerate(layer.trainable_weights):
            weight.assign(data(*weight.shape, seed=seed))
        results.append(training_step(layer, loss, COMPILED[0])(x))
    # Keras subtracts the squared mean from the mean square: a digit of float32.
    assert_all_close(*results, rtol=1e-4, atol=1e-4)
    # Without momentum, the stored statistics are those of the batch.
    assert_close(lp.moving_norm, np.sqrt(numpy(bn.moving_variance)))
    assert_close(lp(x), bn(x))


@pytest.mark.parametrize("training", [True, False])
def test_epsilon_is_added_to_the_norm(training):
    """Where BN divides by sqrt(s^2 + epsilon), LpNorm divides by s + epsilon."""
    x = data(8, 5, 4)
    lp = LpNorm(2, norm_of="centered", epsilon=0.5, momentum=0)
    bn = keras.layers.BatchNormalization(epsilon=0.5, momentum=0)
    run(lp, x), run(bn, x)
    s = x.std((0, 1), dtype="float64")
    expected = numpy(bn(x, training=training)) * np.sqrt(s**2 + 0.5) / (s + 0.5)
    assert_close(lp(x, training=training), expected)


# Precision


@pytest.mark.parametrize(
    # Half an ulp of an output up to 4, and inputs that are exact in both.
    ("policy", "tolerance"),
    [("mixed_float16", 2e-3), ("mixed_bfloat16", 2e-2)],
)
@layers
def test_mixed_precision(make, policy, tolerance):
    layer, reference = make(dtype=policy), make()
    x = ops.cast(data(16, 5, 3), layer.compute_dtype)
    exact = numpy(ops.cast(x, "float32"))
    for training in (True, False):
        y = run(layer, x, training)
        assert y.dtype.name == layer.compute_dtype
        expected = run(reference, exact, training)
        assert_close(y.astype("float32"), expected, tolerance, tolerance)
    for weight in layer.weights:
        assert keras.backend.standardize_dtype(weight.dtype) == "float32"
    # Float32 statistics of rounded inputs.
    assert_all_close(state(layer), state(reference))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@every_layer
def test_large_half_precision_inputs(make, policy):
    layer = make(dtype=policy)
    x = ops.cast(data(64, 3) * 1e4, layer.compute_dtype)
    y = run(layer, x).astype("float32")
    # Of several hundred thousand, whose square is no float16, remain a few units.
    assert np.all(np.isfinite(y)) and 0.5 < np.abs(y).max() < 10
    assert all(np.all(np.isfinite(value)) for value in state(layer))


@pytest.mark.skipif(BACKEND == "jax", reason="float64 is a process-wide switch of JAX")
@every_layer
def test_float64(make):
    layer = make(dtype="float64")
    x = np.random.default_rng(3).normal(size=(6, 4, 3))
    for training in (True, False):
        y = layer(x, training=training)
        assert keras.backend.standardize_dtype(y.dtype) == "float64"
    for weight in layer.weights:
        assert keras.backend.standardize_dtype(weight.dtype) == "float64"
    assert_close(layer.moving_mean, x.mean((0, 1)) * 0.01, rtol=1e-13, atol=1e-16)


# Masks


@pytest.mark.parametrize(("axis", "whole_samples"), [(-1, False), (1, True)])
@layers
def test_a_mask_equals_dropping(make, axis, whole_samples):
    x = data(6, 4, 3, 5)
    if whole_samples:
        mask = np.array([True, False, True, True, False, True])
    else:
        mask = data(*np.delete(x.shape, axis), seed=2) > 0
    keep = mask.reshape(mask.shape + (1,) * (3 - mask.ndim))
    keep = np.broadcast_to(keep, tuple(np.delete(x.shape, axis)))
    x = np.where(np.expand_dims(keep, axis), x, 1e6).astype("float32")
    dropped = np.moveaxis(x, axis, -1)[keep]
    masked, alone = trained(make(axis=axis), x, mask=mask), trained(make(), dropped)
    y = run(masked, x, mask=mask)
    assert_close(np.moveaxis(y, axis, -1)[keep], run(alone, dropped), atol=1e-5)
    assert_all_close(state(masked), state(alone))


@layers
def test_embedding_masks(make):
    tokens = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [2, 2, 1, 0]])
    norm, alone = make(), make()
    embedding = keras.layers.Embedding(4, 5, mask_zero=True)
    inputs = keras.Input((4,), dtype="int32")
    normed = norm(embedding(inputs))
    pooled = keras.layers.GlobalAveragePooling1D()(normed)
    model = keras.Model(inputs, [normed, pooled])
    y, mean = map(numpy, model(tokens, training=True))
    expected = run(alone, numpy(embedding(tokens))[tokens > 0])
    assert_close(y[tokens > 0], expected)
    assert_all_close(state(norm), state(alone))
    # The mask goes on to the pooling.
    assert_close(mean, [y[0, :2].mean(0), y[1, 0], y[2, :3].mean(0)])


@every_layer
def test_a_mask_that_hides_everything_leaves_the_state_alone(make):
    x = data(4, 6, 3)
    layer = trained(make(), x)
    before = state(layer)
    y = run(layer, x * 100, mask=np.zeros((4, 6), bool))
    assert np.all(np.isfinite(y))
    for value, start in zip(state(layer), before, strict=True):
        np.testing.assert_array_equal(value, start)


# Initializers, regularizers, constraints


@classes
def test_initializers(cls):
    names = [
        name.removesuffix("_initializer")
        for name in inspect.signature(cls).parameters
        if name.endswith("_initializer")
    ]
    assert len(names) == 4
    layer = cls(
        **{
            f"{name}_initializer": keras.initializers.Constant(i + 2)
            for i, name in enumerate(names)
        }
    )
    layer.build((None, 3))
    for i, name in enumerate(names):
        assert_close(getattr(layer, name), np.full(3, i + 2))


@every_layer
def test_regularizers_and_constraints(make):
    arguments = {"beta_initializer": keras.initializers.Constant(-1)}
    # A dead end for the gradient of the loss, so that only the penalties act.
    norm = make(
        beta_regularizer=keras.regularizers.L2(0.25),
        gamma_regularizer=keras.regularizers.L1(0.5),
        **arguments,
    )
    norm.build((None, 4))
    assert_close(sum(norm.losses), 4 * 0.25 + 4 * 0.5)
    constrained = make(
        beta_constraint="non_neg",
        gamma_constraint=keras.constraints.UnitNorm(axis=0),
        **arguments,
    )
    fit(classifier(constrained))
    assert np.all(numpy(constrained.beta) >= 0)
    assert_close(np.linalg.norm(numpy(constrained.gamma)), 1.0)


# Saving and copying


@pytest.mark.parametrize("make", [quiet_bn, LAYERS["LpNorm(inf)"]], ids=["bn", "lp"])
def test_saving_and_copying(tmp_path, make):
    model, fresh = (classifier(make(momentum=0.9)) for _ in range(2))
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    fresh.load_weights(tmp_path / "model.weights.h5")
    clone = keras.models.clone_model(model)
    assert clone.layers[1].get_config() == model.layers[1].get_config()
    assert np.any(numpy(clone.layers[1].moving_mean) != state(model.layers[1])[0])
    clone.set_weights(model.get_weights())
    y = model(IMAGES)
    for other in (loaded, fresh, clone):
        for value, wanted in zip(other.weights, model.weights, strict=True):
            np.testing.assert_array_equal(numpy(value), numpy(wanted))
        assert_close(other(IMAGES), y)
    assert_all_close(fit(loaded), fit(model))


# Properties


shapes = st.integers(2, 5).flatmap(lambda rank: st.tuples(*[st.integers(1, 4)] * rank))
# The first example of a process takes seconds, and JAX compiles for each shape.
few = settings(deadline=None, max_examples=10)


def integers(shape, seed=0):
    """Small integers: exact in every dtype, and so are their sums."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype("float32")


def by_channel(x, axis):
    """Channels last and positions flat."""
    return np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]).astype("float64")


@few
@given(
    shape=shapes,
    channel_axis=st.integers(0, 4),
    name=st.sampled_from(["CBN", *LAYERS]),
    seed=st.integers(0, 9),
)
def test_the_order_of_a_batch_does_not_matter(shape, channel_axis, name, seed):
    """Positions permuted: outputs and gradients are too, the state is the same."""
    axis = channel_axis % len(shape)
    layer = {"CBN": CBN, **LAYERS}[name](axis=axis, epsilon=0.1)
    layer.build(shape)
    start = layer.get_weights()
    step = training_step(layer, lambda y: ops.sum(ops.tanh(y)), COMPILED[0])
    along = (axis + 1) % len(shape)
    order = np.random.default_rng(seed).permutation(shape[along])
    x = integers(shape, seed)
    y, dx, *rest = [*step(x), *state(layer)]
    layer.set_weights(start)
    actual = [*step(x.take(order, along)), *state(layer)]
    expected = [y.take(order, along), dx.take(order, along), *rest]
    assert_all_close(actual, expected, atol=1e-5)


@few
@given(
    shape=shapes,
    channel_axis=st.integers(0, 4),
    p=st.sampled_from([1, 2, np.inf]) | st.floats(1, 20),
    # An output of a few units is rounded to the dtype twice.
    dtype_and_bound=st.sampled_from(
        [("float32", 1e-5), ("mixed_float16", 2**-8), ("mixed_bfloat16", 2**-5)]
    ),
    norm_of=st.sampled_from(["input", "centered"]),
    scale=st.sampled_from([-4, -1, 0.5, 8]),
    shift=st.integers(-8, 8),
)
def test_scale_and_shift_of_the_input_do_not_matter(
    shape, channel_axis, p, dtype_and_bound, norm_of, scale, shift
):
    axis, (dtype, bound) = channel_axis % len(shape), dtype_and_bound
    layer = LpNorm(p, norm_of=norm_of, axis=axis, epsilon=1e-20, dtype=dtype)
    x = integers(shape)
    moved = scale * (x + shift * (norm_of == "centered"))
    x, moved = (ops.cast(v, layer.compute_dtype) for v in (x, moved))
    y, actual = (by_channel(run(layer, v), axis) for v in (x, moved))
    # A constant channel is divided by nothing but a rounding error.
    varies = np.ptp(by_channel(numpy(x), axis), 0) > 0
    deviation = np.abs(actual - np.sign(scale) * y)[:, varies]
    assert deviation.max(initial=0) <= bound


@few
@given(
    shape=shapes,
    channel_axis=st.integers(0, 4),
    p=st.sampled_from([1, 2, np.inf]) | st.floats(1, 20),
    gamma=st.floats(0.1, 10),
)
def test_centered_outputs_have_norm_gamma_and_mean_beta(shape, channel_axis, p, gamma):
    axis = channel_axis % len(shape)
    layer = LpNorm(
        p,
        norm_of="centered",
        axis=axis,
        epsilon=1e-20,
        gamma_initializer=keras.initializers.Constant(gamma),
        beta_initializer=keras.initializers.Constant(3),
    )
    x = integers(shape)
    varies = np.ptp(by_channel(x, axis), 0) > 0
    y = by_channel(run(layer, x), axis)[:, varies] - 3
    assert_close(y.mean(0), np.zeros(y.shape[1]), atol=1e-5 * max(gamma, 1))
    size = np.abs(y)
    norm = size.max(0) if p == np.inf else np.mean(size**p, 0) ** (1 / p)
    assert_close(norm, np.full(y.shape[1], gamma), atol=1e-5)
