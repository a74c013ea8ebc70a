"""The training: one loop that continues where it stopped and compiles a network once.

A kind of training is a function from its settings to a `Problem`: a network, its
batches, its learning rate. Recipes measure during training by hooks of `train`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from tqdm import tqdm

from recipes.engine import optimizers, run, workers
from recipes.engine.data import TEST_BATCH_SIZE
from recipes.engine.recorder import SCORES, Hooks, Recorder, numpy_copy


class Problem(NamedTuple):
    """What a kind of training trains.

    Attributes:
        network: Callable that returns a new, compiled `keras.Model`. Two with equal
            `settings.program()` differ only in the values of variables.
        batches: Callable of an epoch; returns endless batches, starting there.
        steps: Integer, of an epoch.
        epochs: Integer, of the whole training.
        test: Test data, as `keras.Model.fit` takes them, or `None`.
        schedule: See `optimizers.Rate`; `None` if the rate is the optimizer's.
        amat: Whether CBN layers get the learning rate.
        images: What `recipes.engine.data.load` returned, for hooks.
        strategy: One of `recipes.engine.devices`, or `None`.
    """

    network: Callable
    batches: Callable
    steps: int
    epochs: int
    test: Any = None
    schedule: Any = None
    amat: bool = False
    images: Any = None
    strategy: Any = None


class Outcome(NamedTuple):
    """Settings, results (the dict in results.json) and the lines of metrics.jsonl."""

    settings: Any
    results: dict
    metrics: list


class Outcomes(dict):
    """A dict from the settings of each run to its `Outcome`."""

    def of(self, **values):
        """The outcomes whose settings have these values, a list."""
        return [
            outcome
            for settings, outcome in self.items()
            if all(getattr(settings, key) == value for key, value in values.items())
        ]


def train(settings, kind, problem_of, *, name=None, until=None, verbose=0, **hooks):
    """Trains a network, continues its training, or returns its earlier results.

    Args:
        settings: A `Settings` with `runs_dir` and `seed`.
        kind: Start of the name of the run, `""` for none.
        problem_of: Callable of the settings; returns a `Problem`. It is called only if
            there is something to train.
        name: Name of the run; made from `kind` and the settings if `None`.
        until: Integer, stop after this epoch of the whole training; the same call with
            a later one continues. The results are then those so far.
        verbose: As in `keras.Model.fit`.
        **hooks: Fields of `recipes.engine.recorder.Hooks`.

    Returns:
        An `Outcome`. The results have `name`, `epochs`, `diverged`, the scores of the
        last epoch, the median `seconds_per_step`, and what the hook `at_end` returns.
        What is not finite is `None`.
    """
    recorded = run.Run(settings.directory(kind, name), settings.config())
    results = recorded.results
    if results is None:
        # Before anything is recorded, since the data may be missing.
        problem, found = problem_of(settings), Hooks(**hooks)
        with recorded:
            results = recorded.results  # if another process has just completed it
            if results is None:
                results = _train(recorded, settings, problem, found, until, verbose)
    return Outcome(settings, results, recorded.metrics)


def _train(recorded, settings, problem, hooks, until, verbose):
    model, omegas = compiled(settings, problem)
    last = min(until or problem.epochs, problem.epochs)
    recorder = Recorder(recorded, model, problem, settings, hooks, last)
    callbacks = [make(problem, settings) for make in hooks.callbacks]
    if problem.schedule is not None:
        callbacks.append(optimizers.Rate(problem.schedule, omegas))
    if recorder.epoch < last:
        try:
            model.fit(
                problem.batches(recorder.epoch),
                steps_per_epoch=problem.steps,
                epochs=last,
                initial_epoch=recorder.epoch,
                shuffle=False,  # the batches are already shuffled
                validation_data=problem.test,
                validation_batch_size=TEST_BATCH_SIZE,
                callbacks=[*callbacks, recorder],
                verbose=verbose,
            )
        except BaseException:
            _last.clear()  # its state is unknown
            raise
    results = results_of(recorded)
    if recorder.epoch < problem.epochs and not results["diverged"]:
        return results
    if recorder.best is not None:
        for variable in model.variables:
            variable.assign(recorder.best[variable.path])
    if hooks.at_end and (recorder.best is not None or not results["diverged"]):
        results |= hooks.at_end(model, problem, settings, recorded)
    return recorded.finish(results)


def results_of(recorded):
    """The results of a run so far, from its metrics."""
    metrics = recorded.metrics
    last = metrics[-1]
    seconds = [line["seconds_per_step"] for line in metrics]
    seconds = [value for value in seconds if value is not None]
    results = {
        "name": recorded.name,
        "epochs": len(metrics),
        "diverged": last["train_loss"] is None,
        **{key: last[key] for key in SCORES if key in last},
        "seconds_per_step": float(np.median(seconds)) if seconds else None,
    }
    if "test_accuracy" in last:
        finite = [line for line in metrics if line["train_loss"] is not None]
        found = max(finite, key=lambda line: line["test_accuracy"], default={})
        results["best_test_accuracy"] = found.get("test_accuracy")
        results["best_epoch"] = found.get("epoch")
    return results


_last = {}  # the program and the model of the last training in this process


def compiled(settings, problem):
    """The network of a training, and the omegas of its layers, by name.

    Runs of one program share one network, compiled once, because compiling takes longer
    than a small training. Each run copies in the variables of a new network.
    """
    program = settings.program(), problem.strategy
    again = _last.get("program") == program
    if not again:
        _last.clear()
        keras.backend.clear_session()
    keras.utils.set_random_seed(settings.seed)
    new = problem.network()
    new.optimizer.build(new.trainable_variables)
    omegas = optimizers.give_omegas(new) if problem.amat else {}
    # Another recipe may train the same network with another optimizer.
    again = again and type(new.optimizer) is type(_last["model"].optimizer)
    if not again:
        _last.update(program=program, model=new)
        return new, omegas
    model = _last["model"]
    for old, fresh in ((model, new), (model.optimizer, new.optimizer)):
        for variable, value in zip(old.variables, fresh.variables, strict=True):
            variable.assign(value.value)
    return model, omegas


def standalone(model, problem):
    """A new network to be saved, with the weights of a trained one.

    The trained network itself is reused by other runs, and its layers have omega 1.
    """
    new = problem.network()
    for variable, value in zip(new.variables, model.variables, strict=True):
        variable.assign(numpy_copy(value))  # JAX may reuse the memory of a value
    if problem.amat:
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        for layer in optimizers.followers(new):
            layer.set_learning_rate(rate)
    return new


def train_all(function, runs, count=None):
    """Trains many, several at a time, and shows the progress.

    Args:
        function: Callable of the settings of one run; returns an `Outcome`. Other
            processes must be able to import it.
        runs: List of settings. Equal ones are trained once.
        count: Integer, see `workers.each`. None: `workers.default_count()`.

    Returns:
        `Outcomes`, in the order of `runs`.
    """
    runs = list(dict.fromkeys(runs))
    networks = len({settings.program() for settings in runs})
    count = min(count or workers.default_count(), len(runs))
    trainings = f"{len(runs)} trainings, {count} at a time"
    print(f"{trainings}, of {networks} networks to compile.", flush=True)
    found = {}
    done = workers.each(function, runs, lambda settings: settings.program(), count)
    with tqdm(total=len(runs), unit="run", dynamic_ncols=True) as progress:
        for settings, outcome in done:
            found[settings] = outcome
            progress.set_postfix_str(_short(outcome.results))
            progress.update()
    return Outcomes({settings: found[settings] for settings in runs})


def _short(results):
    if results["diverged"]:
        return f"{results['name']}: diverged"
    if results.get("test_accuracy") is None:
        return results["name"]
    return f"{results['name']}: {results['test_accuracy']:.1%}"
