"""BIM and accuracies, against a reference that is written from the formulas."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference
from tests.support.backend import later_on_jax, precision
from tests.support.diagnostics_networks import float64, sequential

rng = np.random.default_rng(0)
W1, W2 = rng.normal(size=(5, 8)), rng.normal(size=(8, 3))
X, Y = rng.uniform(size=(13, 5)).astype(networks.WIDEST), rng.integers(0, 3, 13)
MEAN, VARIANCE = rng.normal(size=8), rng.uniform(0.5, 1, 8)


@pytest.fixture(scope="module")
def model():
    """Its layers run in inference mode: no sample depends on its batch."""
    with precision(networks.WIDEST):
        first = layers.Dense(8, "tanh", use_bias=False)
        norm = layers.BatchNormalization(epsilon=0, center=False, scale=False)
        last = layers.Dense(3, use_bias=False)
        model = sequential(first, norm, layers.Dropout(0.5), last, run_eagerly=False)
    for variable, value in zip(model.weights, (W1, MEAN, VARIANCE, W2)):
        variable.assign(value)
    return model


def logits(x):
    return (np.tanh(x @ W1) - MEAN) / np.sqrt(VARIANCE) @ W2


def attacked(x, y, norm, step_size, low, high):
    """Five steps of the attack on one sample, in a ball of radius 0.1, in float64."""

    def cross_entropy(x):
        return np.log(np.sum(np.exp(logits(x)))) - logits(x)[y]

    x = z = x.astype("float64")
    for _ in range(5):
        g = reference.gradient(cross_entropy, z)
        if norm == "inf":
            d = np.clip(z - x + step_size * np.sign(g), -0.1, 0.1)
        else:
            d = z - x + step_size * g / np.sqrt(g @ g)
            d = d * min(1, 0.1 / np.sqrt(d @ d))
        z = np.clip(x + d, low, high)
    return z


BOX = -0.05, np.linspace(1, 1.2, 5)
SETTINGS = [(None, (0, 1)), (0.5, BOX), (0.07, None)]


@pytest.mark.parametrize("norm", ["inf", 2])
@pytest.mark.parametrize("step_size, bounds", SETTINGS)
def test_bim(model, norm, step_size, bounds):
    attack = {"norm": norm, "steps": 5, "step_size": step_size, "bounds": bounds}
    found = diagnostics.bim(model, X, Y, epsilon=0.1, batch_size=4, verbose=0, **attack)
    assert found.dtype == X.dtype
    at = norm, step_size or 0.02, *(bounds or (-np.inf, np.inf))
    expected = [attacked(x, y, *at) for x, y in zip(X, Y)]
    rounding = 1e-12 if networks.WIDEST == "float64" else 1e-5
    np.testing.assert_allclose(found, expected, atol=rounding)
    found = diagnostics.bim(model, X, Y, epsilon=0, verbose=0, **attack)
    np.testing.assert_array_equal(found, X)


@later_on_jax
def test_accuracies(model):
    attack = {"epsilon": 0.6, "norm": 2, "steps": 3, "verbose": 0}
    noise = {"noise": 0.3, "seed": 7}
    robustness = functools.partial(diagnostics.robustness, model, X, **attack, **noise)

    def accuracy(x):
        return np.mean(np.argmax(logits(x), 1) == Y)

    before = networks.variables(model)
    found = robustness(Y, batch_size=5)
    networks.assert_same(networks.variables(model), before)
    noise = np.random.default_rng(7).standard_normal(X.shape)
    noisy = accuracy(np.clip(X + 0.3 * noise, 0, 1))
    worst = accuracy(diagnostics.bim(model, X, Y, **attack))
    clean = accuracy(X)
    expected = clean, noisy, worst, clean - noisy, clean - worst, 0, len(X)
    assert found == diagnostics.Robustness(*expected) and worst < clean
    one_hot = np.eye(3)[Y]
    assert robustness(Y[:, None], batch_size=13) == found
    assert robustness(one_hot, keras.losses.CategoricalCrossentropy(True)) == found
    with pytest.raises(ValueError, match="`y` must have labels of 3 classes"):
        robustness(one_hot[:, :2], lambda y, z: z[:, 0])
    for labels in (np.eye(4)[Y], Y + 1, Y - 1):
        with pytest.raises(ValueError, match="`y` must have labels of 3 classes"):
            diagnostics.bim(model, X, labels, verbose=0, bounds=None)


@later_on_jax
def test_samples_without_a_gradient_stay_and_are_counted(capsys):
    model = sequential(layers.Dense(2, "softmax", use_bias=False), shape=(2,))
    model.set_weights([np.eye(2)])
    x = np.array([[0, 200], [0.3, 0.2], [200, 0], [0.1, 0.2]], "float32")
    loss, labels = keras.losses.CategoricalCrossentropy(), np.eye(2)[[1, 0, 0, 0]]
    attack = {"epsilon": 0.1, "bounds": (0, 200)}
    found = diagnostics.robustness(model, x, labels, loss, verbose=0, **attack)
    assert found.without_gradient == 0.5
    assert not capsys.readouterr().out
    attacked = diagnostics.bim(model, x, labels, loss, batch_size=3, **attack)
    np.testing.assert_array_equal(attacked[[0, 2]], x[[0, 2]])
    assert "2/2" in capsys.readouterr().out
    # Nor if a batch after the first has nothing else.
    last = x[[1, 0]], labels[[1, 0]]
    quiet = {"batch_size": 1, "verbose": 0}
    attacked = diagnostics.bim(model, *last, loss, **quiet, **attack)
    np.testing.assert_array_equal(attacked[1], x[0])
    # A network that is not finite is never right, and gives no direction.
    model.set_weights([np.full((2, 2), np.nan)])
    attacked = diagnostics.bim(model, x, labels, loss, verbose=0, **attack)
    np.testing.assert_array_equal(attacked, x)
    found = diagnostics.robustness(model, x, labels, loss, verbose=0, **attack)
    assert (found.clean, found.noise, found.attacked) == (0, 0, 0)


@later_on_jax
def test_float16_gradients_of_confident_samples_are_kept():
    """Of others too, whose gradients are infinite at the scale that these need."""
    found = {}
    for policy in ("float32", "mixed_float16"):
        with precision(policy):
            model = sequential(layers.Dense(8, "tanh"), layers.Dense(3))
        model.set_weights([W1, np.zeros(8), 30 * W2, np.zeros(3)])
        labels = np.argmax(float64(model(X)), 1)
        wrong = np.arange(len(X)) % 4 == 0
        labels = np.where(wrong, (labels + 1) % 3, labels)
        attack = {"epsilon": 0.01, "steps": 1, "verbose": 0}
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        moved = diagnostics.bim(model, X, labels, loss, **attack) - X
        found[policy] = np.sign(np.round(moved, 6))
        logits = np.sort(float64(model(X)), 1)
        margins = np.where(wrong, 0, logits[:, -1] - logits[:, -2])
        # float16 has nothing between 0 and exp(-16.6).
        assert np.sum((margins > 17) & (margins < 40)) > 2
    wide, narrow = (signs[margins < 40] for signs in found.values())
    assert np.mean(wide != 0) > 0.9 and np.mean(narrow == wide) > 0.97


@later_on_jax
def test_models_that_cannot_be_attacked():
    embedding = sequential(layers.Embedding(4, 2), layers.Flatten(), layers.Dense(3))
    with pytest.raises(ValueError, match="loss with a gradient with respect to"):
        diagnostics.bim(embedding, np.round(2 * X), Y, bounds=(0, 3), verbose=0)
    with pytest.raises(ValueError, match="two classes or more"):
        diagnostics.robustness(sequential(layers.Dense(1)), X, Y, "mse", verbose=0)
