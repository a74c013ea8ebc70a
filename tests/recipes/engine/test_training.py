import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import signal
import time
import types
from unittest import mock

import keras
import numpy as np
import pytest

from recipes.cbn import max_lr
from recipes.engine import classifier, imagenet, optimizers, results, training, workers
from tests.support import small
from tests.support.backend import BACKEND, later, later_on_jax, once

pytestmark = pytest.mark.usefixtures("small_network")


def settings(tmp_path, **changes):
    usual = {**small.SETTINGS, "activation": "tanh", "epochs": 3}
    return classifier.Training(**usual | changes, runs_dir=str(tmp_path))


def count(model, problem, settings):
    return {"images": len(problem.images.x_train), "seed": settings.seed}


train = functools.partial(classifier.train, kind="some", after=count)


@later_on_jax
def test_hooks_and_callbacks_add_to_the_lines_and_to_the_results(tmp_path):
    class Logs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["twice"] = 2 * epoch

    outcome = train(
        settings(tmp_path),
        before=lambda model, problem, settings, epoch: {"before": problem.steps},
        at_end=lambda model, problem, settings, run: {"lines": len(run.metrics)},
        callbacks=[lambda problem, settings: Logs()],
    )
    assert outcome.results["name"].startswith("some-digits-resnet8-cbn-tanh-seed0")
    for epoch, line in enumerate(outcome.metrics):
        expected = {"epoch": epoch + 1, "before": 2, "twice": 2 * epoch, "images": 64}
        assert line | expected | {"seed": 0} == line
    assert outcome.results["epochs"] == outcome.results["lines"] == 3

    stop = mock.Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path, seed=1), after=stop)
    assert not training._last  # in a state that nobody knows


@pytest.mark.parametrize(
    "norm,rate", [("cbn", 0.03), *later(("noisy_bn", 0.03), ("none", 1e30))]
)
def test_a_network_that_is_used_again_equals_a_new_one(tmp_path, norm, rate):
    """Of which training shows no sign, even if the first one diverged."""
    others = {"seed": 1, "rho": 2.0, "omega": 20.0, "momentum": 0.5}
    others |= {"weight_decay": 0.01, "learning_rate": rate, "norm": norm}
    first = settings(tmp_path / "shared", **others)
    second = settings(tmp_path / "shared", norm=norm)
    assert first.program() == second.program()
    assert train(first).results["diverged"] == (rate > 1)
    model = training._last["model"]
    shared = train(second)
    assert training._last["model"] is model
    training._last.clear()
    alone = train(dataclasses.replace(second, runs_dir=str(tmp_path / "alone")))
    again = training._last["model"]
    assert again is not model
    assert small.without_times(shared.metrics) == small.without_times(alone.metrics)
    for mine, other in zip(model.variables, again.variables, strict=True):
        np.testing.assert_array_equal(*map(training.numpy_copy, (mine, other)))
    # With another optimizer it is another network.
    problem = classifier.problem(second, optimizer=max_lr.MeasuringSGD)
    assert training.compiled(second, problem)[0] is not again


def test_adam(tmp_path):
    """Of which momentum and decay are constants in the compiled step."""
    first, other = (
        settings(tmp_path, optimizer="adam", momentum=value) for value in (0.5, 0.9)
    )
    assert first.program() != other.program()
    optimizer = classifier.problem(first).network().optimizer
    assert isinstance(optimizer, keras.optimizers.AdamW)
    assert (optimizer.beta_1, optimizer.weight_decay) == (0.5, 5e-4)


# Two steps an epoch; a tenth from the fifth step on, a hundredth from the seventh. The
# layer of the network that is used again has omega 1, here divided by the batches whose
# gradients make a step.
TOLD = [[0.1, 0.5], [0.1, 0.5], [0.01, 0.05], [0.001, 0.005]]


ALONE = [[rate, 2 * product] for rate, product in TOLD]


@pytest.mark.parametrize(
    "norm, batches, expected",
    [
        ("bn_rho_amat", 2, TOLD),
        *later(("bn_rho_amat", None, ALONE), ("bn_rho", 2, [[-1, -1]] * 4)),
    ],
)
def test_amat_goes_with_the_norms_that_want_it(norm, batches, expected, tmp_path):
    def rate(model, problem, settings):
        layer = training.standalone(model, problem).get_layer("conv_norm")
        product = model.get_layer("conv_norm").learning_rate
        rates = {"rate": layer.learning_rate, "product": product}
        rates["sgd"] = model.optimizer.learning_rate
        assert norm == "bn_rho" or model.get_layer("conv_norm").omega == 1
        return {key: float(training.numpy_copy(v)) for key, v in rates.items()}

    asked = settings(tmp_path, norm=norm, epochs=4, gradient_accumulation_steps=batches)
    metrics = train(asked, after=rate).metrics
    found = [[line["rate"], line["product"]] for line in metrics]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert [line["sgd"] for line in metrics] == pytest.approx([0.1, 0.1, 0.01, 0.001])


@later_on_jax
def test_many_of_which_one_diverges(tmp_path):
    lost = settings(tmp_path, norm="none", learning_rate=1e30)
    good = settings(tmp_path, epochs=1)
    runs = [lost, good, settings(tmp_path, epochs=1)]
    outcomes = training.train_all(train, runs, 1)
    assert len(list(tmp_path.iterdir())) == 2  # equal settings are trained once
    assert list(outcomes) == [lost, good]
    (bad,), (other,) = outcomes.of(norm="none"), outcomes.of(norm="cbn", seed=0)
    assert bad.results["diverged"] and bad.metrics[-1]["train_loss"] is None
    assert "images" not in bad.metrics[-1]
    assert other is outcomes[good] and not other.results["diverged"]
    accuracy = f"{100 * other.results['test_accuracy']:.2f}"
    assert results.percent([other, bad]) == f"{accuracy} (1 of 2 diverged)"


def test_the_best_epoch_is_one_that_did_not_diverge():
    line = {"train_loss": 1.0, "test_accuracy": 0.5, "seconds_per_step": 1.0}
    lost = {"train_loss": None, "test_accuracy": 0.6, "seconds_per_step": None}
    metrics = [{"epoch": 1, **line}, {"epoch": 2, **lost}]
    run = types.SimpleNamespace(name="a", metrics=metrics)
    found = training.results_of(run)
    assert (found["best_epoch"], found["best_test_accuracy"]) == (1, 0.5)
    large = results.spread({"mean": 2e7, "std": 1e5}, 2)
    assert large == "2.0e+07 ± 1.0e+05"


def test_where_a_run_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place, name, expected in (
        ("", None, f"a-{settings('').label()}"),  # here, not in /
        ("runs", "b", "runs/b"),
    ):
        with pytest.raises(AttributeError):  # when all but the problem is there
            training.train(settings(place), "a", lambda _: None, name=name)
        assert (tmp_path / expected / "config.json").exists()
    # A name longer than file systems take is cut.
    rhos = ",".join(f"stage{number}=0.5" for number in range(30))
    with pytest.raises(AttributeError):
        training.train(settings("", stage_rho=rhos), "a", lambda _: None)


def end_or_sleep(job):
    """What a process does."""
    if job == "killed":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "wrong":
        time.sleep(1)
        raise ValueError("wrong")
    time.sleep(600)


@pytest.mark.parametrize(
    "job, error",
    [("killed", RuntimeError), *later(("wrong", ValueError), marks=[once])],
)
def test_an_error_ends_all_processes(job, error):
    """And who is killed is said in words, not as a broken pool."""
    start = time.monotonic()
    with pytest.raises(error, match="was killed, perhaps because memory|wrong"):
        list(workers.each(end_or_sleep, [job, "long"], str, 2))
    while multiprocessing.active_children():
        assert time.monotonic() - start < 120
        time.sleep(0.1)


def test_a_process_for_an_accelerator(monkeypatch):
    if BACKEND == "torch":
        import torch

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    else:
        found = ["gpu:0", "gpu:1"]
        monkeypatch.setattr(keras.distribution, "list_devices", lambda: found)
    assert workers.default_count() == 1


def test_jobs_of_one_program_meet_in_one_process(monkeypatch):
    # A process goes on with its program, or takes a free one, of most jobs.
    waiting = {"a": ["a1"], "b": ["b1", "b2"], "c": ["c1"]}
    for last, expected in (("a", None), "a"), (("d", None), "b"), (("d", "b"), "a"):
        assert workers._next(waiting, last, 0) == expected
    thread = functools.partial(concurrent.futures.ThreadPoolExecutor, 1)
    monkeypatch.setattr(workers, "_pool", thread)
    jobs = sum(waiting.values(), [])
    done = dict(workers.each(str.upper, jobs, lambda job: job[0], 2))
    assert done == {job: job.upper() for job in jobs}
    with pytest.raises(ValueError, match="'x'"):
        list(workers.each(int, ["1", "x"], lambda job: job, 2))


def test_schedules():
    for drops, total, expected in (
        (optimizers.DROPS, 7, np.repeat([0.1, 0.01, 0.001], [3, 2, 2])),
        (optimizers.DROPS, 24, np.repeat([0.1, 0.01, 0.001], [12, 8, 4])),
        (imagenet.DROPS, 24, np.repeat([0.1, 0.01, 0.001, 0.0001], 6)),
    ):
        schedule = optimizers.piecewise_schedule(0.1, total, drops)
        rates = [float(schedule(step)) for step in range(total)]
        np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_a_checkpoint_holds_bfloat16(tmp_path):
    variable = keras.Variable(np.float32([1, -3, 2**-9]), dtype="bfloat16")
    np.savez(tmp_path / "checkpoint.npz", value=training.numpy_copy(variable))
    value = np.load(tmp_path / "checkpoint.npz")["value"]
    np.testing.assert_array_equal(value, [1, -3, 2**-9])
    variable.assign(value)
