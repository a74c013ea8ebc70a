"""Probes in `fit`: what they measure, where it goes, and that training is the same."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import AMAT, CBN, NoisyBN, diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.diagnostics_networks import assert_same, numpy

BATCH = networks.batch(size=8, seed=9)
LANDSCAPE = {"points": 2}


def network(rate=0.3):
    """A network with all that has a state: CBN with AMAT, noise, dropout."""
    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [
            keras.Input((networks.FEATURES,)),
            layers.Dense(6, activation="tanh", name="first", kernel_regularizer="l2"),
            CBN(),
            layers.Dense(6, name="second"),
            NoisyBN(),
            layers.Dropout(rate),
            layers.Dense(networks.CLASSES, name="third"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=networks.BACKEND == "tensorflow",
    )
    return model


def train(model, *callbacks, epochs=2, **settings):
    x, y = networks.batch(size=24)
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0, **settings}
    return model.fit(x, y, epochs=epochs, callbacks=[AMAT(), *callbacks], **settings)


def every_probe(every=2):
    batches = [networks.batch(size=8, seed=seed) for seed in (1, 2)]
    return [
        diagnostics.LandscapeProbe(BATCH, every=every, **LANDSCAPE),
        diagnostics.CovariateShiftProbe(BATCH, every=every),
        diagnostics.GradientNoiseProbe(batches, every=every),
    ]


def test_training_is_bitwise_the_same_with_probes():
    probes = every_probe()
    with_probes = network()
    logs = train(with_probes, *probes).history
    without = network()
    expected = train(without).history
    assert_same(networks.variables(with_probes), networks.variables(without))
    for key, values in expected.items():
        assert logs[key] == values
    for probe in probes:
        assert probe.history["step"] == [0, 2, 4]


def test_a_probe_measures_the_weights_that_a_step_starts_from():
    model = network(rate=0)  # PyTorch's dropout follows a generator that `fit` uses.
    probe = diagnostics.LandscapeProbe(BATCH, every=3, **LANDSCAPE)
    train(model, probe, epochs=1)
    found = diagnostics.landscape(model, *BATCH, **LANDSCAPE)
    train(model, probe, epochs=1)
    history = probe.history
    assert history["step"] == [0, 3]
    assert history["loss"][1] == pytest.approx(found.loss, rel=1e-6)
    assert history["gradient_norm"][1] == pytest.approx(found.gradient_norm, rel=1e-5)
    assert history["effective_beta"][1] == pytest.approx(found.effective_beta, rel=1e-3)
    low, high = history["loss_min"][1], history["loss_max"][1]
    assert (low, high) == pytest.approx(found.loss_range, rel=1e-5)
    assert history["not_finite"] == [0, 0]
    assert len({len(values) for values in history.values()}) == 1


def test_shift_is_that_of_the_step_that_was_taken():
    model = network(rate=0)
    x, y = networks.batch(size=8)
    objective = diagnostics.Objective(model, x, y)
    _, gradient = objective.value_and_grad()
    probe = diagnostics.CovariateShiftProbe((x, y), layers=["second", "third"])
    model.fit(x, y, batch_size=8, shuffle=False, callbacks=[probe], verbose=0)
    updated = objective.flatten([numpy(v) for v in model.trainable_variables])
    # CBN is told no rate here, and the first step has no momentum yet.
    np.testing.assert_allclose(updated, objective.start - 0.05 * gradient, atol=1e-6)
    for name, first in (("second", 48), ("third", 102)):
        point = np.concatenate([updated[:first], objective.start[first:]])
        _, after = objective.value_and_grad(point)
        part = slice(first, first + {"second": 42, "third": 21}[name])
        distance = np.linalg.norm(gradient[part] - after[part])
        assert probe.history[f"{name}_distance"] == [pytest.approx(distance, rel=1e-4)]
        assert 0 < probe.history[f"{name}_cosine"][0] <= 1


def test_numbers_are_in_the_logs_of_steps_and_epochs():
    seen = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs.get("landscape_loss"))
    )
    probe = diagnostics.LandscapeProbe(BATCH, every=2, **LANDSCAPE)
    history = train(network(), probe, record).history
    losses = probe.history["loss"]
    assert seen == [losses[0], losses[0], losses[1], losses[1], losses[2], losses[2]]
    assert history["landscape_loss"] == [losses[1], losses[2]]
    assert history["landscape_effective_beta"] == probe.history["effective_beta"][1:]


def test_numbers_are_written_for_tensorboard(tmp_path):
    event_file_loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_file_loader"
    )
    probe = diagnostics.LandscapeProbe(BATCH, every=2, log_dir=tmp_path, **LANDSCAPE)
    train(network(), probe)
    (file,) = tmp_path.iterdir()
    written = [
        (event.step, value.tensor.float_val[0])
        for event in event_file_loader.EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == "landscape_effective_beta"
    ]
    expected = zip(probe.history["step"], probe.history["effective_beta"])
    assert written == [(step, pytest.approx(beta)) for step, beta in expected]


def test_steps_are_those_of_the_optimizer():
    model = network()
    first = diagnostics.LandscapeProbe(BATCH, every=4, **LANDSCAPE)
    train(model, first, epochs=1)
    assert first.history["step"] == [0]
    second = diagnostics.LandscapeProbe(BATCH, every=4, **LANDSCAPE)
    train(model, second, epochs=3, initial_epoch=1)
    assert second.history["step"] == [4, 8]


def test_a_batch_for_each_step():
    asked = []

    def batch(step):
        asked.append(step)
        return networks.batch(size=8, seed=step)

    probe = diagnostics.LandscapeProbe(batch, every=2, **LANDSCAPE)
    train(network(), probe)
    assert asked == [0, 2, 4]
    assert len(set(probe.history["loss"])) == 3


@pytest.mark.skipif(networks.BACKEND == "torch", reason="Keras has one step there")
def test_several_steps_in_one_execution():
    model = network()
    model.compile("sgd", model.loss, steps_per_execution=2)
    probe = diagnostics.LandscapeProbe(BATCH, every=3, **LANDSCAPE)
    train(model, probe, batch_size=4)
    # Executions begin at steps 0, 2, 4 ... 10.
    assert probe.history["step"] == [0, 4, 6, 10]


def test_training_that_diverges_goes_on_being_measured():
    model = network()
    model.compile(keras.optimizers.SGD(1e30), model.loss, run_eagerly=model.run_eagerly)
    probe = diagnostics.LandscapeProbe(BATCH, every=2, **LANDSCAPE)
    train(model, probe)
    assert probe.history["not_finite"][-1] == 2
    assert np.isnan(probe.history["effective_beta"][-1])


def test_bad_input():
    with pytest.raises(ValueError, match="`every` must be an integer, positive"):
        diagnostics.LandscapeProbe(BATCH, every=0)
    with pytest.raises(ValueError, match="`batch` must be a pair"):
        diagnostics.LandscapeProbe(BATCH[0])
    with pytest.raises(ValueError, match="`points` must be an integer, positive"):
        diagnostics.LandscapeProbe(BATCH, points=0)
    with pytest.raises(ValueError, match="`layers` must hold layers of model"):
        train(network(), diagnostics.CovariateShiftProbe(BATCH, layers=["none"]))
