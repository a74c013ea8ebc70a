"""Callbacks that follow weights: their numbers, and Lemma 3."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, WS, FusedCBN, diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.backend import precision
from tests.support.diagnostics_networks import WIDEST, float64, train

TOLERANCE = 1e-8 if WIDEST == "float64" else 2e-3  # of differences of near squares
RATE = 0.125  # exact in float32, which Keras keeps it in


def network(norm=None):
    with precision(WIDEST):
        return networks.sequential(
            layers.Dense(6, use_bias=False, name="first"),
            norm or layers.BatchNormalization(epsilon=1e-12, name="norm"),
            layers.Activation("tanh"),
            layers.Dense(networks.CLASSES, name="last"),
            optimizer=keras.optimizers.SGD(RATE),
            run_eagerly=networks.EAGER,
        )


def test_growth_of_weights_that_are_invariant_and_that_are_not():
    """Lemma 3: |W|^2 grows by rate^2 |gradient|^2, of the gradient of the step."""
    growth = diagnostics.WeightGrowth()
    model = network()
    x, y = networks.batch(size=24)
    x = x.astype("float32")  # what `fit` makes of it
    before = float64(model.get_layer("first").kernel)
    gradient = diagnostics.value_and_grad(model, x[:8], y[:8]).gradient[0]
    gradient = np.linalg.norm(gradient.astype("float64"))
    train(model, growth, epochs=4)
    after = np.sum(float64(model.get_layer("first").kernel) ** 2)
    history = {key: np.array(values) for key, values in growth.history.items()}
    assert history["step"].tolist() == list(range(12))

    def of(layer):
        keys = "norm", "step", "growth", "cosine"
        return (history[f"{layer}_{key}"] for key in keys)

    norm, step, growth, cosine = of("first")
    assert norm[0] ** 2 == pytest.approx(np.sum(before**2))
    assert step[0] == pytest.approx(RATE * gradient, rel=1e-5)
    expected = pytest.approx((RATE * gradient) ** 2, rel=TOLERANCE)
    assert growth[0] == expected and norm[1] ** 2 - norm[0] ** 2 == expected
    assert abs(cosine[0]) < TOLERANCE
    rounding = 1e-10 if WIDEST == "float64" else 1e-5
    assert after == pytest.approx(norm[0] ** 2 + np.sum(step**2), rel=rounding)
    # The definition holds for what is not scale-invariant too; the lemma does not.
    norm, step, growth, cosine = of("last")
    np.testing.assert_allclose(np.diff(norm**2), growth[:-1], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(cosine, (growth / step - step) / 2 / norm, rtol=1e-6)
    assert np.abs(cosine).max() > 0.05


def test_batch_statistics():
    x, _ = networks.batch(size=24)
    model = network()
    norm, dense = model.get_layer("norm"), model.get_layer("first")
    rng = np.random.default_rng(2)
    for variable in norm.variables:
        variable.assign(rng.uniform(0.5, 2, variable.shape))
    gamma, beta, moving_mean, moving_variance = map(float64, norm.variables)
    outputs = x @ float64(dense.kernel)
    moving = diagnostics.BatchStatistics()
    of_batch = diagnostics.BatchStatistics(x, ["norm", norm])
    logs = train(model, moving, of_batch, size=8).history
    for probe, mean, variance in (
        (moving, moving_mean, moving_variance),
        (of_batch, outputs.mean(0), outputs.var(0)),
    ):
        for key, expected in (
            ("norm_variance_distance", np.abs(gamma**2 - variance)),
            ("norm_mean_distance", np.abs(beta - mean)),
        ):
            (found,) = probe.channels[key]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
            assert probe.history[key] == [pytest.approx(expected.mean(), rel=1e-4)]
    history = of_batch.history["norm_mean_distance"]
    assert logs["statistics_norm_mean_distance"] == history


def test_batch_statistics_leave_out_the_cbn_in_a_fused_cbn():
    x, _ = networks.batch()
    fused = FusedCBN(layers.Dense(4), name="fused")
    with precision(WIDEST):
        model = networks.sequential(CBN(name="norm"), fused, layers.Dense(3))
    statistics = diagnostics.BatchStatistics(x)
    train(model, statistics)
    assert {name.split("_")[0] for name in statistics.channels} == {"norm"}


def test_batch_statistics_of_every_step():
    """Alone, where nothing else brings the state from JAX."""

    class Watch(keras.callbacks.Callback):
        seen = []

        def on_train_batch_begin(self, batch, logs=None):
            norm = self.model.get_layer("norm")
            self.seen.append(np.abs(float64(norm.beta) - float64(norm.moving_mean)))

    statistics = diagnostics.BatchStatistics(every=1)
    train(network(), statistics, Watch(), size=24)
    found = statistics.channels["norm_mean_distance"]
    np.testing.assert_allclose(found, Watch.seen, rtol=1e-6)
    assert len(found) > 2 and np.all(found[-1] > 0)


def test_names_of_kernels():
    inside = keras.Sequential([layers.Dense(3, name="same")], name="inside")
    outer, ws = layers.Dense(3, name="same"), WS(layers.Dense(4, name="ws"), name="ws")
    fixed = layers.Dense(2, name="fixed", trainable=False)
    model = networks.sequential(ws, inside, outer, fixed, loss="mse")
    paths = {inside.layers[0].kernel.path, outer.kernel.path}
    for chosen, expected in (
        (None, {"ws", *paths}),
        (["ws"], {"ws"}),
        ([inside], {"same"}),
        (["same"], paths),
    ):
        growth = diagnostics.WeightGrowth(chosen)
        model.fit(*networks.regression_batch(), callbacks=[growth], verbose=0)
        assert {f"{name}_norm" for name in expected} <= growth.history.keys()
        assert len(growth.history) == 1 + 4 * len(expected)


def test_layers_that_cannot_be_followed():
    growth, statistics = diagnostics.WeightGrowth, diagnostics.BatchStatistics
    model, (x, _) = network(CBN(name="norm")), networks.batch()
    for probe, message in (
        (growth(["none"]), "must hold layers of model"),
        (growth(["norm"]), "with a trainable kernel"),
        (statistics(), "layers of class BatchNormalization if"),
        (statistics(x, ["first", "norm"]), "must name layers of class"),
        (statistics(x[:, :3]), "`batch` must have the shape of the inputs"),
        (statistics(lambda step: None), "`batch` must be an array .*: batch=None"),
    ):
        with pytest.raises(ValueError, match=message):
            train(model, probe)
