"""Models with functions of the user's own: convert, fold and prune keep them."""

import functools
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CBN, CWN, WN, WS, NoisyBN, convert, fold, prune
from tests.support import planted
from tests.support import surgery_models as m


def bn(**kwargs):
    return layers.BatchNormalization(**kwargs)


def scaled_tanh(k):
    def scaled(x):
        return ops.tanh(k * x)

    return scaled


def relu(x):
    """Not the one that Keras has under this name."""
    return ops.maximum(x, -0.5)


class Function(layers.Layer):
    """A layer without a configuration."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


class Forgetful(layers.Layer):
    """A layer whose configuration leaves a part out."""

    def __init__(self, factor=1.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        return self.factor * x

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        return super().get_config()


class Short(layers.Layer):
    """A constructor that takes none of the arguments that all layers have."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], self.units), name="w")

    def call(self, x):
        return x @ self.w


class OwnDense(layers.Layer):
    """Weights and a function, which stands in the configuration as it is."""

    def __init__(self, units, function, **kwargs):
        super().__init__(**kwargs)
        self.units, self.function = units, function

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], self.units), name="w")

    def call(self, x):
        return self.function(x @ self.w)

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.units)

    def get_config(self):
        config = {"units": self.units, "function": self.function}
        return {**super().get_config(), **config}


class SerializedDense(OwnDense):
    """The same with a configuration that is made for files."""

    def get_config(self):
        function = keras.saving.serialize_keras_object(self.function)
        return {**super().get_config(), "function": function}

    @classmethod
    def from_config(cls, config):
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(**{**config, "function": function})


def ones(shape, dtype=None):
    return ops.ones(shape, dtype)


class Ones(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return ops.ones(shape, dtype)


class Sum(keras.regularizers.Regularizer):
    def __call__(self, x):
        return ops.sum(ops.abs(x))


def chain(*stack):
    """A stack of layers, made anew for each test."""
    return lambda: [make() if callable(make) else make for make in stack]


def dense(activation=None, **kwargs):
    return lambda: layers.Dense(4, activation=activation, **kwargs)


def activation(function):
    return lambda: layers.Activation(function)


def lambda_layer(function, **kwargs):
    return lambda: layers.Lambda(function, **kwargs)


MODELS = {
    "closures": chain(
        *(dense(scaled_tanh(0.5)), bn, activation(scaled_tanh(2.0))),
        *(dense(), bn, activation(scaled_tanh(0.7)), dense(scaled_tanh(0.1))),
    ),
    "lambdas": chain(
        *(dense(lambda x: ops.sin(x)), bn, activation(lambda x: np.pi * x), dense()),
    ),
    "a function called as one of Keras": chain(
        *(dense(relu), bn, activation(relu), dense("relu"), bn, dense()),
    ),
    "partial functions, and those of Keras": chain(
        dense(functools.partial(ops.leaky_relu, negative_slope=0.3)),
        *(bn, activation(functools.partial(ops.elu, alpha=0.5)), dense(ops.sin), bn),
        *(activation(ops.cos), dense()),
    ),
    "Lambda": chain(
        *(lambda_layer(lambda x: x / np.pi), dense(), bn),
        lambda_layer(lambda x: np.pi * ops.relu(x), output_shape=(4,)),
        *(dense(), lambda_layer(scaled_tanh(1.0), output_shape=lambda s: s)),
        *(lambda_layer(lambda x, k: k * x, arguments={"k": 2.0}), bn, dense()),
    ),
    "layers without a configuration": chain(
        *(dense(), bn, lambda: Function(scaled_tanh(1.0)), dense(), bn),
        lambda: Forgetful(0.3),
    ),
    "layers with weights": chain(
        *(lambda: OwnDense(4, scaled_tanh(1.0)), bn, dense(), bn),
        *(lambda: SerializedDense(3, scaled_tanh(0.3)), bn),
    ),
    "short constructors": chain(lambda: Short(4), bn, dense(), lambda: Short(3), bn),
    "initializers and regularizers": chain(
        *(dense(kernel_initializer=Ones(), kernel_regularizer=Sum()),),
        lambda: bn(gamma_regularizer=Sum(), beta_initializer=ones),
        *(layers.ReLU, dense(bias_regularizer=lambda x: ops.sum(x))),
    ),
    "wrapped": chain(
        *(lambda: WS(dense(scaled_tanh(0.4))()), bn, lambda: CWN(dense()())),
        *(activation(scaled_tanh(0.3)), lambda: WN(dense(scaled_tanh(0.2))())),
    ),
    "steps": chain(
        *(lambda: layers.Reshape((2, 3)), dense(scaled_tanh(1.0)), bn),
        lambda: layers.LSTM(
            4,
            activation=scaled_tanh(0.7),
            recurrent_activation=lambda x: ops.sigmoid(2 * x),
            return_sequences=True,
        ),
        *(bn, lambda: layers.TimeDistributed(dense(scaled_tanh(0.6))())),
        lambda: layers.TimeDistributed(OwnDense(2, scaled_tanh(0.5))),
        lambda: layers.TimeDistributed(layers.Lambda(lambda x: np.pi * x)),
    ),
}


def model_of(stack, functional=True):
    inputs, stack = keras.Input((6,)), stack()
    if not functional:
        return m.randomize(keras.Sequential([inputs, *stack]))
    x = inputs
    for layer in stack:
        x = layer(x)
    return m.randomize(keras.Model(inputs, x))


def quiet(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def functions(model):
    names = ("activation", "recurrent_activation", "function", "kernel_regularizer")
    return [
        getattr(layer, name)
        for layer in model._flatten_layers()
        for name in names
        if getattr(layer, name, None) is not None
        and getattr(layer, name) is not keras.activations.linear
    ]


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model = model_of(MODELS[name])
    before, x = functions(model), m.batch_for(model)
    nodes = [len(layer._outbound_nodes) for layer in model.layers]
    converted = quiet(convert, model, "cbn")
    for new in (
        converted,
        quiet(convert, model, "wn"),
        quiet(fold, model),
        quiet(fold, converted),
    ):
        m.assert_same_outputs(new, model, x)
        assert all(f is g for f, g in zip(functions(new), before, strict=True))
        assert not {id(w) for w in new.weights} & {id(w) for w in model.weights}
        # What a new layer has made is of the new model.
        inside = [layer.output for layer in new.layers[1:]]
        keras.Model(new.inputs, inside)
    assert [len(layer._outbound_nodes) for layer in model.layers] == nodes


@pytest.mark.parametrize("name", ["closures", "lambdas", "Lambda"])
def test_sequential(name):
    model = model_of(MODELS[name], functional=False)
    for new in (quiet(convert, model, "cbn"), quiet(fold, model)):
        assert isinstance(new, keras.Sequential)
        m.assert_same_outputs(new, model, m.batch_for(model))


def test_functions_of_operations():
    inputs = keras.Input((6,))
    x = bn()(layers.Dense(4)(inputs))
    x = ops.vectorized_map(lambda row: 2.0 * ops.relu(row), x) + 1.0
    model = m.randomize(keras.Model(inputs, bn()(layers.Dense(4)(x[:, :3]))))
    for new in (quiet(convert, model, "cbn"), quiet(fold, model)):
        m.assert_same_outputs(new, model, m.batch_for(model))


def test_what_a_layer_of_ones_own_has():
    layer = Short(4)
    layer.name, layer.trainable, layer.dtype_policy = "short", False, "mixed_bfloat16"
    model = model_of(chain(lambda: layer, bn, dense()))
    new = quiet(convert, model, "cbn").get_layer("short")
    assert not new.trainable and new.compute_dtype == "bfloat16"


def test_what_a_configuration_leaves_out():
    class Scaled(OwnDense):
        def __init__(self, factor=1.0, **kwargs):
            super().__init__(4, lambda x: self.factor * x, **kwargs)
            self.factor = factor

        def get_config(self):
            return {"name": self.name}

    model = model_of(chain(lambda: Scaled(0.3, name="scaled"), bn))
    with pytest.warns(UserWarning, match="'scaled'.*leaves out factor=0.3 .now 1.0"):
        fold(model)


def test_functions_that_refer_to_layers():
    embedding = layers.Embedding(9, 5, name="tied")
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Dense(5)(bn()(embedding(inputs)))
    x = layers.Lambda(lambda x: x @ ops.transpose(embedding.embeddings), name="out")(x)
    model = m.randomize(keras.Model(inputs, x))
    with pytest.warns(UserWarning, match=r"shares these.*'tied \(in out\)'"):
        fold(model)


def test_the_new_norm_has_functions():
    penalty = Sum()
    model = model_of(chain(dense(), bn, layers.ReLU, dense()))
    norm = CBN(gamma_regularizer=penalty)
    (cbn,) = m.of_class(quiet(convert, model, norm), CBN)
    assert cbn.gamma_regularizer is penalty
    own = model_of(chain(dense(), lambda: bn(gamma_regularizer=penalty), dense()))
    (noisy,) = m.of_class(quiet(convert, own, "noisy_bn"), NoisyBN)
    assert noisy.gamma_regularizer is penalty


def test_prune_with_functions():
    """Dead channels go, and what is unknown keeps those of its own."""
    inputs = keras.Input((6,))
    x = layers.Dense(4, name="dead")(inputs)
    x = layers.Activation("relu")(bn(name="dead_bn")(x))
    x = layers.Dense(5, activation=scaled_tanh(1.0), name="own")(x)
    x = layers.Lambda(lambda x: np.pi * x)(Function(scaled_tanh(1.0))(x))
    model = planted.settled(inputs, layers.Dense(2, name="head")(x))
    planted.kill(model.get_layer("dead_bn"), [1], -0.7)
    pruned = prune(model, m.batch_for(model, 16), similarity=None)
    assert planted.removed(pruned) == {"dead": [1]}
    m.assert_same_outputs(pruned.model, model, m.batch_for(model))


# Compile settings


def own_loss(y, z):
    return ops.mean(ops.square(y - z))


class OwnRate(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


class OwnOptimizer(keras.optimizers.SGD):
    pass


class Unmade(keras.optimizers.SGD):
    """Cannot be made again from its configuration."""

    def __init__(self, argument):
        super().__init__()


SETTINGS = {
    "a function": lambda: ("sgd", own_loss, [own_loss, "mae"]),
    "a lambda": lambda: ("sgd", lambda y, z: own_loss(y, z), None),
    "own classes": lambda: (
        OwnOptimizer(OwnRate()),
        keras.losses.Huber(),
        [keras.metrics.MeanMetricWrapper(own_loss), lambda y, z: ops.mean(y)],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_compile_settings(name):
    optimizer, loss, metrics = SETTINGS[name]()
    model = model_of(chain(dense(), bn, layers.ReLU, dense()))
    model.compile(optimizer, loss=loss, metrics=metrics)
    x, y = m.batch_for(model), np.ones((6, 4))
    expected = model.evaluate(x, y, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        folded = fold(model)
    assert folded.loss is loss and folded.optimizer is not model.optimizer
    assert type(folded.optimizer) is type(model.optimizer)
    np.testing.assert_allclose(folded.evaluate(x, y, verbose=0), expected, rtol=1e-5)
    assert not {id(v) for metric in folded.metrics for v in metric.variables} & {
        id(v) for metric in model.metrics for v in metric.variables
    }
    quiet(convert, model, "cbn").fit(x, y, verbose=0)


def test_settings_that_cannot_be_made_again():
    model = model_of(chain(dense(), bn, layers.ReLU, dense()))
    model.compile(Unmade(3), loss=own_loss)
    with pytest.warns(UserWarning, match="is not compiled"):
        folded = fold(model)
    assert not folded.compiled
    m.assert_same_outputs(folded, model, m.batch_for(model))
