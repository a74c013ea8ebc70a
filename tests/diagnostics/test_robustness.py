"""BIM and accuracies, against a reference that is written from the formulas."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from keras_norms import diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.diagnostics_networks import BACKEND, assert_same, variables

DTYPE = networks.PRECISIONS[-1]
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
rng = np.random.default_rng(0)
W1, W2 = rng.normal(size=(5, 8)), rng.normal(size=(8, 3))
X, Y = rng.uniform(size=(13, 5)).astype(DTYPE), rng.integers(0, 3, 13)


@pytest.fixture(scope="module")
def model():
    with networks.precision(DTYPE):
        model = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(8, "tanh", use_bias=False),
                layers.Dense(3, use_bias=False),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for variable, value in zip(model.variables, (W1, W2)):
        variable.assign(value)
    # To compile takes longer than all attacks on it; other tests do.
    model.compile("sgd", loss, run_eagerly=True)
    return model


def logits(x):
    return np.tanh(x @ W1) @ W2


def slope(x, y):
    """The gradient of the cross-entropy of one sample."""
    h = np.tanh(x @ W1)
    exponentials = np.exp(h @ W2 - np.max(h @ W2))
    p = exponentials / exponentials.sum()
    p[y] -= 1
    return W1 @ ((1 - h**2) * (W2 @ p))


def reference(x, y, epsilon, norm, steps, step_size, low, high):
    """The attack on one sample, in float64."""
    x = x.astype("float64")
    z = x.copy()
    for _ in range(steps):
        g = slope(z, y)
        z = z + step_size * (np.sign(g) if norm == "inf" else g / np.sqrt(g @ g))
        d = z - x
        if norm == "inf":
            d = np.array([min(max(v, -epsilon), epsilon) for v in d])
        elif np.sqrt(d @ d) > epsilon:
            d = d * epsilon / np.sqrt(d @ d)
        z = np.array([min(max(v, low), high) for v in x + d])
    return z


@pytest.mark.parametrize("norm", ["inf", 2])
@pytest.mark.parametrize("step_size", [None, 0.07])
@pytest.mark.parametrize("bounds", [(0, 1), (-0.05, 1.05), None])
def test_bim(model, norm, step_size, bounds):
    low, high = (-np.inf, np.inf) if bounds is None else bounds
    found = diagnostics.bim(
        model,
        X,
        Y,
        epsilon=0.1,
        norm=norm,
        steps=5,
        step_size=step_size,
        bounds=bounds,
        batch_size=4,
        verbose=0,
    )
    assert found.dtype == X.dtype
    expected = [
        reference(x, y, 0.1, norm, 5, step_size or 0.02, low, high)
        for x, y in zip(X, Y)
    ]
    np.testing.assert_allclose(
        found, expected, atol=1e-12 if DTYPE == "float64" else 1e-5
    )


@settings(max_examples=25, deadline=None)
@given(
    st.floats(1e-4, 2),
    st.sampled_from(["inf", 2]),
    st.integers(1, 4),
    st.sampled_from([None, 0.5, 1e-3]),
    st.floats(0.05, 5),
)
def test_the_attack_stays_in_the_ball_and_the_range(
    model, epsilon, norm, steps, step_size, scale
):
    low, high = np.full(5, -scale), np.linspace(0.5, 1, 5) * scale
    x = (low + X * (high - low)).astype(DTYPE)
    found = diagnostics.bim(
        model,
        np.clip(x, low.astype(DTYPE), high.astype(DTYPE)),
        Y,
        epsilon=epsilon,
        norm=norm,
        steps=steps,
        step_size=step_size,
        bounds=(low, high),
        batch_size=len(X),
        verbose=0,
    )
    rounding = np.finfo(DTYPE).eps * (scale + epsilon)
    order = np.inf if norm == "inf" else 2
    lengths = np.linalg.norm(found.astype("float64") - x, order, axis=1)
    assert np.all(lengths <= epsilon + 4 * rounding)
    assert np.all(found >= low.astype(DTYPE)) and np.all(found <= high.astype(DTYPE))
    assert np.any(found != x)


def test_accuracies(model):
    before = variables(model)
    kwargs = {"epsilon": 0.2, "norm": 2, "steps": 3}
    found = diagnostics.robustness(
        model, X, Y, noise=0.3, seed=7, batch_size=5, verbose=0, **kwargs
    )
    assert_same(variables(model), before)

    def accuracy(x):
        return np.mean(np.argmax(logits(x), 1) == Y)

    noise = np.random.default_rng(7).standard_normal(X.shape)
    noisy = accuracy(np.clip(X + 0.3 * noise, 0, 1))
    attacked = accuracy(diagnostics.bim(model, X, Y, verbose=0, **kwargs))
    assert found == diagnostics.Robustness(
        clean=accuracy(X),
        noise=noisy,
        attacked=attacked,
        noise_difference=accuracy(X) - noisy,
        attack_difference=accuracy(X) - attacked,
        without_gradient=0,
        samples=13,
    )
    assert found.attacked < found.clean
    one_hot = np.eye(3)[Y]
    with pytest.raises(ValueError, match="`y` must have labels of 3 classes"):
        diagnostics.robustness(
            model, X, one_hot[:, :2], lambda y, z: z[:, 0], verbose=0
        )
    crossentropy = keras.losses.CategoricalCrossentropy(from_logits=True)
    arguments = {"noise": 0.3, "seed": 7, "batch_size": 13, "verbose": 0, **kwargs}
    assert diagnostics.robustness(model, X, one_hot, crossentropy, **arguments) == found
    columns = Y[:, None]
    assert diagnostics.robustness(model, X, columns, LOSS, **arguments) == found


@pytest.mark.parametrize("norm", ["inf", 2])
def test_accuracy_does_not_rise_with_epsilon(norm):
    """Of two classes and a linear model, where the attack is the worst there is."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(200, 6)).astype("float32")
    kernel = generator.normal(size=(6, 2))
    y = np.argmax(x @ kernel + generator.normal(size=(200, 2)), 1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2, use_bias=False)])
    model.layers[0].kernel.assign(kernel)
    w = kernel[:, 1] - kernel[:, 0]
    margins = np.where(y == 1, 1, -1) * (x @ w)
    dual = np.abs(w).sum() if norm == "inf" else np.sqrt(w @ w)
    accuracies = []
    for epsilon in (0, 0.01, 0.05, 0.2, 1.0, 3.0):
        found = diagnostics.robustness(
            model,
            x,
            y,
            LOSS,
            epsilon=epsilon,
            norm=norm,
            steps=2,
            bounds=None,
            noise=0,
            batch_size=200,
            verbose=0,
        )
        assert found.attacked == np.mean(margins > epsilon * dual)
        assert found.clean == found.noise
        accuracies.append(found.attacked)
    assert accuracies[0] == found.clean
    assert np.all(np.diff(accuracies) <= 0) and accuracies[-1] < 0.1


def test_layers_run_in_inference_mode():
    """So that a sample does not depend on its batch; the state stays."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3),
        ]
    )
    model.compile("sgd", LOSS, run_eagerly=BACKEND == "tensorflow")
    model.fit(X, Y, verbose=0)
    before = variables(model)
    both = [diagnostics.bim(model, X, Y, batch_size=n, verbose=0) for n in (3, 13)]
    np.testing.assert_allclose(*both, atol=1e-6)
    assert_same(variables(model), before)


def test_the_scale_of_an_invariant_kernel_changes_nothing():
    """A larger norm of such weights does not amplify an attack."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            layers.Conv2D(4, 3, padding="same", use_bias=False),
            layers.GroupNormalization(2, epsilon=1e-12),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    x = np.random.default_rng(2).uniform(size=(16, 4, 4, 1)).astype("float32")
    y = np.arange(16) % 3

    def attacked():
        return diagnostics.bim(model, x, y, LOSS, epsilon=0.1, norm=2, verbose=0)

    expected = attacked()
    kernel = model.layers[0].kernel
    kernel.assign(100 * networks.numpy(kernel))
    np.testing.assert_allclose(attacked(), expected, atol=1e-5)


def test_saturated_samples_are_counted():
    model = keras.Sequential(
        [keras.Input((2,)), layers.Dense(2, "softmax", use_bias=False)]
    )
    model.layers[0].kernel.assign(np.eye(2))
    x = np.array([[0, 200], [0.3, 0.2], [200, 0], [0.1, 0.2]], "float32")
    crossentropy = keras.losses.CategoricalCrossentropy()
    labels = np.eye(2)[[1, 0, 0, 0]]
    found = diagnostics.robustness(
        model, x, labels, crossentropy, epsilon=0.1, bounds=(0, 200), verbose=0
    )
    assert found.without_gradient == 0.5
    attacked = diagnostics.bim(
        model, x, labels, crossentropy, epsilon=0.1, bounds=(0, 200), verbose=0
    )
    np.testing.assert_array_equal(attacked[[0, 2]], x[[0, 2]])


def test_a_network_that_is_not_finite_is_never_right():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    model.layers[0].kernel.assign(np.full((5, 3), np.nan))
    found = diagnostics.robustness(model, X, Y, LOSS, verbose=0)
    assert (found.clean, found.noise, found.attacked) == (0, 0, 0)
    attacked = diagnostics.bim(model, X, Y, LOSS, verbose=0)
    np.testing.assert_array_equal(attacked, X)


def test_progress(model, capsys):
    diagnostics.bim(model, X, Y, batch_size=5, verbose=0)
    assert not capsys.readouterr().out
    diagnostics.bim(model, X, Y, batch_size=5)
    assert "3/3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"epsilon": -0.1}, "`epsilon` must be a number, non-negative"),
        ({"epsilon": np.nan}, "`epsilon` must be a number, non-negative"),
        ({"norm": 1}, "`norm` must be one of 'inf', 2"),
        ({"steps": 0}, "`steps` must be an integer, positive"),
        ({"steps": 1.5}, "`steps` must be an integer"),
        ({"step_size": 0}, "`step_size` must be a number, positive"),
        ({"batch_size": 0}, "`batch_size` must be an integer, positive"),
        ({"bounds": (0, 0.5)}, "`bounds` must be the range of `x`"),
        ({"bounds": 1}, "`bounds` must be a pair"),
        ({"verbose": 3}, "`verbose` must be one of"),
        ({"noise": -1}, "`noise` must be a number, non-negative"),
        ({"seed": 0.5}, "`seed` must be an integer"),
        ({"x": X[:0], "y": Y[:0]}, "`x` must be an array of real numbers, with el"),
        ({"x": [X, X]}, "`x` must be one array"),
        ({"x": (10 * X).astype("int32")}, "`x` must be of floats"),
        ({"y": Y[:5]}, "`y` must hold a label for each sample"),
        ({"y": Y + 0.5, "loss": "mse"}, "`y` must be integers of shape"),
        ({"model": keras.Sequential([layers.Dense(2)])}, "keras.Model that is built"),
    ],
)
def test_bad_input(model, arguments, message):
    arguments = {"model": model, "x": X, "y": Y, "verbose": 0, **arguments}
    with pytest.raises(ValueError, match=message):
        diagnostics.robustness(**arguments)


def test_models_that_cannot_be_attacked(model):
    embedding = keras.Sequential(
        [keras.Input((5,)), layers.Embedding(4, 2), layers.Flatten(), layers.Dense(3)]
    )
    for attack in (diagnostics.bim, diagnostics.robustness):
        with pytest.raises(ValueError, match="loss with a gradient with respect to"):
            attack(embedding, np.round(2 * X), Y, LOSS, bounds=(0, 3), verbose=0)
    plain = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
    with pytest.raises(ValueError, match="`loss` must be given"):
        diagnostics.bim(plain, X, Y, verbose=0)
    with pytest.raises(ValueError, match="of at least two classes"):
        diagnostics.robustness(plain, X, Y, "mse", verbose=0)
