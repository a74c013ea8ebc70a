"""Functions and layers of the user's own: convert and fold keep them."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CBN, CWN, WN, WS, NoisyBN, activations, convert, fold
from tests.support import surgery_models as m
from tests.support.backend import BACKEND, numpy, tensorflow_only, thorough_on
from tests.support.surgery_models import apply, bn, dense, model_of, relu

pytestmark = thorough_on("jax")


def scaled_tanh(k):
    def scaled(x):
        return ops.tanh(k * x)

    return scaled


def not_of_keras():
    def relu(x):
        return ops.maximum(x, -0.5)

    return relu


class Short(layers.Layer):
    """A constructor that takes none of the arguments that all layers have."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        # Keras counts the names of such weights up.
        self.w = self.add_weight(shape=(shape[-1], self.units))

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

    def get_config(self):
        own = {"units": self.units, "function": self.function}
        return super().get_config() | own


class SerializedDense(OwnDense):
    """The same with a configuration that is made for files."""

    def get_config(self):
        function = keras.saving.serialize_keras_object(self.function)
        return {**super().get_config(), "function": function}

    @classmethod
    def from_config(cls, config):
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(**{**config, "function": function})


class Sum(keras.regularizers.Regularizer):
    def __call__(self, x):
        return ops.sum(ops.abs(x))


# A layer without weights, which is copied
Sine = type("Sine", (layers.Layer,), {"call": lambda self, x: ops.sin(x)})
activation = functools.partial(apply, layers.Activation)
function = functools.partial(apply, layers.Lambda)
leaky = functools.partial(ops.leaky_relu, negative_slope=0.3)

MODELS = {
    "functions": [
        *(dense(4, scaled_tanh(0.5)), bn, activation(scaled_tanh(2.0)), dense(), bn),
        *(activation(lambda x: np.pi * x), dense(4, lambda x: ops.sin(x)), bn),
        *(activation(not_of_keras()), dense(4, "relu"), bn, dense(4, leaky)),
        *(activation(functools.partial(ops.elu, alpha=0.5)), dense(4, ops.sin), bn),
        activation(ops.cos),
        dense(kernel_regularizer=Sum()),
        apply(layers.BatchNormalization, gamma_regularizer=Sum()),
        *(activation("relu"), dense(bias_regularizer=Sum())),
    ],
    "Lambda": [
        *(function(lambda x: x / np.pi), dense(), bn),
        function(lambda x: np.pi * ops.relu(x), output_shape=(4,)),
        *(dense(), function(scaled_tanh(1.0), output_shape=lambda s: s)),
        *(function(lambda x, k: k * x, arguments={"k": 2.0}), bn, dense(), bn),
    ],
    "layers": [
        *(lambda x: ops.vectorized_map(lambda row: 2.0 * row, x)[:, :3], dense(), bn),
        *(dense(), bn, apply(Sine), apply(Short, 4), bn, dense()),
        *(apply(OwnDense, 4, scaled_tanh(1.0)), bn, dense(), apply(Short, 3), bn),
        *(apply(SerializedDense, 3, scaled_tanh(0.3)), bn),
        *(lambda x: WS(layers.Dense(4, scaled_tanh(0.4)))(x), bn),
        *(lambda x: CWN(layers.Dense(4))(x), activation(scaled_tanh(0.3))),
        lambda x: WN(layers.Dense(4, scaled_tanh(0.2)))(x),
    ],
}


def functions(model):
    names = ("activation", "function", "kernel_regularizer")
    return [
        getattr(layer, name)
        for layer in model._flatten_layers()
        for name in names
        if getattr(layer, name, None) not in (None, keras.activations.linear)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model = model_of((6,), *MODELS[name])
    before, x = functions(model), m.batch_for(model)
    nodes = [len(layer._outbound_nodes) for layer in model.layers]
    converted = m.quiet(convert, model, "cbn")
    folded = [m.quiet(fold, each) for each in (model, converted)]
    for new in (converted, *folded, m.quiet(convert, model, "wn")):
        m.assert_same_outputs(new, model, x)
        own = {keras.activations.relu: activations.relu} if new is converted else {}
        expected = [own.get(f, f) for f in before]
        assert all(f is g for f, g in zip(functions(new), expected, strict=True))
        assert not {id(w) for w in new.weights} & {id(w) for w in model.weights}
        # What a new layer has made is of the new model.
        keras.Model(new.inputs, [layer.output for layer in new.layers[1:]])
    assert [len(layer._outbound_nodes) for layer in model.layers] == nodes
    if name != "layers":
        folded = m.quiet(fold, keras.Sequential(model.layers))
        assert isinstance(folded, keras.Sequential)
        m.assert_same_outputs(folded, model, x)


def test_what_layers_have():
    layer, penalty = Short(4), Sum()
    layer.name, layer.trainable, layer.dtype_policy = "short", False, "mixed_bfloat16"
    norm = apply(layers.BatchNormalization, gamma_regularizer=penalty)
    model = model_of((6,), layer, norm, dense())
    for norm, cls in ((CBN(gamma_regularizer=penalty), CBN), ("noisy_bn", NoisyBN)):
        new = m.quiet(convert, model, norm)
        assert [norm.gamma_regularizer for norm in m.of_class(new, cls)] == [penalty]
    short = new.get_layer("short")
    assert not short.trainable and short.compute_dtype == "bfloat16"


class NoConfig(OwnDense):
    def get_config(self):
        raise NotImplementedError("no configuration")


class OtherConfig(OwnDense):
    def get_config(self):
        return {"name": self.name}


class PartOfConfig(OtherConfig):
    def __init__(self, factor=1.0, **kwargs):
        super().__init__(4, lambda x: self.factor * x, **kwargs)
        self.factor = factor


def test_layers_that_cannot_be_made_again():
    for layer, says in (
        (NoConfig(4, ops.tanh), "could not be rebuilt: its get_config.. failed: no c"),
        (OtherConfig(4, ops.tanh), "could not be rebuilt: .*from_config.. failed"),
    ):
        with pytest.raises(ValueError, match=says):
            fold(model_of((3,), layer, dense(2), bn))
    with pytest.warns(UserWarning, match="'own'.*leaves out factor=0.3 .now 1.0"):
        fold(model_of((3,), PartOfConfig(0.3, name="own"), dense(2), bn))


class OwnStep(keras.Model):
    def train_step(self, *batch):
        return super().train_step(*batch)


class Weighted(OwnStep):
    def __init__(self, inputs, outputs, weight=1.0, **kwargs):
        super().__init__(inputs, outputs, **kwargs)


class Accumulating(OwnStep):
    def __init__(self, *args, batches=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = batches


class OwnLoss(keras.Sequential):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("compiled", [False, True])
def test_methods_and_settings_of_a_model_that_are_lost(compiled):
    plain = model_of((6,), dense(), bn)
    ends = plain.inputs, plain.outputs
    for model, says in (
        (OwnStep(*ends), ""),
        (Weighted(*ends, name="own"), "'own' is of class Weighted.*'train_step'"),
        (Accumulating(*ends), ""),
        (Accumulating(*ends, batches=4), r"leaves out batches=4 \(now 1\)"),
        (OwnLoss(plain.layers), "OwnLoss; .* a Sequential .*'compute_loss'"),
    ):
        if compiled:
            model.compile("sgd", "mse")
            model.stop_training = True
        with m.saying(says):
            fold(model)


def test_functions_that_refer_to_layers():
    table = layers.Embedding(9, 5, name="tied")
    last = function(lambda x: x @ ops.transpose(table.embeddings), name="out")
    model = model_of((7,), table, bn, dense(5), last, dtype="int32")
    with pytest.warns(UserWarning, match=r"shares these.*'tied \(in out\)'"):
        fold(model)


def own_loss(y, z):
    return ops.mean(ops.square(ops.subtract(y, z)))


class OwnRate(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


def test_compile_settings():
    model = model_of((6,), dense(), bn, relu, dense())
    mean = keras.metrics.MeanMetricWrapper(own_loss)
    metrics = [own_loss, "mae", mean, lambda y, z: ops.mean(y)]
    settings = {"metrics": metrics, "run_eagerly": BACKEND == "tensorflow"}
    optimizer = type("Own", (keras.optimizers.SGD,), {})(OwnRate())
    model.compile(optimizer, own_loss, **settings)
    x, y = m.batch_for(model), np.ones((6, 4))
    expected = model.test_on_batch(x, y)
    with m.saying(""):
        folded = fold(model)
    assert folded.loss is own_loss and folded.optimizer is not model.optimizer
    assert type(folded.optimizer) is type(optimizer)
    assert float(numpy(folded.optimizer.learning_rate)) == pytest.approx(0.1)
    np.testing.assert_allclose(folded.test_on_batch(x, y), expected, rtol=1e-5)
    of_metrics = [{id(v) for v in net.metrics_variables} for net in (model, folded)]
    assert not of_metrics[0] & of_metrics[1]
    m.quiet(convert, model, "cbn").train_on_batch(x, y)
    # Those that cannot be made again
    Unmade = type("Unmade", (keras.optimizers.SGD,), {"from_config": None})
    model.compile(Unmade(), loss=own_loss)
    with pytest.warns(UserWarning, match="is not compiled"):
        folded = fold(model)
    assert not folded.compiled


def test_a_compile_of_the_users():
    class Own(keras.Model):
        def compile(self, rate):
            super().compile(keras.optimizers.SGD(rate), "mse")

        def get_compile_config(self):
            return {"rate": 0.5}

        def compile_from_config(self, config):
            self.compile(**config)

    plain = model_of((6,), dense(), bn)
    model = Own(plain.inputs, plain.outputs)
    assert not fold(model).compiled
    model.compile(0.5)
    with m.saying(""):
        assert float(numpy(fold(model).optimizer.learning_rate)) == 0.5


@tensorflow_only
def test_a_vocabulary_that_was_adapted():
    lookup = layers.IntegerLookup()
    lookup.adapt([3, 5, 7])
    steps = lookup, apply(layers.Embedding, 9, 3), bn, apply(layers.Flatten), dense()
    m.check_fold(model_of((2,), *steps, dtype="int64"), np.array([[3, 9], [7, 5]]))


def test_weight_decay_spares_what_it_did():
    model = model_of(
        (6,),
        dense(name="a"),
        apply(layers.BatchNormalization, name="bn"),
        dense(name="b"),
        relu,
        dense(name="c"),
    )
    optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(
        [model.get_layer("b").kernel], ["bias", "gamma"]
    )
    model.compile(optimizer, lambda y, z: 0.0 * ops.mean(z))
    new = m.quiet(convert, model, "noisy_bn")
    before = {v.path: numpy(v) for v in new.trainable_variables}
    new.train_on_batch(m.batch_for(new), np.zeros((6, 4)))
    after = {v.path: numpy(v) for v in new.trainable_variables}
    shrunk = [k for k, v in after.items() if not np.array_equal(v, before[k])]
    assert sorted(shrunk) == ["a/kernel", "bn/beta", "c/kernel"]
