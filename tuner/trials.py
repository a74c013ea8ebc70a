"""A trial: one network for each seed, trained by `recipes.train`, and their scores."""

import dataclasses
import pathlib
import time

import keras_tuner
import numpy as np
from keras_tuner.engine import base_tuner

from keras_norms import CBN
from keras_norms.layers import layers_of
from recipes import train
from recipes.engine import run
from recipes.models import norms

IN_USE_SECONDS = 1.0  # between attempts to get a run that another worker has
IDLE_SECONDS = 1.0  # until the oracle is asked again while others train


class Tuner(base_tuner.BaseTuner):
    """Runs trials one after the other.

    Args:
        oracle: One of `tuner.oracles`.
        directory: `pathlib.Path` of the search.
        settings: The `recipes.engine.classifier.Saved` that all trials share.
        seeds: Integer, each trial trains a network for each of 0 to `seeds - 1`.
        strategy: See `recipes.train.train`.
    """

    def __init__(self, oracle, directory, settings, seeds, strategy=None):
        self.settings = settings
        self.seeds = seeds
        self.strategy = strategy
        self._is_idle = False
        super().__init__(
            oracle, directory=str(directory.parent), project_name=directory.name
        )

    # The oracle has everything to keep.

    def _get_tuner_fname(self):
        return str(pathlib.Path(self.project_dir) / "oracle.json")

    def save(self):
        if not self._is_worker():
            self.oracle.save()

    def reload(self):
        if not self._is_worker():
            self.oracle.reload()

    def pre_create_trial(self):
        # KerasTuner would ask again at once, and take a core from those that train.
        if self._is_idle:
            time.sleep(IDLE_SECONDS)
        self._is_idle = True

    def on_trial_begin(self, trial):
        self._is_idle = False

    def run_trial(self, trial):
        """Trains the networks of a trial, or continues; returns its `metrics`.

        Raises:
            keras_tuner.errors.FailedTrialError: If one of them diverged.
            keras_tuner.errors.FatalRuntimeError: On any other error, which would meet
                every trial. It ends the search; the same command continues it.
        """
        runs, until = self.runs(trial)
        results = []
        try:
            for settings in runs:
                results.append(self._train(settings, until))
                refuse_diverged(results)
        except keras_tuner.errors.FailedTrialError:
            raise
        except Exception as error:
            raise keras_tuner.errors.FatalRuntimeError(
                f"Trial {trial.trial_id} ended with an error: {error}"
            ) from error
        return metrics(results)

    def _train(self, settings, until):
        while True:
            try:
                return train.train(settings, self.strategy, until=until).results
            except run.InUse:
                # A worker has it that the chief believed gone. One of the two reports.
                time.sleep(IN_USE_SECONDS)

    def runs(self, trial):
        """The settings of a trial's runs, and the epoch until which they train."""
        values = trial.hyperparameters.values
        until = values.get("tuner/epochs", self.settings.epochs)
        shared = dataclasses.replace(self.settings, **changes(values))
        seeds = range(self.seeds)
        return [dataclasses.replace(shared, seed=seed) for seed in seeds], int(until)


def changes(values):
    """The settings that hyperparameters stand for; one may be called "rho_<stage>"."""
    settings, stages = {}, []
    for key, value in values.items():
        if key.startswith("rho_"):
            stages.append(f"{key[4:]}={exact(value)}")
        elif "/" not in key:
            settings[key] = value
    return settings | ({"stage_rho": ",".join(stages)} if stages else {})


def exact(value):
    """The text of a setting, for a float the shortest that gives it back."""
    if isinstance(value, float):
        return repr(float(value)).removesuffix(".0")  # NumPy's says what it is
    return str(value)


def stages(model):
    """The names of a network's stages that have CBN layers, in their order."""
    layers = layers_of(model, CBN)
    return list(dict.fromkeys(norms.stage(layer.name) for layer in layers))


def refuse_diverged(results):
    """Raises a FailedTrialError if the training of a seed diverged."""
    for result in results:
        if result["diverged"]:
            raise keras_tuner.errors.FailedTrialError(
                f"{result['name']} diverged in epoch {result['epochs']}"
            )


def metrics(results):
    """What the oracle gets to know of a trial, by the results of a run for each seed.

    Returns:
        Dict of floats: `accuracy`, the mean over the seeds of that of the last epoch;
        `accuracy_<seed>`, each of them; and `epochs`.
    """
    accuracies = [result["test_accuracy"] for result in results]
    return {
        "accuracy": float(np.mean(accuracies)),
        **{f"accuracy_{seed}": value for seed, value in enumerate(accuracies)},
        "epochs": float(results[0]["epochs"]),
    }
