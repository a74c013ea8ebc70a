"""What arrives at a layer's input, against the formulas of the papers in float64."""

import functools

import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import softmax

from keras_norms import CBN, WS, LpNorm
from keras_norms import diagnostics as probe
from keras_norms.diagnostics.blindness import TERMS
from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference
from tests.support.backend import BACKEND, later_on_jax, precision, some
from tests.support.diagnostics_networks import float64
from tests.support.diagnostics_reference import at_input, normalized

FEATURES = 4
LABELS = np.array([0, 1, 2, 1, 1, 0, 2, 1])
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def build(*norms, shape=(FEATURES,)):
    """Norms, and logits of what they return."""
    return networks.sequential(*norms, layers.Dense(3, name="logits"), shape=shape)


def inputs(dtype="float32"):
    rng = np.random.default_rng(0)
    return rng.normal(1.0, 2.0, (len(LABELS), FEATURES)).astype(dtype)


lengths = functools.partial(np.linalg.norm, axis=(1, 2))
usual = {"epsilon": 1e-20, "name": "norm"}
batch_normalization = functools.partial(layers.BatchNormalization, **usual)


def term_slopes(outputs):
    """The gradients of the four terms with respect to the norm's output."""
    rng = np.random.default_rng(0)
    e, E = rng.normal(0, 0.1, FEATURES), rng.normal(0, 0.1, (FEATURES, FEATURES))
    E -= np.diag(np.diag(E))

    def terms(y):
        c = y - outputs.mean(0)
        return np.mean([y @ e, c**2 @ e, np.sum(c @ E * c, 1), c**3 @ e], 1)

    return [reference.gradient(lambda y, i=i: terms(y)[i], outputs) for i in range(4)]


def cbn(beta=0.0):
    return CBN(beta_initializer=keras.initializers.Constant(beta))


large = functools.partial(batch_normalization, epsilon=0.5, center=False, scale=False)
# Layer, what the reference takes, which terms it blocks, and how rounding grows.
KINDS = {
    "bn": (batch_normalization, {}, [1, 1, 0, 0], 1),
    "large epsilon": (large, {"epsilon": 0.5}, [1, 0, 0, 0], 1),
    "cbn": (cbn, {"epsilon": 1e-5}, [1, 0, 0, 0], 10),
    "with a beta": (lambda: cbn(0.75), {"beta": 0.75, "epsilon": 1e-5}, [0] * 4, 10),
}


@pytest.mark.parametrize("dtype", networks.PRECISIONS)
@pytest.mark.parametrize("kind", some(KINDS, ["bn"] if BACKEND == "jax" else KINDS))
def test_changes_and_shares_are_those_of_the_formulas(kind, dtype):
    layer, kind, blocked, factor = KINDS[kind]
    tolerance = factor * TOLERANCE[dtype]
    with precision(dtype):
        model, x = build(layer()), inputs(dtype)
    before = networks.variables(model)
    found = probe.blindness(model, x, LABELS)
    networks.assert_same(networks.variables(model), before)
    assert found.samples == (8, 4)
    kernel, bias = map(float64, model.layers[-1].weights)
    for batch, chosen in enumerate([slice(None), LABELS == 1]):
        part = x[chosen].astype("float64")
        outputs = normalized(part, **kind)
        # The gradient of the mean cross-entropy with respect to the norm's output.
        g = softmax(outputs @ kernel + bias, 1) - np.eye(3)[LABELS[chosen]]
        g = g @ kernel.T / len(part)
        slopes = term_slopes(outputs)
        arrived = np.stack([at_input(slope, part, **kind) for slope in slopes])
        changes = lengths(arrived) / np.linalg.norm(at_input(g, part, **kind))
        shares = changes * np.linalg.norm(g) / lengths(slopes)
        np.testing.assert_array_equal(changes < 1e-9, blocked)
        assert np.all(found.changes[0, batch, changes < 1e-9] < 1e-12 + tolerance / 5)
        passed = changes > 1e-2  # CBN's epsilon passes a little of the diagonal term.
        for values, expected in ((found.changes, changes), (found.shares, shares)):
            np.testing.assert_allclose(
                values[0, batch, passed], expected[passed], rtol=tolerance
            )
        shared = np.sqrt(len(g)) * np.linalg.norm(g.mean(0)) / np.linalg.norm(g)
        assert found.shared[0, batch] == pytest.approx(shared, rel=1e-4)
    assert found.shared[0, 1] > found.shared[0, 0]


@later_on_jax
def test_float16_gradients_are_scaled_as_in_training():
    def find(factor):
        with precision("mixed_float16"):
            model = build(layers.LayerNormalization())
        model.set_weights([w + 0.5 for w in weights])

        def loss(y, logits):
            return factor * keras.losses.sparse_categorical_crossentropy(
                y, logits, True
            )

        networks.compiled(model, loss)
        found = probe.blindness(model, inputs(), LABELS)
        return np.stack([found.changes * factor, found.shares])

    rng = np.random.default_rng(0)
    weights = [
        rng.normal(size=w.shape) for w in build(layers.LayerNormalization()).weights
    ]
    np.testing.assert_allclose(find(1e-6), find(1), rtol=0.02)


@later_on_jax
def test_what_other_norms_pass():
    norms = [LpNorm(1), LpNorm("inf"), LpNorm(2, norm_of="centered")]
    norms += [layers.LayerNormalization(), layers.RMSNormalization()]
    norms.append(WS(layers.Dense(FEATURES)))
    found = probe.blindness(build(*norms), inputs(), LABELS)
    assert found.kinds == tuple(type(norm).__name__ for norm in norms)
    first, diagonal, *others = np.moveaxis(found.shares, -1, 0)
    assert np.max(first[:3]) < 1e-3 > np.max(diagonal[2])
    for shares in (first[3:], diagonal[:2], diagonal[3:], *others):
        assert np.min(shares) > 1e-2


@later_on_jax
def test_in_inference_all_terms_pass():
    """Zhou et al., Corollary 1; the moving variance is 1 in all channels."""
    model = build(batch_normalization())
    found = probe.blindness(model, inputs(), LABELS, training=False)
    np.testing.assert_allclose(found.shares, 1.0, rtol=1e-4)


@later_on_jax
def test_parts_of_a_model_and_features_that_do_not_vary():
    """From a Dense layer to the norm after it, as one; such features are left out."""
    model, x = build(layers.Dense(5, name="hidden"), batch_normalization()), inputs()
    x[:, 2] = 1.0
    found = probe.blindness(model, x, LABELS, layers=["norm"], source="hidden")
    assert max(found.changes[0, 0, :2]) < 1e-5 < 1e-2 < min(found.changes[0, 0, 2:])
    model = build(batch_normalization())
    found = probe.second_order(model, x, LABELS, layer="norm")
    np.testing.assert_array_equal(np.isnan(found.linear), [0, 0, 1, 0])
    assert max(probe.blindness(model, x, LABELS).changes[0, 0, :2]) < 1e-5


@later_on_jax
def test_a_channel_of_a_convolution_is_one_feature():
    stack = [layers.Conv2D(3, 3), batch_normalization(), layers.Activation("tanh")]
    stack += [layers.GroupNormalization(1), layers.GlobalAveragePooling2D()]
    x = np.random.default_rng(0).normal(size=(len(LABELS), 4, 4, 2)).astype("float32")
    found = probe.blindness(build(*stack, shape=(4, 4, 2)), x, LABELS)
    assert found.kinds == ("BatchNormalization", "GroupNormalization")
    assert (found.shares[0, :, :2] < 1e-4).all() and (found.shares[1] > 1e-3).all()


@pytest.mark.parametrize("dtype", networks.PRECISIONS)
def test_second_order_against_the_formulas(dtype):
    """H of softmax and a linear layer is W (diag p - p p^T) W^T, at the mean output."""
    with precision(dtype):
        norm = batch_normalization(beta_initializer=keras.initializers.Constant(0.25))
        model, x = build(norm), inputs(dtype)
    norm.gamma.assign([0.5, 1, 1.5, 2])
    found = probe.second_order(model, x, LABELS, layer="norm")

    gamma = float64(norm.gamma)
    kernel, bias = map(float64, model.layers[-1].weights)
    p = softmax(np.full(FEATURES, 0.25) @ kernel + bias)
    hessian = kernel @ (np.diag(p) - np.outer(p, p)) @ kernel.T
    tolerance = 10 * TOLERANCE[dtype]
    np.testing.assert_allclose(found.hessian, hessian, rtol=tolerance, atol=tolerance)

    wide = x.astype("float64")
    y = normalized(wide)  # without affine weights, as in the paper
    H = hessian * np.outer(gamma, gamma)
    size = functools.partial(np.linalg.norm, axis=0)  # of each feature
    o = y / size(y)
    whole = y @ (H - np.diag(np.diag(H)))
    linear = np.sum(whole * o, 0) * o
    for values, expected in (
        (found.linear, size(linear) / size(whole)),
        (found.non, size(whole - linear) / size(whole)),
        (found.non_at_input, size(at_input(whole - linear, wide))),
    ):
        np.testing.assert_allclose(values, expected, rtol=tolerance)
    assert found.linear_at_input.max() < TOLERANCE[dtype] / 10


@later_on_jax
def test_samples_that_a_mask_hides():
    """From a layer before, or as an argument."""
    x, shown = inputs(), LABELS > 0
    x[~shown] = 0
    masked = build(layers.Masking(), batch_normalization())
    plain = build(batch_normalization())
    found = []
    for model, *batch in ((masked, x, LABELS), (plain, x[shown], LABELS[shown])):
        networks.randomize(model)
        found.append(probe.second_order(model, *batch, layer="norm"))
    for values, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(values, wanted, rtol=1e-3, atol=1e-6)

    given = keras.Input((FEATURES,)), keras.Input((), dtype="bool")
    outputs = layers.Dense(3)(cbn()(given[0], mask=given[1]))
    model = networks.compiled(keras.Model(given, outputs))
    found = probe.blindness(model, (x, shown), LABELS)
    assert found.changes[0, 0, 0] < 1e-5 < 1e-2 < found.changes[0, 0, 2]


@later_on_jax
def test_batches_and_table():
    model, x = build(LpNorm(name="norm")), inputs()
    twice = ["norm", model.get_layer("norm")]
    found = probe.blindness(model, x, np.ones(8, int), layers=twice)
    assert (found.layers, found.batches) == (("norm",), ("one label",))
    targets = np.eye(3)[LABELS], "mse"
    assert probe.blindness(model, x, *targets).batches == ("mixed",)
    found = probe.blindness(model, x, *targets, labels=LABELS)
    header, mixed, one_label = str(found).splitlines()
    assert header.split()[3:] == [*TERMS, "shared"]
    assert one_label.split()[:5] == ["norm", "LpNorm", "one", "label", "(4)"]
    assert float(mixed.split()[6]) == pytest.approx(found.changes[0, 0, 2], rel=0.05)


def test_models_that_do_not_fit():
    behind = build(batch_normalization())
    with pytest.raises(ValueError, match="`source` must be a layer on whose input"):
        probe.blindness(behind, inputs(), LABELS, source="logits")
    with pytest.raises(ValueError, match="`axis` must be .*axis=7"):
        probe.blindness(behind, inputs(), LABELS, axis=7)
    with pytest.raises(ValueError, match="if a model has no normalisation"):
        probe.blindness(build(), inputs(), LABELS)
    norm, x = layers.GroupNormalization(1), np.ones((3, 2, 2, 1))
    images = networks.sequential(norm, shape=(2, 2, 1), loss="mse")
    with pytest.raises(ValueError, match="output of shape .samples, features."):
        probe.second_order(images, x, x, layer=norm)
