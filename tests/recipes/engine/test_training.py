import concurrent.futures
import contextlib
import dataclasses
import functools

import keras
import numpy as np
import pytest

from recipes.cbn import max_lr
from recipes.engine import classifier, results, training, workers
from tests.support import small
from tests.support.backend import later, later_on_jax

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

    def stop(*_):
        raise KeyboardInterrupt

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


# Two steps an epoch; a tenth from the fourth step on, a hundredth from the sixth. The
# layer of the network that is used again has omega 1, here divided by the batches whose
# gradients make a step.
TOLD = [[0.1, 0.5], [0.01, 0.05], [0.001, 0.005]]


@later_on_jax
@pytest.mark.parametrize(
    "norm, expected", [("bn_rho_amat", TOLD), *later(("bn_rho", [[-1, -1]] * 3))]
)
def test_amat_goes_with_the_norms_that_want_it(norm, expected, tmp_path):
    def rate(model, problem, settings):
        layer = training.standalone(model, problem).get_layer("conv_norm")
        product = model.get_layer("conv_norm").learning_rate
        rates = {"rate": layer.learning_rate, "product": product}
        return {key: float(training.numpy_copy(v)) for key, v in rates.items()}

    asked = settings(tmp_path, norm=norm, gradient_accumulation_steps=2)
    metrics = train(asked, after=rate).metrics
    found = [[line["rate"], line["product"]] for line in metrics]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


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


class Pool(contextlib.nullcontext):
    """A process that there would be."""

    def __init__(self):
        super().__init__(self)
        self.jobs = []

    def submit(self, function, job):
        self.jobs.append(job)
        future = concurrent.futures.Future()
        future.set_result(function(job))
        return future

    def shutdown(self, **_):
        self.jobs.append("shutdown")


def test_jobs_of_one_program_meet_in_one_process(monkeypatch):
    pools = [Pool() for _ in range(4)]
    monkeypatch.setattr(workers, "_pool", iter(pools).__next__)
    jobs = ["c1", "a1", "b1", "a2", "b2", "a3"]
    done = dict(workers.each(str.upper, jobs, lambda job: job[0], 2))
    assert done == {job: job.upper() for job in jobs}
    # The programs of most jobs first, and who has none left takes another.
    found = [pool.jobs for pool in pools[:2]]
    assert found == [["a1", "a2", "a3"], ["b1", "b2", "c1"]]
    # An error arrives.
    with pytest.raises(ValueError, match="'x'"):
        list(workers.each(int, ["1", "x"], lambda job: job, 2))
    assert [pool.jobs[-1] for pool in pools[2:]] == ["shutdown", "shutdown"]
