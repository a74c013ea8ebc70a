"""What arrives at a layer's input, against the formulas of the papers in float64."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, WS, LpNorm
from keras_norms import diagnostics as probe
from keras_norms.diagnostics.blindness import TERMS
from tests.support import diagnostics_networks as networks

FEATURES = 4
LABELS = np.array([0, 1, 2, 1, 1, 0, 2, 1, 0, 1, 2, 0])
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def build(norm):
    """A norm, and logits of it."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), norm, layers.Dense(3, name="logits")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Not compiled: each gradient is taken a few times only.
    model.compile("sgd", loss, run_eagerly=True)
    return model


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(1.0, 2.0, (len(LABELS), FEATURES))


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def loss_slope(model, outputs, labels):
    """The gradient of the mean cross-entropy with respect to the norm's output."""
    kernel, bias = (
        networks.numpy(v).astype("float64") for v in model.layers[-1].weights
    )
    p = softmax(outputs @ kernel + bias)
    return (p - np.eye(3)[labels]) @ kernel.T / len(labels)


def term_slopes(outputs, deviation=0.1, seed=0):
    """The gradients of the four terms with respect to the norm's output."""
    rng = np.random.default_rng(seed)
    e = rng.normal(0, deviation, FEATURES)
    E = rng.normal(0, deviation, (FEATURES, FEATURES))
    n, c = len(outputs), outputs - outputs.mean(0)
    slopes = np.zeros((4, *outputs.shape))
    for i in range(n):
        for d in range(FEATURES):
            slopes[0, i, d] = e[d]
            slopes[1, i, d] = 2 * e[d] * c[i, d]
            slopes[2, i, d] = sum(
                (E[d, k] + E[k, d]) * c[i, k] for k in range(FEATURES) if k != d
            )
            slopes[3, i, d] = 3 * e[d] * c[i, d] ** 2
    return slopes / n


def bn(x, epsilon):
    return (x - x.mean(0)) / np.sqrt(x.var(0) + epsilon)


def bn_backward(g, x, epsilon):
    """J_d of every feature, written out."""
    y, s = bn(x, epsilon), np.sqrt(x.var(0) + epsilon)
    return (g - g.mean(0) - y * np.mean(g * y, 0)) / s


def cbn_backward(g, x, beta, epsilon):
    """`dx` of CBN with statistics of the batch (rho = 1, gamma = 1)."""
    c = x.mean(0) - beta
    square = np.mean((x - c) ** 2, 0)
    a = 1 / np.sqrt(square + epsilon)
    k = a * np.mean(g * (x - c), 0) / (square + epsilon)
    return a * (g - g.mean(0)) - k * (x - x.mean(0))


def expected(model, x, y, outputs, backward):
    """The changes and shares of `blindness`."""
    g = loss_slope(model, outputs, y)
    slopes = term_slopes(outputs)
    plain = np.linalg.norm(backward(g))
    changes = [np.linalg.norm(backward(g + v) - backward(g)) / plain for v in slopes]
    norms = [np.linalg.norm(v) for v in slopes]
    return np.array(changes), np.array(changes) * np.linalg.norm(g) / norms


@pytest.fixture(params=networks.PRECISIONS)
def dtype(request):
    with networks.precision(request.param):
        yield request.param


def test_batch_normalization_passes_neither_first_nor_diagonal(dtype):
    epsilon, x = 1e-20, inputs().astype(dtype)
    model = build(layers.BatchNormalization(epsilon=epsilon, name="norm"))
    found = probe.blindness(model, x, LABELS)
    assert found.layers == ("norm",)
    assert found.kinds == ("BatchNormalization",)
    assert found.batches == ("mixed", "one label")
    assert found.samples == (12, 5)
    assert found.changes.shape == found.shares.shape == (1, 2, 4)
    for batch, chosen in enumerate([slice(None), LABELS == 1]):
        part = x[chosen].astype("float64")
        changes, shares = expected(
            model,
            part,
            LABELS[chosen],
            bn(part, epsilon),
            lambda g, part=part: bn_backward(g, part, epsilon),
        )
        assert max(found.changes[0, batch, :2]) < 1e-12 + TOLERANCE[dtype] / 5
        np.testing.assert_allclose(
            found.changes[0, batch, 2:], changes[2:], rtol=TOLERANCE[dtype]
        )
        np.testing.assert_allclose(
            found.shares[0, batch, 2:], shares[2:], rtol=TOLERANCE[dtype]
        )


def test_epsilon_lets_the_diagonal_term_pass(dtype):
    x = inputs().astype(dtype)
    model = build(layers.BatchNormalization(epsilon=0.5, center=False, scale=False))
    found = probe.blindness(model, x, LABELS).changes[0, 0]
    wide = x.astype("float64")
    changes, _ = expected(
        model, wide, LABELS, bn(wide, 0.5), lambda g: bn_backward(g, wide, 0.5)
    )
    assert changes[1] > 1e-2
    np.testing.assert_allclose(found[1:], changes[1:], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("beta", [0.0, 0.75])
def test_cbn_is_blind_to_the_first_order_only_where_beta_is_zero(dtype, beta):
    x = inputs().astype(dtype)
    model = build(CBN(beta_initializer=keras.initializers.Constant(beta)))
    found = probe.blindness(model, x, LABELS).changes[0, 0]
    wide, epsilon = x.astype("float64"), 1e-5
    c = wide.mean(0) - beta
    outputs = (wide - c) / np.sqrt(np.mean((wide - c) ** 2, 0) + epsilon)
    changes, _ = expected(
        model, wide, LABELS, outputs, lambda g: cbn_backward(g, wide, beta, epsilon)
    )
    if beta:
        assert changes[0] > 1e-2
        np.testing.assert_allclose(found, changes, rtol=10 * TOLERANCE[dtype])
    else:
        assert found[0] < TOLERANCE[dtype]
        np.testing.assert_allclose(found[2:], changes[2:], rtol=10 * TOLERANCE[dtype])


def test_first_order_slope_of_cbn_is_the_stated_one(dtype):
    """`dx = -(a g beta / sq) (x - mu)` for a slope `g` that all samples share."""
    beta, g, x = 0.7, 0.3, inputs()
    square = np.mean((x - x.mean(0) + beta) ** 2, 0)
    stated = -g * beta / np.sqrt(square) / square * (x - x.mean(0))
    np.testing.assert_allclose(
        cbn_backward(np.full_like(x, g), x, beta, 0.0), stated, rtol=1e-10
    )


@pytest.mark.parametrize(
    ("norm", "passed"),
    [
        (lambda: layers.LayerNormalization(), (True, True)),
        (lambda: layers.GroupNormalization(2), (True, True)),
        (lambda: layers.RMSNormalization(), (True, True)),
        (lambda: LpNorm(1), (False, True)),
        (lambda: LpNorm("inf"), (False, True)),
        (lambda: LpNorm(2, norm_of="centered"), (False, False)),
        (lambda: WS(layers.Dense(FEATURES)), (True, True)),
    ],
    ids=["layer", "group", "rms", "lp1", "lpinf", "lp2 centered", "ws"],
)
def test_what_other_norms_pass(norm, passed):
    found = probe.blindness(build(norm()), inputs().astype("float32"), LABELS)
    for term, share in zip(passed, found.shares[0, 0]):
        assert share > 1e-2 if term else share < 1e-3
    assert (found.shares[0, :, 2:] > 1e-2).all()


def test_shared_part_of_the_gradient():
    """It is larger where all samples have one label."""
    x = inputs().astype("float32")
    model = build(layers.BatchNormalization(epsilon=1e-20))
    found = probe.blindness(model, x, LABELS).shared[0]
    for batch, chosen in enumerate([slice(None), LABELS == 1]):
        part = x[chosen].astype("float64")
        g = loss_slope(model, bn(part, 1e-20), LABELS[chosen])
        expected = np.sqrt(len(g)) * np.linalg.norm(g.mean(0)) / np.linalg.norm(g)
        assert found[batch] == pytest.approx(expected, rel=1e-4)
    assert found[1] > found[0]


def test_a_slice_of_the_model():
    """From a Dense layer to the norm behind it, as one."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(5, name="hidden"),
            layers.BatchNormalization(epsilon=1e-20, name="norm"),
            layers.Dense(3, name="logits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = inputs().astype("float32")
    found = probe.blindness(model, x, LABELS, loss, layers=["norm"], source="hidden")
    assert max(found.changes[0, 0, :2]) < 1e-5
    assert min(found.changes[0, 0, 2:]) > 1e-2


def test_a_channel_of_a_convolution_is_one_feature():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Conv2D(3, 3),
            layers.BatchNormalization(epsilon=1e-20),
            layers.Activation("tanh"),
            layers.GroupNormalization(1),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    x = np.random.default_rng(0).normal(size=(len(LABELS), 5, 5, 2)).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = probe.blindness(model, x, LABELS, loss)
    assert found.kinds == ("BatchNormalization", "GroupNormalization")
    assert (found.shares[0, :, :2] < 1e-4).all()
    assert (found.shares[1] > 1e-3).all()


def test_nothing_of_the_model_changes():
    model = networks.build("NoisyBN")
    x, y = networks.batch(24)
    before = networks.variables(model)
    first = probe.blindness(model, x, y)
    probe.second_order(model, x, y, layer=first.layers[0])
    networks.assert_same(networks.variables(model), before)
    again = probe.blindness(model, x, y)
    np.testing.assert_array_equal(first.changes, again.changes)
    assert "call" not in vars(model.layers[1])


def test_second_order_against_the_formulas(dtype):
    """H of softmax and a linear layer is W (diag p - p p^T) W^T, at the mean output."""
    x, epsilon = inputs().astype(dtype), 1e-20
    norm = layers.BatchNormalization(
        epsilon=epsilon,
        gamma_initializer=keras.initializers.RandomUniform(0.5, 2.0, seed=0),
        beta_initializer=keras.initializers.Constant(0.25),
        name="norm",
    )
    model = build(norm)
    found = probe.second_order(model, x, LABELS, layer="norm")

    gamma = networks.numpy(norm.gamma).astype("float64")
    kernel, bias = (
        networks.numpy(v).astype("float64") for v in model.layers[-1].weights
    )
    p = softmax(np.full((1, FEATURES), 0.25) @ kernel + bias)[0]
    hessian = kernel @ (np.diag(p) - np.outer(p, p)) @ kernel.T
    tolerance = 10 * TOLERANCE[dtype]
    np.testing.assert_allclose(found.hessian, hessian, rtol=tolerance, atol=tolerance)

    wide = x.astype("float64")
    y = bn(wide, epsilon)  # without affine weights, as in the paper
    H = hessian * np.outer(gamma, gamma)
    off = H - np.diag(np.diag(H))
    for d in range(FEATURES):
        o = y[:, d] / np.linalg.norm(y[:, d])
        Y_linear = np.outer(y.T @ o, o)
        slopes = off[d] @ Y_linear, off[d] @ (y.T - Y_linear)
        whole = np.linalg.norm(off[d] @ y.T)
        s = np.std(wide[:, d])
        n = len(y)
        J = (np.eye(n) - 1 / n - np.outer(y[:, d], y[:, d]) / n) / s
        assert np.linalg.norm(J @ slopes[0]) < 1e-14
        assert found.linear_at_input[d] < TOLERANCE[dtype] / 10
        arrived = np.linalg.norm(J @ slopes[1])
        assert found.non_at_input[d] == pytest.approx(arrived, rel=tolerance)
        for share, slope in zip((found.linear[d], found.non[d]), slopes):
            assert share == pytest.approx(np.linalg.norm(slope) / whole, rel=tolerance)


def test_features_that_do_not_vary_are_left_out():
    x = inputs().astype("float32")
    x[:, 2] = 1.0
    model = build(layers.BatchNormalization(epsilon=1e-20, name="norm"))
    found = probe.second_order(model, x, LABELS, layer="norm")
    np.testing.assert_array_equal(np.isnan(found.linear), [False, False, True, False])
    assert max(probe.blindness(model, x, LABELS).changes[0, 0, :2]) < 1e-5


def test_table():
    found = probe.blindness(
        build(LpNorm(name="norm")), inputs().astype("float32"), LABELS
    )
    header, mixed, one_label = str(found).splitlines()
    assert header.split() == ["layer", "kind", "batch", *TERMS, "shared"]
    assert mixed.split()[:4] == ["norm", "LpNorm", "mixed", "(12)"]
    assert one_label.split()[:5] == ["norm", "LpNorm", "one", "label", "(5)"]
    assert float(mixed.split()[6]) == pytest.approx(found.changes[0, 0, 2], rel=0.05)


def test_batches():
    model, x = build(CBN()), inputs().astype("float32")
    ones = np.ones_like(LABELS)
    assert probe.blindness(model, x, ones).batches == ("one label",)
    targets = np.eye(3)[LABELS]
    assert probe.blindness(model, x, targets, "mse").batches == ("mixed",)
    found = probe.blindness(model, x, targets, "mse", labels=LABELS)
    assert found.batches == ("mixed", "one label")


def test_bad_input():
    model, x = build(layers.BatchNormalization(name="norm")), inputs()
    with pytest.raises(ValueError, match="`layers` must hold layers of model"):
        probe.blindness(model, x, LABELS, layers=["other"])
    with pytest.raises(ValueError, match="`layer` must be a layer of model"):
        probe.second_order(model, x, LABELS, layer="other")
    with pytest.raises(ValueError, match="a batch of at least one sample"):
        probe.blindness(model, x[:0], LABELS[:0])
    with pytest.raises(ValueError, match="`deviation` must be a number, positive"):
        probe.blindness(model, x, LABELS, deviation=0)
    with pytest.raises(ValueError, match="`labels` must be an integer for each"):
        probe.blindness(model, x, LABELS, labels=[0.5, 1.5])
    plain = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="d")])
    with pytest.raises(ValueError, match="where a model has no normalisation"):
        probe.blindness(plain, x, LABELS, "mse")
    with pytest.raises(ValueError, match="must be a keras.Model"):
        probe.blindness(None, x, LABELS)
    images = keras.Sequential([keras.Input((2, 2, 1)), layers.GroupNormalization(1)])
    x, y = np.ones((3, 2, 2, 1)), np.ones((3, 2, 2, 1))
    with pytest.raises(ValueError, match="output of shape .samples, features."):
        probe.second_order(images, x, y, "mse", layer=images.layers[-1])
