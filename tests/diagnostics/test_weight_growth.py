"""Callbacks that follow weights: their numbers, Lemma 3, and that nothing changes."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import AMAT, CBN, WS, diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.diagnostics_networks import BACKEND, assert_same, numpy, variables

DTYPE = networks.PRECISIONS[-1]
TOLERANCE = 1e-8 if DTYPE == "float64" else 2e-3  # of differences of near squares
RATE = 0.125  # exact in float32, which Keras keeps it in


def network(norm=None, optimizer=None, dtype=DTYPE):
    keras.utils.set_random_seed(5)
    with networks.precision(dtype):
        model = keras.Sequential(
            [
                keras.Input((networks.FEATURES,)),
                layers.Dense(6, use_bias=False, name="first"),
                norm or layers.BatchNormalization(epsilon=1e-12, name="norm"),
                layers.Activation("tanh"),
                layers.Dense(networks.CLASSES, name="last"),
            ]
        )
        # A loss keeps the precision that it was made in.
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = optimizer or keras.optimizers.SGD(RATE)
        model.compile(optimizer, loss, run_eagerly=BACKEND == "tensorflow")
    return model


def train(model, *callbacks, size=24, **settings):
    x, y = networks.batch(size=size)
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0, **settings}
    return model.fit(x, y, callbacks=[AMAT(), *callbacks], **settings)


def test_lemma_3():
    """|W|^2 grows by rate^2 |gradient|^2, of the gradient of the batch of the step."""
    model = network()
    x, y = networks.batch(size=8)
    before = numpy(model.get_layer("first").kernel).astype("float64")
    gradient = diagnostics.value_and_grad(model, x, y).gradient[0].astype("float64")
    growth = diagnostics.WeightGrowth()
    train(model, growth, size=8)
    after = numpy(model.get_layer("first").kernel).astype("float64")

    expected = RATE**2 * np.sum(gradient**2)
    assert np.sum(after**2) - np.sum(before**2) == pytest.approx(
        expected, rel=TOLERANCE
    )
    (found,) = growth.history["first_growth"]
    assert found == pytest.approx(expected, rel=TOLERANCE)
    (step,) = growth.history["first_step"]
    assert step == pytest.approx(RATE * np.linalg.norm(gradient), rel=1e-5)
    assert growth.history["first_norm"] == [pytest.approx(np.linalg.norm(before))]
    assert abs(growth.history["first_cosine"][0]) < TOLERANCE


def test_growth_over_many_steps_and_of_a_weight_that_is_not_invariant():
    growth = diagnostics.WeightGrowth()
    model = network()
    train(model, growth, epochs=4)
    history = {key: np.array(values) for key, values in growth.history.items()}
    assert history["step"].tolist() == list(range(12))
    norm = np.linalg.norm(numpy(model.get_layer("first").kernel))
    square = history["first_norm"][0] ** 2 + np.sum(history["first_step"] ** 2)
    assert norm**2 == pytest.approx(square, rel=1e-10 if DTYPE == "float64" else 1e-5)
    assert norm > history["first_norm"][0]
    assert np.all(np.diff(history["first_norm"]) > 0)
    # The definition holds for what is not scale-invariant too; the lemma does not.
    squares = history["last_norm"] ** 2
    np.testing.assert_allclose(
        np.diff(squares), history["last_growth"][:-1], rtol=1e-6, atol=1e-9
    )
    product = history["last_growth"] - history["last_step"] ** 2
    np.testing.assert_allclose(
        history["last_cosine"],
        product / 2 / history["last_norm"] / history["last_step"],
        rtol=1e-6,
    )
    assert np.abs(history["last_cosine"]).max() > 0.05


def test_weight_decay_makes_it_shrink():
    growth = diagnostics.WeightGrowth(["first"])
    decay = keras.optimizers.SGD(RATE, weight_decay=0.5)
    train(network(optimizer=decay), growth, epochs=2)
    assert {key.partition("_")[0] for key in growth.history} == {"step", "first"}
    assert np.all(np.diff(growth.history["first_norm"]) < 0)
    assert np.all(np.array(growth.history["first_cosine"]) < -0.5)


def probes(x):
    return [
        diagnostics.WeightGrowth(),
        diagnostics.BatchStatistics(every=2),
        diagnostics.BatchStatistics(x, every=2),
        diagnostics.BatchStatistics(lambda step: x[step:], every=2),
    ]


@pytest.mark.parametrize("norm", ["BatchNormalization", "CBN"])
def test_training_is_bitwise_the_same(norm):
    def make():
        return network(CBN() if norm == "CBN" else None, dtype="float32")

    x, _ = networks.batch(size=24)
    found = probes(x)
    if norm == "CBN":
        del found[1]  # its moving statistics are others
    with_probes, without = make(), make()
    logs = train(with_probes, *found, epochs=2).history
    expected = train(without, epochs=2).history
    assert_same(variables(with_probes), variables(without))
    assert logs["loss"] == expected["loss"]
    for probe in found[1:]:
        assert probe.history["step"] == [0, 2, 4]


def test_batch_statistics():
    x, _ = networks.batch(size=24)
    model = network()
    norm, dense = model.get_layer("norm"), model.get_layer("first")
    rng = np.random.default_rng(2)
    for variable in norm.variables:
        variable.assign(rng.uniform(0.5, 2, variable.shape))
    values = [numpy(v).astype("float64") for v in norm.variables]
    gamma, beta, moving_mean, moving_variance = values
    outputs = x @ numpy(dense.kernel).astype("float64")
    moving = diagnostics.BatchStatistics()
    of_batch = diagnostics.BatchStatistics(x, ["norm"])
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
    assert (
        logs["statistics_norm_mean_distance"] == of_batch.history["norm_mean_distance"]
    )


def test_names_of_kernels():
    keras.utils.set_random_seed(0)
    inside = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, name="same")], name="inside"
    )
    model = keras.Sequential(
        [
            keras.Input((5,)),
            WS(layers.Dense(4, name="ws"), gain=True, name="ws"),
            inside,
            layers.Dense(3, name="same"),
            layers.Dense(2, name="fixed", trainable=False),
        ]
    )
    model.compile("sgd", "mse", run_eagerly=BACKEND == "tensorflow")
    x, y = networks.regression_batch(size=4)

    def followed(layers):
        growth = diagnostics.WeightGrowth(layers)
        model.fit(x, y, callbacks=[growth], verbose=0)
        return {
            key.removesuffix("_norm") for key in growth.history if key.endswith("_norm")
        }

    nested, outer = (
        layer.kernel.path for layer in (inside.layers[-1], model.layers[2])
    )
    assert followed(None) == {"ws", nested, outer}
    assert followed(["ws"]) == {"ws"}
    assert followed([inside]) == {"same"}
    assert followed(["same"]) == {nested, outer}


def test_bad_input():
    with pytest.raises(ValueError, match="`every` must be an integer, positive"):
        diagnostics.WeightGrowth(every=0)
    with pytest.raises(ValueError, match="must hold layers of model"):
        train(network(), diagnostics.WeightGrowth(["none"]))
    with pytest.raises(ValueError, match="with a trainable kernel"):
        train(network(), diagnostics.WeightGrowth(["norm"]))
    with pytest.raises(ValueError, match="must hold layers of model"):
        train(network(), diagnostics.BatchStatistics(layers=["none"]))
    with pytest.raises(ValueError, match="layers of class BatchNormalization where"):
        train(network(CBN()), diagnostics.BatchStatistics())
    with pytest.raises(ValueError, match="must name layers of class"):
        train(network(), diagnostics.BatchStatistics(layers=["first", "norm"]))
