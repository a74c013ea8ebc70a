"""Probes in `fit`: what they measure, where it goes, and that training is the same."""

import pickle
import warnings

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, NoisyBN, diagnostics
from tests.support import diagnostics_networks as networks
from tests.support.backend import not_torch
from tests.support.diagnostics_networks import assert_same, train, variables, weights_of

BATCH = networks.batch(seed=9)
LANDSCAPE = {"points": 2}


def network(*norms, **settings):
    stack = [
        layers.Dense(6, activation="tanh", name="first", kernel_regularizer="l2"),
        *norms[:1],
        layers.Dense(6, name="second"),
        *norms[1:],
        layers.Dense(networks.CLASSES, name="third"),
    ]
    settings = {"run_eagerly": networks.EAGER, **settings}
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return networks.sequential(*stack, optimizer=optimizer, **settings)


def test_training_is_bitwise_the_same_and_numbers_are_in_its_logs(tmp_path):
    from tensorboard.backend.event_processing import event_file_loader

    asked, seen = [], []

    def has_all_that_has_a_state():
        keras.utils.set_random_seed(4)  # PyTorch's generator too
        norm = layers.BatchNormalization()
        return network(CBN(), norm, NoisyBN(), layers.Dropout(0.3))

    landscape = diagnostics.LandscapeProbe(
        lambda step: asked.append(step) or networks.batch(seed=step),
        **{"every": 2, "log_dir": tmp_path, **LANDSCAPE},
    )
    batches = [networks.batch(seed=seed) for seed in (1, 2)]
    probes = [
        landscape,
        diagnostics.CovariateShiftProbe(BATCH, every=2),
        diagnostics.GradientNoiseProbe(batches, every=2),
        diagnostics.BatchStatistics(every=2),
        diagnostics.BatchStatistics(BATCH[0], every=2),
        diagnostics.BatchStatistics(lambda step: BATCH[0] + step, every=2),
        diagnostics.WeightGrowth(every=2),
    ]

    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["landscape_loss"])
    )
    with_probes = has_all_that_has_a_state()
    logs = train(with_probes, *probes, record, epochs=2).history
    without = has_all_that_has_a_state()
    expected = train(without, epochs=2).history
    assert_same(variables(with_probes), variables(without))
    assert {key: logs[key] for key in expected} == expected
    for probe in probes:
        assert probe.history["step"] == asked == [0, 2, 4]
        assert {len(values) for values in probe.history.values()} == {3}

    losses, betas = landscape.history["loss"], landscape.history["effective_beta"]
    assert len(set(losses)) == 3
    assert seen == [losses[0], losses[0], losses[1], losses[1], losses[2], losses[2]]
    assert logs["landscape_loss"] == losses[1:]
    assert logs["landscape_effective_beta"] == betas[1:]
    (file,) = tmp_path.iterdir()
    written = {
        (value.tag, event.step): value.tensor.float_val[0]
        for event in event_file_loader.EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    for step, beta in zip(asked, betas):
        assert written["landscape_effective_beta", step] == pytest.approx(beta)


def test_a_probe_measures_the_weights_that_a_step_starts_from():
    """At the steps of the optimizer, which later calls of `fit` go on to count."""
    model = network(CBN())
    first, second = (
        diagnostics.LandscapeProbe(BATCH, every=3, **LANDSCAPE) for _ in range(2)
    )
    train(model, first, epochs=1)
    found = diagnostics.landscape(model, *BATCH, **LANDSCAPE)
    train(model, first, second, epochs=3, initial_epoch=1)
    history = first.history
    assert history["step"] == [0, 3, 6] and second.history["step"] == [3, 6]
    keys = "loss", "gradient_norm", "loss_min", "loss_max", "effective_beta"
    measured = found.loss, found.gradient_norm, *found.loss_range, found.effective_beta
    for key, value in zip((*keys, "not_finite"), (*measured, 0), strict=True):
        assert history[key][1] == pytest.approx(value, rel=1e-3)


def test_shift_is_that_of_the_step_that_was_taken():
    model, same = network(), network()
    same.set_weights(model.get_weights())
    x, y = networks.batch()
    chosen = ["second", "third"]
    probe = diagnostics.CovariateShiftProbe((x, y), layers=chosen)
    model.fit(x, y, batch_size=8, callbacks=[probe], verbose=0)
    updated = weights_of(model)
    _, gradient = diagnostics.value_and_grad(same, x, y)
    for old, new, g in zip(weights_of(same), updated, gradient, strict=True):
        np.testing.assert_allclose(new, old - 0.05 * g, atol=1e-6)
    found = diagnostics.covariate_shift(same, x, y, layers=chosen, updated=updated)
    for name, distance, cosine in zip(chosen, found.distances, found.cosines):
        assert probe.history[f"{name}_distance"] == [pytest.approx(distance, rel=1e-4)]
        assert probe.history[f"{name}_cosine"] == [pytest.approx(cosine, rel=1e-5)]
        assert distance > 0


def test_a_step_is_a_batch_where_gradients_are_accumulated():
    optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model = networks.compiled(network(), optimizer=optimizer)
    probe = diagnostics.WeightGrowth(every=2)
    for _ in range(2):
        train(model, probe)
    assert probe.history["step"] == [0, 2, 4]


def test_a_probe_that_measures_nothing_says_so():
    model = network()
    train(model)
    with pytest.warns(UserWarning, match="WeightGrowth has measured nothing"):
        train(model, diagnostics.WeightGrowth(every=200))
    probe = diagnostics.WeightGrowth(every=200)
    train(network(), probe)  # Step 0 is one of them.
    with pytest.warns(UserWarning, match="WeightGrowth has measured nothing"):
        train(model, probe)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has measured nothing")
        train(model, probe, epochs=0)  # It had no step to measure.


def test_a_probe_can_be_pickled():
    model = network(layers.BatchNormalization(name="norm"))
    probes = [
        diagnostics.LandscapeProbe(BATCH, every=1, **LANDSCAPE),
        diagnostics.CovariateShiftProbe(BATCH, every=1),
        diagnostics.GradientNoiseProbe([BATCH, BATCH], every=1),
        diagnostics.BatchStatistics(BATCH[0], every=1),
        diagnostics.BatchStatistics(every=1),
        diagnostics.WeightGrowth(),
    ]
    copies = pickle.loads(pickle.dumps(probes))
    train(model, *copies)
    assert all(probe.history["step"] for probe in copies)
    for probe in copies:
        assert pickle.loads(pickle.dumps(probe)).history == probe.history


def test_a_function_that_returns_no_batch():
    probe = diagnostics.LandscapeProbe(lambda step: (*BATCH, step), **LANDSCAPE)
    with pytest.raises(ValueError, match="`batch` must be a pair.*or a function of"):
        train(network(), probe)


@not_torch  # Keras has one step in an execution there.
@pytest.mark.parametrize("steps", [2, 4])
def test_several_steps_in_one_execution(steps):
    model = network(run_eagerly=False, steps_per_execution=steps)
    probe = diagnostics.LandscapeProbe(BATCH, every=3, **LANDSCAPE)
    train(model, probe, batch_size=4, epochs=2)
    # Executions begin at steps 0, 2, 4 ... 10. Of 4 steps, at 0, 4, 6, 10: an epoch has
    # 6, and its second execution only 2.
    assert probe.history["step"] == [0, 4, 6, 10]
