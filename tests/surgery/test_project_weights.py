"""ProjectWeights: a step is one on the sphere, of the kernels that it may be of."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, WS, ProjectWeights, diagnostics, freeze
from tests.support import surgery_models as m
from tests.support.backend import BACKEND, later_on_jax, numpy


def network(optimizer="sgd", **kwargs):
    dense = m.dense(6, name="first", **kwargs)
    steps = dense, m.bn, m.relu, m.dense(3, name="last")
    model = m.model_of((4,), *steps)
    model.compile(optimizer, "mse")
    return model


def norm_of(layer):
    return np.linalg.norm(numpy(layer.kernel).astype("float64"))


def test_a_step_is_projected():
    """And a model that was compiled before."""
    optimizer = keras.optimizers.SGD(2.0)
    model, (x, y) = network(optimizer), (m.images(8, 4), np.ones((8, 3)))
    first, last = model.get_layer("first"), model.get_layer("last")
    model.fit(x, y, batch_size=8, verbose=0)  # It is compiled without.
    before, start = numpy(first.kernel).astype("float64"), norm_of(first)
    gradient = diagnostics.value_and_grad(model, x, y).gradient[0]
    callback = ProjectWeights()
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    expected = before - 2 * gradient
    assert np.linalg.norm(expected) > 1.0001 * start
    expected *= start / np.linalg.norm(expected)
    np.testing.assert_allclose(numpy(first.kernel), expected, rtol=1e-3, atol=1e-5)
    assert callback.norms == {first.kernel.path: pytest.approx(start)}
    # Afterwards nothing is left of it.
    assert first.kernel.constraint is None
    other = norm_of(last)
    model.fit(x, y, batch_size=8, verbose=0)
    assert norm_of(first) > 1.0001 * start and norm_of(last) != other
    # A step whose square overflows
    start, optimizer.learning_rate = norm_of(first), 1e25
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    assert norm_of(first) == pytest.approx(start, rel=1e-5)


def test_weights_do_not_grow():
    model, growth = network(), diagnostics.WeightGrowth()
    several = 1 if BACKEND == "torch" else 2
    adam = keras.optimizers.Adam(0.1)
    model.compile(adam, "mse", steps_per_execution=several)
    callbacks = [ProjectWeights(), growth]
    x, y = m.images(16, 4), np.ones((16, 3))
    fit = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=callbacks, **fit)
    norms = growth.history["first_norm"]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-5)
    assert np.ptp(growth.history["last_norm"]) > 0.01


@later_on_jax
def test_which_kernels():
    """Those whose scale has no effect, and `weight_geometry` says the same."""

    def chosen(*steps):
        steps = *steps, m.relu, m.dense(3, name="last")
        model = m.model_of((4,), *steps)
        for variable in model.trainable_variables:
            if variable.name in ("beta", "bias"):
                variable.assign(np.linspace(-3, 3, variable.shape[0]))
        model.compile("sgd", "mse")
        callback = ProjectWeights()
        callback.set_model(model)
        try:
            callback.on_train_begin()
        except ValueError as error:
            assert "`layers` must be given" in str(error)
            found = set()
        else:
            callback.on_train_end()
            found = set(callback.norms)
        x, y = 3 * m.images(32, 4), np.ones((32, 3))
        geometry = diagnostics.weight_geometry(model, x, y)
        kinds = dict(zip(geometry.weights, geometry.invariance))
        kernels = {k: v for k, v in kinds.items() if k.endswith("kernel")}
        assert found == {k for k, v in kernels.items() if v != "none"}
        return len(found)

    layer_norm, no_bias = m.apply(layers.LayerNormalization), {"use_bias": False}
    assert chosen(m.dense(6), m.bn) == 1
    assert chosen(m.dense(6), m.relu, m.dense(6, **no_bias), layer_norm) == 1
    assert chosen(m.dense(6), layer_norm) == 0
    assert chosen(m.dense(6), m.apply(CBN)) == 0
    assert chosen(lambda x: WS(layers.Dense(6))(x), m.bn) == 1


def test_layers_that_are_given():
    x, y = m.images(8, 4), np.ones((8, 3))
    model = network()
    start = norm_of(model.get_layer("last"))
    model.fit(x, y, verbose=0, callbacks=[ProjectWeights(["last"])])
    assert norm_of(model.get_layer("last")) == pytest.approx(start, rel=1e-5)
    constrained = network(kernel_constraint="non_neg")
    for model, given, message in (
        (constrained, None, "without a constraint.*first/kernel"),
        (freeze(network()), None, "must be given"),
        (network(), ["no_such"], "must hold layers of model"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(x, y, verbose=0, callbacks=[ProjectWeights(given)])
