"""Models as they also are: called by keyword, with names twice, without targets."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.backend import numpy, thorough_on
from tests.support.diagnostics_networks import compiled, float64, sequential

pytestmark = thorough_on("jax")
X, Y = networks.regression_batch()
X = X.astype("float32")


class ByKeyword(keras.Model):
    """No argument `training`, a layer called by keyword, and one not called."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(4, "tanh"), layers.Dense(2)
        self.idle = layers.BatchNormalization(name="idle")
        self.idle.build((None, 4))

    def call(self, x):
        return self.second(inputs=self.first(inputs=x))


def test_a_layer_that_is_called_by_keyword_and_one_that_is_not():
    model = compiled(ByKeyword(), "mse")
    outputs = numpy(model(X))
    loss, gradient = diagnostics.value_and_grad(
        model, X, Y, layer=model.second, side="input"
    )
    assert loss == pytest.approx(np.mean((outputs - Y) ** 2), rel=1e-6)
    expected = 2 * (outputs - Y) @ float64(model.second.kernel).T / Y.size
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="called once by the model, not 0 times"):
        diagnostics.value_and_grad(model, X, Y, layer="idle")
    probe = diagnostics.BatchStatistics(X, every=1)
    with pytest.raises(ValueError, match="does not call layer 'idle'"):
        model.fit(X, Y, verbose=0, callbacks=[probe])


def test_a_loss_that_needs_no_targets():
    norm = layers.BatchNormalization(name="norm")
    model = networks.Subclassed([layers.Dense(4), norm, layers.Dense(2)])
    model.compile("sgd", run_eagerly=True)
    outputs = numpy(model(X, training=True))
    loss = diagnostics.value_and_grad(model, X, None).loss
    assert loss == pytest.approx(0.1 * np.mean(outputs**2), rel=1e-5)
    found = diagnostics.blindness(model, X, None)
    assert found.batches == ("mixed",) and found.changes[0, 0, 0] < 1e-3


def test_layers_in_blocks_that_share_a_name_go_by_their_paths():
    def block(name):
        pair = layers.Dense(3, name="dense"), layers.BatchNormalization(name="norm")
        return keras.Sequential(pair, name=name)

    inputs = keras.Input((5,))
    top = layers.Dense(2, name="top")(block("two")(block("one")(inputs)))
    model = compiled(keras.Model(inputs, top), "mse")
    with pytest.raises(ValueError, match="name of only one. .*the name of 2 layers"):
        diagnostics.value_and_grad(model, X, Y, layer="norm")
    one = model.get_layer("one").layers[1]
    assert diagnostics.value_and_grad(model, X, Y, layer=one).gradient.shape == (8, 3)
    norms = ["one/norm", "two/norm"]
    assert list(diagnostics.effective_weights(model, X)) == norms
    names = ["one/dense", "two/dense", "top"]
    for chosen in (None, names):
        found = diagnostics.covariate_shift(model, X, Y, layers=chosen)
        assert [name for name in found.layers if "norm" not in name] == names
    assert list(diagnostics.blindness(model, X, Y).layers) == norms
    probe = diagnostics.BatchStatistics(X, every=1)
    model.fit(X, Y, verbose=0, callbacks=[probe])
    ends = ("mean_distance", "variance_distance")
    assert set(probe.channels) == {f"{name}_{end}" for name in norms for end in ends}


def test_inputs_may_lack_an_axis_of_one():
    model = sequential(layers.Dense(2), shape=(1,), loss="mse")
    losses = [diagnostics.value_and_grad(model, x, Y).loss for x in (X[:, 0], X[:, :1])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_weights_that_are_not_there():
    layer = CBN(name="own")
    layer.build((None, 3))
    with pytest.raises(ValueError, match="'own' expected a weight named 'gamma'"):
        layer.load_own_variables({"beta": np.zeros(3)})
