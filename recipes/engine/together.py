"""Runs as those of `recipes.train`, but many of them trained together, on JAX.

A run is recorded in the same way: its directory, a line of metrics an epoch, the
network as it was after the epoch of the highest test accuracy. Its batches come in
another order than those of `recipes.train`, so that it is another run: its settings
have `population` = true, and so has its name. With whom it trained does not matter.
"""

import pathlib
import time

import numpy as np

from recipes import data, experiment, population
from recipes.settings import complete, run_name
from recipes.train import finish

CHECKPOINT_SECONDS = 60  # at most this much, and the last epoch, is trained again


def train(
    configs,
    runs_dir="runs",
    saved_models_dir="saved_models",
    data_dir=None,
    download=False,
):
    """Trains networks together, or goes on with that, or returns what came out before.

    What is complete is left as it is, and the others train. The state of all of them is
    in the checkpoint of the first of them.

    Args:
        configs: List of dicts as of `recipes.train.train`, which differ in no more than
            their seed, rho, omega and learning rate.
        runs_dir, saved_models_dir, data_dir, download: See `recipes.train.train`.

    Returns:
        List with the results of each run, a dict as of `recipes.train.train`, where
        `seconds_per_step` is the time of a step of all trials divided by their number,
        and there are also `trials_at_once`, and `images_per_second` of all trials.

    Raises:
        ValueError: If the backend is not JAX, if the runs differ in other settings, or
            if the data set is too large to be held by the device.
    """
    population.check_backend()
    configs = [describe(config) for config in configs]
    runs = [
        experiment.Run(pathlib.Path(runs_dir) / run_name(config), config)
        for config in configs
    ]
    missing = [run for run in runs if run.results is None]
    if missing:
        config = configs[0]
        sizes = config["train_size"], config["validation_size"]
        images = data.load(config["dataset"], data_dir, sizes[0], download, sizes[1])
        _train(missing, images, saved_models_dir)
    return [run.results for run in runs]


def describe(config):
    """The settings of a run that trains together with others."""
    config = {key: config[key] for key in config if key != "population"}
    return complete(config) | {"population": True}


def _train(runs, images, saved_models_dir):
    trials = population.of([run.config for run in runs], images)
    checkpoint = runs[0].checkpoint
    if checkpoint.exists():
        stored = population.trials_in(checkpoint)
        if all(trial in stored for trial in trials.trials):
            trials.restore(checkpoint)
    for run, diverged in zip(runs, trials.diverged, strict=True):
        epochs = trials.epoch  # of which a run that diverged has fewer
        run.keep(min(epochs, len(run.metrics)) if diverged else epochs)
    speeds = []
    saved = time.monotonic()
    while trials.epoch < runs[0].config["epochs"] and not trials.diverged.all():
        before = trials.diverged
        scores = trials.train() | trials.evaluate()
        speeds.append(trials.images_per_second)
        for k, run in enumerate(runs):
            if not before[k]:
                run.log(
                    epoch=trials.epoch,
                    **{key: float(values[k]) for key, values in scores.items()},
                    seconds_per_step=trials.seconds / trials.steps / len(runs),
                )
        if time.monotonic() - saved >= CHECKPOINT_SECONDS:
            trials.save(checkpoint)
            saved = time.monotonic()
    speed = float(np.median(speeds)) if speeds else None
    for k, run in reversed(list(enumerate(runs))):  # the first has the checkpoint
        trained = not np.isnan(trials.best_accuracy[k])
        finish(
            run,
            run_name(run.config),
            trials.model(k, best=True) if trained else None,
            saved_models_dir,
            trials_at_once=len(runs),
            images_per_second=speed,
        )
