"""Models and layers as they also are: called by keyword, twice named, without loss."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_norms import CBN, diagnostics
from tests.support import diagnostics_networks as networks

X, Y = networks.regression_batch()
X = X.astype("float32")


class ByKeyword(keras.Model):
    """No argument `training`, and a layer that is called by keyword."""

    def __init__(self):
        super().__init__(name="by_keyword")
        self.first, self.second = layers.Dense(4, "tanh"), layers.Dense(2)

    def call(self, x):
        return self.second(inputs=self.first(inputs=x))


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_layer_that_is_called_by_keyword(side):
    model = ByKeyword()
    model(X)
    plain = keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh")])
    plain.add(layers.Dense(2, name="second"))
    plain.set_weights(model.get_weights())
    found, expected = (
        diagnostics.value_and_grad(each, X, Y, "mse", layer=layer, side=side)
        for each, layer in ((model, model.second), (plain, "second"))
    )
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    np.testing.assert_allclose(found.gradient, expected.gradient, rtol=1e-5, atol=1e-7)


def dense(*kinds):
    model = keras.Sequential([keras.Input((5,)), *kinds, layers.Dense(2, name="last")])
    model.compile("sgd", "mse")
    return model


def test_two_layers_of_one_name():
    def part():
        inputs = keras.Input((5,))
        return keras.Model(inputs, layers.Dense(5, name="same")(inputs))

    model = dense(part(), part())
    with pytest.raises(ValueError, match="name of only one. .*the name of 2 layers"):
        diagnostics.value_and_grad(model, X, Y, layer="same")
    one = model.layers[0].get_layer("same")
    assert diagnostics.value_and_grad(model, X, Y, layer=one).gradient.shape == X.shape


def test_the_objective_of_activations_has_one_batch():
    objective = diagnostics.Objective(dense(), X, Y, layer="last")
    with pytest.raises(ValueError, match="has one batch"):
        objective.of_batch(X, Y)


def test_many_losses_of_one_model():
    """Functions are kept for some of them, and made again for others."""
    model = dense()

    def scaled(factor):
        return lambda y, p: factor * ops.mean(ops.square(y - p), -1)

    losses = [scaled(float(i)) for i in range(1, 11)]
    for _ in range(2):
        found = [diagnostics.value_and_grad(model, X, Y, f).loss for f in losses[::3]]
        found += [diagnostics.value_and_grad(model, X, Y, f).loss for f in losses]
        expected = found[0] * np.array([1, 4, 7, 10, *range(1, 11)])
        np.testing.assert_allclose(found, expected, rtol=1e-6)


class Penalised(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x


def test_a_loss_that_needs_no_targets():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4)])
    model.add(layers.BatchNormalization(name="norm"))
    model.add(layers.Dense(2))
    model.add(Penalised())
    model.compile("sgd")
    outputs = networks.numpy(model(X, training=True))
    loss = diagnostics.value_and_grad(model, X, None).loss
    assert loss == pytest.approx(np.mean(outputs**2), rel=1e-5)
    found = diagnostics.blindness(model, X, None)
    assert found.batches == ("mixed",) and found.changes[0, 0, 0] < 1e-3


def test_a_weight_that_has_no_gradient():
    model = dense(layers.Dense(4, name="dead"), layers.Rescaling(0.0))
    found = diagnostics.weight_geometry(model, X, Y)
    (place,) = (i for i, w in enumerate(found.weights) if w.endswith("dead/kernel"))
    assert found.gradient_norms[place] == 0 and found.invariance[place] == "none"
    assert np.isnan(found.deviations[place]) and np.isnan(found.unit_deviations[place])


class _Block(layers.Layer):
    """Its layers have the same names as those of all others."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(3, name="dense")
        self.norm = layers.BatchNormalization(name="norm")

    def call(self, x):
        return self.norm(self.dense(x))


def test_layers_in_blocks_that_share_a_name_go_by_their_paths():
    inputs = keras.Input((2,))
    middle = _Block(name="two")(_Block(name="one")(inputs))
    model = keras.Model(inputs, layers.Dense(2, name="top")(middle))
    x, y = np.ones((4, 2), "float32"), np.ones((4, 2), "float32")
    assert list(diagnostics.effective_weights(model, x)) == ["one/norm", "two/norm"]
    names = ["one/dense", "two/dense", "top"]
    given = {"loss": "mse", "learning_rate": 0.1}
    for chosen in (None, names):
        found = diagnostics.covariate_shift(model, x, y, layers=chosen, **given)
        kernels = [name for name in found.layers if "norm" not in name]
        assert kernels == names
    assert diagnostics.blindness(model, x, y, "mse").layers == ("one/norm", "two/norm")
    model.compile("sgd", "mse")
    probe = diagnostics.BatchStatistics(x, every=1)
    model.fit(x, y, verbose=0, callbacks=[probe])
    assert {name.rpartition("_")[0].rpartition("_")[0] for name in probe.channels} == {
        "one/norm",
        "two/norm",
    }


def test_a_norm_that_the_model_does_not_call():
    class Idle(ByKeyword):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(name="idle")
            self.norm.build((None, 4))

    model = Idle()
    model(X)
    model.compile("sgd", "mse")
    probe = diagnostics.BatchStatistics(X, every=1)
    with pytest.raises(ValueError, match="does not call layer 'idle'"):
        model.fit(X, Y, verbose=0, callbacks=[probe])


def test_a_model_without_a_kernel():
    model = keras.Sequential([keras.Input((2,)), layers.BatchNormalization()])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`model` must have a layer with a trainable"):
        diagnostics.covariate_shift(model, X[:, :2], Y)


def several():
    """Two inputs and two outputs, by name."""
    inputs = {name: keras.Input((5,), name=name) for name in ("left", "right")}
    x = layers.Concatenate()(list(inputs.values()))
    outputs = {name: layers.Dense(2, name=name)(x) for name in ("up", "down")}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"up": "mse", "down": "mae"})
    return model


def test_several_inputs_and_outputs():
    model = several()
    x, y = {"left": X, "right": 2 * X}, {"up": Y, "down": -Y}
    up, down = (networks.numpy(model(x)[name]) for name in ("up", "down"))
    expected = np.mean((up - Y) ** 2) + np.mean(np.abs(down + Y))
    loss = diagnostics.value_and_grad(model, x, y).loss
    assert loss == pytest.approx(expected, rel=1e-5)
    for wrong in ({"left": X, "right": X[:, :3]}, [X], [X, X[:5]], {"left": X[0]}):
        with pytest.raises(ValueError, match="`x` must .*Received: x"):
            diagnostics.value_and_grad(model, wrong, y)
    with pytest.raises(ValueError, match="`y` must hold a target for each of the 12"):
        diagnostics.value_and_grad(model, x, {"up": Y, "down": Y[:3]})


def test_inputs_may_lack_an_axis_of_one():
    model = keras.Sequential([keras.Input((1,)), layers.Dense(2)])
    losses = [
        diagnostics.value_and_grad(model, x, Y, "mse").loss for x in (X[:, 0], X[:, :1])
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(ValueError, match="`x` must have the shape of the inputs"):
        diagnostics.value_and_grad(model, X, Y, "mse")


def test_weights_that_are_not_there():
    layer = CBN(name="own")
    layer.build((None, 3))
    with pytest.raises(ValueError, match="'own' expected a weight named 'gamma'"):
        layer.load_own_variables({"beta": np.zeros(3)})
