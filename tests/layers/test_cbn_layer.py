"""CBN as a Keras layer: shapes, state, configuration, masks, saving, compilation."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms import AMAT, CBN
from keras_norms.layers import cbn, learning_rate
from tests.support.autodiff import training_step
from tests.support.cbn_reference import CBNReference, relative_error

BACKEND = keras.backend.backend()
graph_backends = pytest.mark.skipif(BACKEND == "torch", reason="PyTorch runs eagerly")
jax_only = pytest.mark.skipif(BACKEND != "jax", reason="JAX only")
tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")

STATISTICS = ("moving_mean", "moving_square", "average_weight")


def data(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2 + 1).astype("float32")


def numpy(x):
    return ops.convert_to_numpy(ops.convert_to_tensor(x))


def train(layer, x, **kwargs):
    return numpy(layer(x, training=True, **kwargs))


def state(layer):
    return {name: numpy(getattr(layer, name)) for name in STATISTICS}


def weights(model):
    """Every weight of a model but the counters that a schedule adds."""
    kept = [v for v in model.weights if v.name != "step"]
    return {f"{i}/{v.name}": numpy(v) for i, v in enumerate(kept)}


def known_rate(rate=0.02, **kwargs):
    """A layer that knows its learning rate: here eta is 0.8."""
    layer = CBN(**kwargs)
    layer.set_learning_rate(rate)
    return layer


def trained(layer, x):
    """`layer` after two training calls, with weights off their initial values."""
    layer.build(x.shape)
    for seed, weight in enumerate(layer.trainable_weights):
        weight.assign(data(*weight.shape, seed=seed))
    train(layer, x)
    train(layer, 2 * x + 1)
    return layer


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=rtol, atol=atol)


def assert_same(actual, expected, rtol=1e-5, atol=1e-6):
    """Two dicts hold the same arrays."""
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=rtol, atol=atol, err_msg=name
        )


def classifier(*norms, rate=0.1, **compile_arguments):
    """A compiled network for inputs (8, 8, 3), each norm before a linear layer."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3)])
    for norm in norms:
        model.add(keras.layers.Activation("tanh"))
        model.add(norm)
        model.add(keras.layers.Conv2D(4, 3, padding="same"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(2))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, **compile_arguments)
    return model


IMAGES = data(12, 8, 8, 3)
LABELS = np.arange(12) % 2


def fit(model, *callbacks, epochs=2):
    model.fit(
        IMAGES, LABELS, 4, epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model


# Configuration and shapes


EVERY_ARGUMENT = {
    "axis": 1,
    "rho": 0.5,
    "omega": 3.0,
    "momentum": 0.9,
    "epsilon": 1e-3,
    "center": False,
    "scale": False,
    "decouple": False,
    "mean_gradient": "ratio",
    "synchronized": BACKEND != "torch",
    "beta_initializer": keras.initializers.Constant(0.1),
    "gamma_initializer": "zeros",
    "moving_mean_initializer": "ones",
    "moving_square_initializer": "zeros",
    "beta_regularizer": "l2",
    "gamma_regularizer": keras.regularizers.L1(0.1),
    "beta_constraint": "non_neg",
    "gamma_constraint": keras.constraints.MaxNorm(2),
    "name": "custom",
    "dtype": "mixed_bfloat16",
    "trainable": False,
}


def test_config_round_trip():
    layer = CBN(**EVERY_ARGUMENT)
    config = layer.get_config()
    assert config.keys() >= EVERY_ARGUMENT.keys()
    default = CBN().get_config()
    same = {name for name in EVERY_ARGUMENT if config[name] == default[name]}
    assert same == ({"synchronized"} if BACKEND == "torch" else set())
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(layer)
    )
    assert type(again) is CBN
    assert again.get_config() == config


def test_registered_name():
    assert keras.saving.get_registered_name(CBN) == "keras_norms>CBN"


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((6, 3), -1), ((6, 3), 1), ((4, 5, 3), 2), ((4, 5, 3), 1), ((4, 5, 3), -3)]
    + [((2, 4, 5, 3), axis) for axis in (-1, 1, 2, 3)]
    + [((2, 4, 2, 5, 3), axis) for axis in (-1, 1)]
    + [((1, 1, 1), -1), ((3, 1), -1)],
)
def test_shapes(shape, axis):
    layer = CBN(axis)
    assert layer(data(*shape), training=True).shape == shape
    assert layer(data(*shape)).shape == shape
    assert layer.compute_output_shape(shape) == shape
    assert tuple(layer.moving_mean.shape) == (shape[axis],)
    if axis not in (0, -len(shape)):
        symbolic = CBN(axis)(keras.Input(shape[1:]), training=True)
        assert tuple(symbolic.shape) == (None, *shape[1:])


def test_weights_by_name():
    layer = CBN()
    layer.build((None, 3))
    shapes = {v.name: tuple(v.shape) for v in layer.weights}
    assert [v.name for v in layer.trainable_weights] == ["gamma", "beta"]
    vectors = dict.fromkeys(("gamma", "beta", "moving_mean", "moving_square"), (3,))
    scalars = dict.fromkeys(("average_weight", "rho", "learning_rate"), ())
    assert shapes == vectors | scalars


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("decouple", [True, False])
def test_channels_first_is_channels_last_transposed(rank, decouple):
    x = data(3, 4, 5, 2, 6)[(slice(None),) * (rank - 1) + (0,) * (5 - rank)]
    moved = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    last = trained(known_rate(decouple=decouple), x)
    first = trained(known_rate(axis=1, decouple=decouple), moved)
    assert_same(state(first), state(last))
    for training in (True, False):
        expected = numpy(last(x, training=training))
        actual = numpy(first(moved, training=training))
        assert_close(np.moveaxis(actual, 1, -1), expected)


def test_dynamic_sizes():
    inputs = keras.Input((None, None, 3))
    layer = known_rate()
    model = keras.Model(inputs, keras.layers.GlobalMaxPooling2D()(layer(inputs)))
    model.compile("sgd", "mse")
    expected = known_rate()
    for i, size in enumerate([(2, 4, 5), (3, 6, 2), (1, 1, 1)]):
        x = data(*size, 3, seed=i)
        model.train_on_batch(x, np.zeros((size[0], 3)))
        train(expected, x)
    # The optimizer moves gamma and beta after each step, and beta enters the square.
    assert_close(layer.moving_mean, expected.moving_mean)
    assert_close(layer.average_weight, 1 - 0.8**3)


def test_fit_trains_everything():
    norm = CBN()
    model = classifier(norm)
    before = weights(model)
    fit(model, AMAT(), epochs=1)
    assert all(
        np.any(before[path] != value)
        for path, value in weights(model).items()
        if not path.endswith("/rho")
    )
    assert model.predict(IMAGES, verbose=0).shape == (12, 2)


# Modes


@pytest.mark.parametrize("decouple", [True, False])
def test_inference_is_affine(decouple):
    x, z = data(6, 4, 3), data(6, 4, 3, seed=1)
    layer = trained(known_rate(decouple=decouple, rho=0.5), x)
    between = layer(0.25 * x + 0.75 * z, training=False)
    assert_close(between, 0.25 * numpy(layer(x)) + 0.75 * numpy(layer(z)), atol=1e-5)


def test_inference_does_not_depend_on_the_batch_nor_change_the_state():
    x = data(6, 3)
    layer = trained(known_rate(), x)
    before = state(layer)
    alone = np.concatenate([numpy(layer(row, training=False)) for row in x[:, None]])
    assert_close(alone, layer(x))
    assert_same(state(layer), before, rtol=0, atol=0)


def test_frozen_is_inference():
    x = data(6, 3)
    layer = trained(known_rate(), x)
    before, expected = state(layer), numpy(layer(x, training=False))
    assert np.abs(train(known_rate(), x) - expected).max() > 0.1
    layer.trainable = False
    assert_close(train(layer, x), expected, rtol=0, atol=0)
    assert_same(state(layer), before, rtol=0, atol=0)


@pytest.mark.parametrize(("center", "scale"), [(False, True), (True, False)])
@pytest.mark.parametrize("decouple", [True, False])
def test_without_center_or_scale(center, scale, decouple):
    x = data(6, 3)
    full = known_rate(decouple=decouple)
    part = known_rate(decouple=decouple, center=center, scale=scale)
    for _ in range(2):
        assert_close(train(part, x), train(full, x))
    assert_close(part(x), full(x))
    names = [v.name for v in part.trainable_weights]
    assert names == ["gamma"] * scale + ["beta"] * center


@pytest.mark.parametrize("training", [True, False])
def test_rho_can_be_assigned(training):
    x = data(6, 3)
    layer = trained(CBN(), x)
    before = numpy(layer(x, training=training))
    layer.rho.assign(2.0)
    assert_close(layer(x, training=training), before / 2)


def test_rho_can_be_assigned_in_a_compiled_model():
    x = data(6, 3)
    norm = trained(CBN(), x)
    model = keras.Sequential([keras.Input((3,)), norm])
    model.compile("sgd", "mse")
    before = model.predict(x, verbose=0)
    norm.rho.assign(2.0)
    assert_close(model.predict(x, verbose=0), before / 2)


def test_rho_is_the_magnitude_of_the_output():
    y = train(CBN(rho=4.0, axis=1), data(8, 3, 50))
    assert_close(np.sqrt(np.mean(y**2, axis=(0, 2))), np.full(3, 0.25), rtol=1e-4)


def test_a_rate_told_before_build_is_kept():
    early, late = known_rate(0.05), CBN()
    late.build((None, 3))
    late.set_learning_rate(0.05)
    for layer in (early, late):
        train(layer, data(4, 3))
        assert_close(layer.average_weight, 0.5)


# Precision


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_float16", 2e-3), ("mixed_bfloat16", 2e-2)]
)
def test_mixed_precision(policy, tolerance):
    layer, reference = known_rate(dtype=policy), known_rate()
    x = ops.cast(data(16, 5, 3), layer.compute_dtype)
    exact = numpy(ops.cast(x, "float32"))
    for training in (True, False):
        y = layer(x, training=training)
        assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
        expected = reference(exact, training=training)
        assert_close(ops.cast(y, "float32"), expected, tolerance, tolerance)
    assert {keras.backend.standardize_dtype(v.dtype) for v in layer.weights} == {
        "float32"
    }
    # Float32 statistics of rounded inputs.
    assert_same(state(layer), state(reference))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_large_half_precision_inputs(policy):
    layer = CBN(dtype=policy)
    x = ops.cast(data(64, 3) * 1e4, layer.compute_dtype)
    for training in (True, False):
        y = numpy(ops.cast(layer(x, training=training), "float32"))
        assert np.all(np.isfinite(y))
        assert_close(np.sqrt(np.mean(y**2, 0)), np.ones(3), rtol=2e-2)


# Masks


def positions(mask, shape, axis):
    """A mask without the channel axis, as the inputs' boolean index of positions."""
    return np.broadcast_to(
        mask.reshape(mask.shape + (1,) * (len(shape) - 1 - mask.ndim)),
        tuple(np.delete(shape, axis)),
    )


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("shape", [(6, 4, 5), (6, 4, 3, 5)])
@pytest.mark.parametrize("whole_samples", [True, False])
def test_a_mask_equals_dropping(shape, axis, whole_samples):
    x = data(*shape)
    if whole_samples:
        mask = np.array([True, False, True, True, False, True])
    else:
        mask = data(*np.delete(shape, axis), seed=2) > 0
    keep = positions(mask, shape, axis)
    dropped = np.moveaxis(x, axis, -1)[keep]
    masked = trained(known_rate(axis=axis), x)
    alone = trained(known_rate(), np.moveaxis(x, axis, -1).reshape(-1, shape[axis]))
    expected = train(alone, dropped)
    y = train(masked, np.where(np.expand_dims(keep, axis), x, 1e6), mask=mask)
    assert_close(np.moveaxis(y, axis, -1)[keep], expected, atol=1e-5)
    assert_same(state(masked), state(alone))


def test_a_mask_of_time_steps_where_time_is_the_channel_axis():
    x = data(5, 3, 4)
    mask = np.array([[True, True, False]] * 5)
    layer, expected = CBN(axis=1), CBN(axis=1)
    train(layer, x, mask=mask)
    train(expected, x)
    # Channel 2 saw nothing and stays as it was made.
    assert_close(layer.moving_mean, numpy(expected.moving_mean) * [1, 1, 0])


def test_embedding_masks():
    tokens = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [2, 2, 1, 0]])
    norm = known_rate()
    embedding = keras.layers.Embedding(4, 5, mask_zero=True)
    model = keras.Sequential([embedding, norm])
    y = numpy(model(tokens, training=True))
    alone = known_rate()
    expected = train(alone, numpy(embedding(tokens))[tokens > 0])
    assert_close(y[tokens > 0], expected)
    assert_same(state(norm), state(alone))


def test_masks_go_on_to_the_next_layer():
    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    inputs = keras.Input((3,), dtype="int32")
    x = CBN()(keras.layers.Embedding(4, 5, mask_zero=True)(inputs))
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(x))
    last = keras.Model(inputs, x)
    y = numpy(last(tokens))
    assert_close(model(tokens), [y[0, :2].mean(0), y[1, 0]])


@pytest.mark.parametrize("rate", [-1, 0.02])
def test_a_mask_that_hides_everything_leaves_the_state_alone(rate):
    x = data(4, 6, 3)
    layer = trained(known_rate(rate), x)
    before = state(layer)
    y = train(layer, x * 100, mask=np.zeros((4, 6), bool))
    assert np.all(np.isfinite(y))
    assert_same(state(layer), before, rtol=0, atol=0)


def test_a_wrong_mask_is_refused():
    with pytest.raises(ValueError, match="`mask`.*Received: mask.shape=.4, 5"):
        train(CBN(), data(4, 6, 3), mask=np.ones((4, 5), bool))


# Initializers, regularizers, constraints


def test_initializers():
    names = ("beta", "gamma", "moving_mean", "moving_square")
    values = dict(zip(names, (0.5, 2.0, 3.0, 4.0), strict=True))
    layer = CBN(
        **{
            f"{k}_initializer": keras.initializers.Constant(v)
            for k, v in values.items()
        }
    )
    layer.build((None, 3))
    for name, value in values.items():
        assert_close(getattr(layer, name), np.full(3, value))


def test_regularizers_add_to_the_loss():
    norm = CBN(
        beta_initializer="ones",
        beta_regularizer=keras.regularizers.L2(0.25),
        gamma_regularizer=keras.regularizers.L1(0.5),
    )
    plain = classifier(CBN(beta_initializer="ones"))
    model = classifier(norm)
    assert_close(sum(model.losses), 4 * 0.25 + 4 * 0.5)
    losses = [m.evaluate(IMAGES, LABELS, verbose=0) for m in (model, plain)]
    assert_close(losses[0] - losses[1], 3.0)


def test_constraints_hold_after_a_step():
    norm = CBN(
        beta_initializer=keras.initializers.Constant(-1),
        beta_constraint="non_neg",
        gamma_constraint=keras.constraints.UnitNorm(axis=0),
    )
    fit(classifier(norm), AMAT(), epochs=1)
    assert np.all(numpy(norm.beta) >= 0)
    assert_close(np.linalg.norm(numpy(norm.gamma)), 1.0)


# Saving and copying


SCHEDULE = keras.optimizers.schedules.CosineDecay(0.1, 100)


def with_schedule():
    """A trained model whose norms follow a schedule, and one that never did."""
    return fit(classifier(CBN(), CBN(rho=0.5), rate=SCHEDULE), AMAT())


def without_schedule():
    return fit(classifier(CBN(), CBN(rho=0.5)), AMAT())


SOURCES = [with_schedule, without_schedule]


@pytest.mark.parametrize("source", SOURCES)
def test_a_saved_model_goes_on(tmp_path, source):
    model = source()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(weights(loaded), weights(model), rtol=0, atol=0)
    assert_close(loaded.predict(IMAGES, verbose=0), model.predict(IMAGES, verbose=0))
    assert_same(weights(fit(loaded, AMAT())), weights(fit(model, AMAT())))


@pytest.mark.parametrize("source", SOURCES)
def test_saved_weights_load_with_and_without_a_schedule(tmp_path, source):
    model, other = source(), SOURCES[source is with_schedule]()
    fit(other, AMAT(), epochs=1)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same(weights(other), weights(model), rtol=0, atol=0)


def test_clone_model():
    model = without_schedule()
    clone = keras.models.clone_model(model)
    assert clone.layers[5].get_config()["rho"] == 0.5
    assert_close(clone.layers[5].average_weight, 0)
    clone.set_weights(model.get_weights())
    assert_close(clone(IMAGES), model(IMAGES))


def test_a_layer_may_be_called_twice():
    norm, inputs = CBN(), keras.Input((3,))
    y = keras.layers.Dense(1)(norm(inputs) + norm(2 * inputs))
    model = keras.Model(inputs, y)
    model.compile(keras.optimizers.SGD(0.02), "mse")
    model.fit(data(4, 3), np.zeros(4), callbacks=[AMAT()], verbose=0)
    assert len([w for w in model.weights if "cbn" in w.path]) == 7
    assert_close(norm.average_weight, 1 - 0.8**2)


# Without AMAT


@pytest.fixture
def fresh_hint():
    learning_rate._explain_amat_once.cache_clear()


def hints(caught):
    return [w for w in caught if "keras_norms.AMAT()" in str(w.message)]


def test_the_hint_about_amat_comes_once(fresh_hint):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(fit(classifier(CBN(), CBN())))
    assert len(hints(caught)) == 1


def test_no_hint_where_none_is_due(fresh_hint):
    x = data(4, 3)
    frozen = CBN(trainable=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CBN()(x, training=False)
        CBN()(keras.Input((3,)), training=True)
        frozen(x, training=True)
        train(known_rate(), x)
        fit(classifier(CBN()), AMAT(), epochs=1)
    assert not hints(caught)


def test_without_a_rate_the_batch_alone_normalises():
    layer = CBN()
    for seed in range(2):
        x = data(50, 3, seed=seed) * (seed + 1)
        y = train(layer, x)
        assert_close(y.mean(0), np.zeros(3), atol=1e-5)
        assert_close((y**2).mean(0), np.ones(3), rtol=1e-4)


# Compilation and functional use


@graph_backends
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_jit_compile_changes_nothing(policy):
    compiled, plain = (
        weights(fit(classifier(CBN(dtype=policy), jit_compile=jit), AMAT()))
        for jit in (True, False)
    )
    tolerance = 1e-5 if policy == "float32" else 2e-2
    assert_same(compiled, plain, tolerance, tolerance)


@jax_only
def test_stateless_call():
    import jax

    x = data(6, 3)
    layer, expected = trained(known_rate(), x), trained(known_rate(), x)
    before = state(layer)
    variables = [[v.value for v in vs] for vs in split(layer)]
    call = jax.jit(lambda t, n, x: layer.stateless_call(t, n, x, training=True))
    y, new = call(*variables, x)
    assert_same(state(layer), before, rtol=0, atol=0)
    assert_close(y, train(expected, x))
    for value, variable in zip(new, expected.non_trainable_variables, strict=True):
        assert_close(value, variable)


def split(layer):
    return layer.trainable_variables, layer.non_trainable_variables


@jax_only
def test_many_trials_in_one_program():
    """Weights, rho and learning rate differ between trials; -1 is an unknown rate."""
    import jax
    import jax.numpy as jnp

    rates, rhos = [0.1, 0.02, 0.0, -1.0], [0.5, 1.0, 2.0, 1.0]
    x, upstream = data(6, 3), data(6, 3, seed=9)
    layer = trained(CBN(), x)

    def step(trainable, state):
        def loss(trainable):
            y, new_state = layer.stateless_call(trainable, state, x, training=True)
            return jnp.sum(y * upstream), (y, new_state)

        gradient, (y, new_state) = jax.grad(loss, has_aux=True)(trainable)
        return gradient, y, new_state

    def trial(i):
        values = {"learning_rate": rates[i], "rho": rhos[i]}
        trainable, state = split(layer)
        return [v.value + 0.1 * i for v in trainable], [
            jnp.asarray(values.get(v.name, v.value), "float32") for v in state
        ]

    trials = [trial(i) for i in range(len(rates))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trials)
    together = jax.jit(jax.vmap(step))(*stacked)
    for i, arguments in enumerate(trials):
        alone = jax.tree.leaves(step(*arguments))
        mine = jax.tree.leaves(jax.tree.map(lambda leaf, i=i: leaf[i], together))
        for actual, expected in zip(mine, alone, strict=True):
            assert_close(actual, expected, atol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu", "selu"])
def test_between_a_convolution_of_one_pixel_and_an_activation(activation):
    inputs = keras.Input((3, 3, 2))
    x = keras.layers.Conv2D(4, 3, use_bias=False)(inputs)
    x = CBN(decouple=False)(x)
    outputs = keras.layers.Activation(activation)(x)
    model = keras.Model(inputs, outputs)
    x = np.random.default_rng(0).normal(size=(32, 3, 3, 2)).astype("float32")
    expected = keras.ops.convert_to_numpy(model(x))
    # Graph optimizers see the whole model only here.
    assert relative_error(model.predict(x, verbose=0), expected) < 1e-5


@pytest.mark.parametrize(
    ("shape", "axis", "training", "warned"),
    [
        ((1, 3), -1, True, True),
        ((1, 1, 1, 3), -1, True, True),
        ((1, 3, 1), 1, True, True),
        ((1, 3), -1, False, False),
        ((2, 3), -1, True, False),
        ((1, 4, 3), -1, True, False),
    ],
)
def test_batches_of_one_are_warned_of(shape, axis, training, warned):
    cbn._explain_batches_of_one_once.cache_clear()
    layer = known_rate(axis=axis)
    layer.build(shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            layer(data(*shape), training=training)
    messages = [str(w.message) for w in caught]
    assert sum("one element for each channel" in m for m in messages) == warned


@tensorflow_only
def test_batches_of_unknown_size_are_not_warned_of():
    import tensorflow as tf

    cbn._explain_batches_of_one_once.cache_clear()
    layer = known_rate()
    layer.build((None, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tf.function(
            lambda x: layer(x, training=True),
            input_signature=[tf.TensorSpec((None, 3))],
        )(data(1, 3))


def test_batches_of_one_are_those_of_the_equations():
    """Where they diverge, the method does: without a mistake it is float64's way."""
    layer, reference = known_rate(), CBNReference(3)
    layer.build((1, 3))
    ones, beta = np.ones(3), np.full(3, 0.5)
    layer.beta.assign(beta)
    g = np.array([[1.0, -2.0, 0.5]], "float32")
    step = training_step(layer, lambda y: ops.sum(y * ops.convert_to_tensor(g)))
    for seed in range(8):
        x = data(1, 3, seed=seed)
        expected, constants = reference.train(x, ones, beta, 0.02)
        wanted = reference.gradients(g, x, ones, beta, constants)
        for actual, other in zip(step(x), (expected, *wanted)):
            np.testing.assert_allclose(actual, other, rtol=1e-4, atol=1e-5)
