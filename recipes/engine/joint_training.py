"""Trainings like those of `recipes.train`, but many of them together, on JAX.

A run is recorded in the same way: its directory, a line of metrics per epoch, and the
network as it was after the epoch with the highest test accuracy. Its batches come in a
different order from those of `recipes.train`, which makes it a different run: its
settings and its name have `population` = true. Which other runs it trained with does
not matter.
"""

import contextlib
import dataclasses
import functools
import itertools
import time

import numpy as np
from tqdm import tqdm

from recipes.engine import classifier, data, population, training
from recipes.engine.run import Run

CHECKPOINT_SECONDS = 60  # at most this much, and the last epoch, is trained again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Together(classifier.Saved):
    """A training that is one of a population."""

    NAMED = (*classifier.Saved.NAMED, "population")

    population: bool = True

    def run(self):
        """Its `recipes.engine.run.Run`."""
        return Run(self.directory(), self.config())


def describe(settings):
    """The `Together` of a `Training`, which saves nothing, or of a `Saved`."""
    names = [field.name for field in dataclasses.fields(classifier.Saved)]
    return Together(**{name: getattr(settings, name, None) for name in names})


def train_all(settings, runs, function):
    """Trains many classifiers, as the flags `workers` and `population` say.

    Args:
        settings: A `classifier.Populations`.
        runs: List of settings, each a `Training` or `Saved`. Those of one network
            follow each other.
        function: Trains one by itself, see `recipes.engine.training.train_all`.

    Returns:
        A `recipes.engine.training.Outcomes`; of `Together` if `population` is given.
    """
    count = settings.population
    if count is None:
        return training.train_all(function, runs, settings.workers)
    found = training.Outcomes()
    with tqdm(total=len(runs), unit="run", dynamic_ncols=True) as progress:
        for _, group in itertools.groupby(runs, key=lambda each: each.program()):
            group = list(group)
            for first in range(0, len(group), count):
                some = group[first : first + count]
                found |= {each.settings: each for each in train(some)}
                progress.update(len(some))
    return found


def train(runs):
    """Trains networks together, continues that, or returns their earlier results.

    Complete runs are left as they are; the others train. Their common state is in the
    checkpoint of the first one.

    Args:
        runs: List of `recipes.engine.classifier.Training` or `Saved`, which differ only
            in their seed, rho, omega and learning rate.

    Returns:
        List of `recipes.engine.training.Outcome`, each of a `Together`. In the results,
        `seconds_per_step` is the time of a step of all trials divided by their number,
        and there are also `trials_at_once`, and `images_per_second` of all trials.

    Raises:
        ValueError: If the backend is not JAX, if the runs differ in other settings, or
            if the data set does not fit the device.
    """
    population.check_backend()
    listed = [describe(settings) for settings in runs]
    runs = {settings: settings.run() for settings in listed}
    if any(run.results is None for run in runs.values()):
        data.images(listed[0])  # fails early if they cannot be read
    with contextlib.ExitStack() as stack:
        missing = {}
        for settings, run in runs.items():
            if run.results is None:
                stack.enter_context(run)
                if run.results is None:  # and no other process has completed it
                    missing[settings] = run
        if missing:
            _train(missing)
    return [
        training.Outcome(settings, runs[settings].results, runs[settings].metrics)
        for settings in listed
    ]


def _train(missing):
    runs, settings = list(missing.values()), list(missing)
    trials = of(settings)
    if (arrays := runs[0].load()) is not None:
        stored = population.trials_of(arrays)
        if all(trial in stored for trial in trials.trials):
            trials.restore(arrays)
    for run, diverged in zip(runs, trials.diverged, strict=True):
        epochs = trials.epoch  # a run that diverged has fewer
        run.keep(min(epochs, len(run.metrics)) if diverged else epochs)
    speeds, saved = [], time.monotonic()
    while trials.epoch < settings[0].epochs and not trials.diverged.all():
        before = trials.diverged
        scores = trials.train() | trials.evaluate()
        seconds = trials.seconds / trials.steps / len(runs)  # of a step of one
        speeds.append(settings[0].batch_size / seconds)
        for row, run in enumerate(runs):
            if not before[row]:
                log(run, trials, row, scores)
        if time.monotonic() - saved >= CHECKPOINT_SECONDS:
            runs[0].save(epoch=trials.epoch, **trials.arrays())
            saved = time.monotonic()
    speed = float(np.median(speeds)) if speeds else None
    more = {"trials_at_once": len(runs), "images_per_second": speed}
    for row, run in reversed(list(enumerate(runs))):  # the first has the checkpoint
        best = functools.partial(trials.model, row, best=True)
        finish(run, settings[row], best, **more)


def log(run, trials, row, scores):
    """Adds the line of an epoch to the run at the place `row` of a population.

    `scores` is what the population's `train` and `evaluate` returned.
    """
    run.log(
        epoch=int(trials.epochs[row]),
        **{key: float(values[row]) for key, values in scores.items()},
        seconds_per_step=trials.seconds / trials.steps / len(trials.trials),
    )


def finish(run, settings, best, **more):
    """Saves what `best` returns, if an epoch was the best, and completes the run."""
    results = training.results_of(run) | {"saved_model": None}
    if results["best_epoch"] and settings.saved_models_dir is not None:
        results |= classifier.write(best(), settings, run)
    run.finish(results | more)


def own_of(settings):
    """The dict of a trial: the settings that are its own."""
    return {key: getattr(settings, key) for key in population.OWN}


def of(runs):
    """The `Population` of runs that differ only in `population.OWN`.

    It uses the largest number of devices that divides the number of runs.
    """
    first, own = runs[0], population.OWN
    changed = {
        key
        for other in runs
        for key, value in first.config().items()
        if key not in own and getattr(other, key) != value
    }
    if changed:
        raise ValueError(
            f"Argument `runs` must differ in {', '.join(own)} only. Received: runs "
            f"that differ in {', '.join(sorted(changed))}"
        )
    source = data.Arrays(data.images(first), first)

    def build(trial):
        settings = dataclasses.replace(first, **trial)
        return classifier.network(settings, source, settings.normalisation())

    import jax  # not installed with other backends

    devices = jax.devices()
    most = max(n for n in range(1, len(devices) + 1) if len(runs) % n == 0)
    same = ("epochs", "batch_size", "optimizer", "momentum", "weight_decay", "augment")
    same += ("replacement", "gradient_accumulation_steps")
    return population.Population(
        build,
        [own_of(settings) for settings in runs],
        source.images,
        devices=devices[:most],
        amat=first.normalisation().amat,
        **{key: getattr(first, key) for key in same},
    )
