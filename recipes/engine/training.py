"""The training: one loop, that goes on where it was, and compiles a network once.

A kind of training is a function of its settings that returns a `Problem`: a network,
its batches, its learning rate. What a recipe measures on the way are hooks of `train`.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from tqdm import tqdm

from recipes.engine import files, optimizers, run, workers
from recipes.engine.data import TEST_BATCH_SIZE

CHECKPOINT_SECONDS = 5.0  # at most this much, and the last epoch, is trained again
SCORES = {
    "train_loss": "loss",
    "train_accuracy": "accuracy",
    "test_loss": "val_loss",
    "test_accuracy": "val_accuracy",
}


class Problem(NamedTuple):
    """What a kind of training trains.

    Attributes:
        network: Callable that returns a new, compiled `keras.Model`. Two of equal
            `settings.program()` differ in the values of variables alone.
        batches: Callable of an epoch, returns the batches from then on, without end.
        steps: Integer, of an epoch.
        epochs: Integer, of the whole training.
        test: Test data, as `keras.Model.fit` takes them, or `None`.
        schedule: See `optimizers.Rate`; `None` if the rate is the optimizer's.
        amat: Whether CBN layers are told the learning rate.
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
        """A list of the outcomes whose settings have these values."""
        return [
            outcome
            for settings, outcome in self.items()
            if all(getattr(settings, key) == value for key, value in values.items())
        ]


def scores(logs):
    """The line of an epoch: losses (nats), accuracies, and what callbacks measured."""
    line = {key: float(logs[name]) for key, name in SCORES.items() if name in logs}
    return line | {k: v for k, v in logs.items() if k not in SCORES.values()}


def train(
    settings,
    kind,
    problem_of,
    *,
    before=None,
    after=None,
    at_end=None,
    line=scores,
    callbacks=(),
    keep_best=False,
    name=None,
    until=None,
    verbose=0,
):
    """Trains a network, or goes on with that, or returns what came out before.

    The hooks get the model, the `Problem` and the settings, and must leave the model as
    it is.

    Args:
        settings: A `Settings`, which says `runs_dir` and `seed`.
        kind: Start of the name of the run, `""` for none.
        problem_of: Callable of the settings, returns a `Problem`. It is called if there
            is something to train.
        before, after: Hooks at the start and at the end of an epoch; `before` gets the
            epoch, from 0, too. Each returns a dict for the line of the epoch. Nothing
            is measured after an epoch whose loss is not finite.
        at_end: Hook of the trained model, which gets the run too and returns a dict of
            more results. It is not called if training diverged.
        line: Callable of the logs of an epoch, returns a dict with `train_loss`.
        callbacks: Callables of the `Problem` and the settings, each returns a Keras
            callback. What it puts into the logs of an epoch goes into the line.
        keep_best: Whether `at_end` is about the weights after the first of the epochs
            with the highest test accuracy. It is then called for a training that
            diverged after such an epoch, too.
        name: Name of the run, of `kind` and the settings where `None`.
        until: Integer, stop after this epoch of the whole training; the same call with
            a later one goes on. The results are then those so far.
        verbose: As in `keras.Model.fit`.

    Returns:
        An `Outcome`. The results have `name`, `epochs`, `diverged`, what `line` said of
        the last epoch, and the median `seconds_per_step`. What is not finite is `None`.
    """
    name = name or "-".join(filter(None, [kind, settings.label()]))
    recorded = run.Run(f"{settings.runs_dir}/{name}", settings.config())
    if recorded.results is None:
        with recorded:
            if recorded.results is None:  # nor has another process completed it now
                hooks = _Hooks(before, after, line, keep_best)
                problem = problem_of(settings)
                results = _train(
                    recorded,
                    settings,
                    problem,
                    hooks,
                    callbacks,
                    until,
                    verbose,
                    at_end,
                )
                if results is not None:
                    return Outcome(settings, results, recorded.metrics)
    return Outcome(settings, recorded.results, recorded.metrics)


class _Hooks(NamedTuple):
    before: Callable | None
    after: Callable | None
    line: Callable
    keep_best: bool


def _train(recorded, settings, problem, hooks, callbacks, until, verbose, at_end):
    """Returns results if the training is not complete."""
    model, omegas = compiled(settings, problem)
    recorder = _Recorder(recorded, settings, problem, hooks)
    last = min(until or problem.epochs, problem.epochs)
    recorder.last = last
    recorder.restore(model)
    others = [make(problem, settings) for make in callbacks]
    if problem.schedule is not None:
        others.append(optimizers.Rate(problem.schedule, omegas))
    if recorder.epoch < last:
        try:
            model.fit(
                problem.batches(recorder.epoch),
                steps_per_epoch=problem.steps,
                epochs=last,
                initial_epoch=recorder.epoch,
                shuffle=False,  # the batches are
                validation_data=problem.test,
                validation_batch_size=TEST_BATCH_SIZE,
                callbacks=[*others, recorder],
                verbose=verbose,
            )
        except BaseException:
            _last.clear()  # nobody knows what state it is in
            raise
    results = results_of(recorded, hooks.line is scores)
    if recorder.epoch < problem.epochs and not results["diverged"]:
        return results
    if recorder.best is not None:
        for variable in model.variables:
            variable.assign(recorder.best[variable.path])
    if at_end and (recorder.best is not None or not results["diverged"]):
        results |= at_end(model, problem, settings, recorded)
    recorded.finish(results)
    return None


def results_of(recorded, best=False):
    """What came out of a run so far, by its metrics."""
    metrics = recorded.metrics
    seconds = [line["seconds_per_step"] for line in metrics]
    seconds = [value for value in seconds if value is not None]
    results = {
        "name": recorded.name,
        "epochs": len(metrics),
        "diverged": metrics[-1]["train_loss"] is None,
        **{key: metrics[-1][key] for key in SCORES if key in metrics[-1]},
        "seconds_per_step": float(np.median(seconds)) if seconds else None,
    }
    if best and "test_accuracy" in metrics[-1]:
        finite = [line for line in metrics if line["train_loss"] is not None]
        found = max(finite, key=lambda line: line["test_accuracy"], default={})
        results["best_test_accuracy"] = found.get("test_accuracy")
        results["best_epoch"] = found.get("epoch")
    return results


_last = {}  # the program and the model of the last training in this process


def compiled(settings, problem):
    """The network of a training, and the omegas of its layers, by name.

    Runs of one program are one network, compiled once: making that takes longer than a
    small training. The next of them gets the values of all variables of a new one.
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
    if not again:
        _last.update(program=program, model=new)
        return new, omegas
    model = _last["model"]
    for old, fresh in zip(_state(model), _state(new), strict=True):
        old.assign(fresh.value)
    return model, omegas


def standalone(model, problem):
    """A new network, as one saves it, with the weights of a trained one.

    The trained one is not it: other runs go on with it, and its layers have omega 1.
    """
    new = problem.network()
    for variable, value in zip(new.variables, model.variables, strict=True):
        variable.assign(value.value)
    if problem.amat:
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        for layer in optimizers.followers(new):
            layer.set_learning_rate(rate)
    return new


def _state(model):
    return [*model.variables, *model.optimizer.variables]


class _Recorder(keras.callbacks.Callback):
    """Logs and checkpoints epochs of `fit`, and stops when the loss is not finite.

    Weights, moving statistics, the optimizer, the best weights so far and the epoch
    stand in one file, so that they cannot disagree (`BackupAndRestore` writes two files
    in place). The seconds of a step leave out the first step after a start, which
    compiles, and evaluation.

    Attributes:
        epoch: Number of whole epochs behind us, the `initial_epoch` of `fit`.
        last: The epoch after which `fit` ends.
        best: Dict from the path of each variable of the model to its value after the
            first of the epochs with the highest test accuracy, or `None`.
    """

    def __init__(self, recorded, settings, problem, hooks):
        super().__init__()
        self.run, self.hooks = recorded, hooks
        self.about = problem, settings
        self.epoch = 0
        self.best = None

    def restore(self, model):
        """Brings the model to where the checkpoint is."""
        arrays = self.run.load()
        if arrays is not None:
            self.epoch = int(arrays["epoch"])
            try:
                for name, variable in _named(model).items():
                    variable.assign(arrays[name])
            except (KeyError, ValueError) as error:
                reason = f"it is not of this network ({error})"
                path = self.run.directory / run.CHECKPOINT
                raise files.damaged(path, reason) from None
            self.best = {
                key.removeprefix("best/"): array
                for key, array in arrays.items()
                if key.startswith("best/")
            } or None
        self.run.keep(self.epoch)
        self._compiled, self._saved = False, time.monotonic()

    def _save(self):
        arrays = {name: numpy_copy(v) for name, v in _named(self.model).items()}
        arrays |= {f"best/{path}": array for path, array in (self.best or {}).items()}
        self.run.save(epoch=self.epoch, **arrays)
        self._saved = time.monotonic()

    def on_epoch_begin(self, epoch, logs=None):
        self._measured = {}
        if self.hooks.before is not None:
            self._measured = self.hooks.before(self.model, *self.about, epoch)
        self._steps, self._seconds = 0, None
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if not self._compiled:
            self._compiled = True
            self._wait()
            self._start = time.perf_counter()
        else:
            self._steps += 1

    def on_test_begin(self, logs=None):
        self._stop_clock()

    def _stop_clock(self):
        if self._seconds is None:
            self._wait()
            self._seconds = time.perf_counter() - self._start

    def _wait(self):
        # The step counter is there when the step that made it is done.
        numpy_copy(self.model.optimizer.iterations)

    def on_epoch_end(self, epoch, logs=None):
        self._stop_clock()
        self.epoch = epoch + 1
        finite = np.isfinite(logs["loss"])
        if finite and self.hooks.after is not None:
            self._measured |= self.hooks.after(self.model, *self.about)
        highest = -1
        if self.hooks.keep_best:
            highest = max((m["test_accuracy"] for m in self.run.metrics), default=-1)
        self.run.log(
            epoch=self.epoch,
            **self.hooks.line(logs),
            seconds_per_step=self._seconds / self._steps if self._steps else None,
            **self._measured,
        )
        if not finite:
            self.model.stop_training = True
            return
        if self.hooks.keep_best and logs["val_accuracy"] > highest:
            self.best = {v.path: numpy_copy(v) for v in self.model.variables}
        if (
            self.epoch == self.last
            or time.monotonic() - self._saved >= CHECKPOINT_SECONDS
        ):
            self._save()


def _named(model):
    """The variables of a model and its optimizer by their names in a checkpoint."""
    named = {f"model/{v.path}": v for v in model.variables}
    return named | {
        f"optimizer/{i}": v for i, v in enumerate(model.optimizer.variables)
    }


def numpy_copy(variable):
    """The value of a Keras variable, which the next step does not overwrite."""
    return np.array(keras.ops.convert_to_numpy(variable))


def train_all(function, runs, count=None):
    """Trains many, several at a time, and shows how far that is.

    Args:
        function: Callable of the settings of one, returns an `Outcome`. Other processes
            must be able to import it.
        runs: List of settings. Equal ones are trained once.
        count: See `recipes.engine.workers.each`.

    Returns:
        `Outcomes`, in the order of `runs`.
    """
    runs = list(dict.fromkeys(runs))
    networks = len({settings.program() for settings in runs})
    count = min(count or workers.default_count(), len(runs))
    print(
        f"{len(runs)} trainings, {count} at a time, of {networks} networks to compile.",
        flush=True,
    )
    found = {}
    with tqdm(total=len(runs), unit="run", dynamic_ncols=True) as progress:
        for settings, outcome in workers.each(
            function, runs, lambda settings: settings.program(), count
        ):
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
