"""A trial: one network for each seed, trained by `recipes.train`, and their scores."""

import gc
import pathlib
import time

import keras_tuner
import numpy as np
from keras_tuner.engine import base_tuner

from recipes import files, train
from recipes.models import norms

IN_USE_SECONDS = 1.0  # until a run is asked for again that another worker trains


class Tuner(base_tuner.BaseTuner):
    """Runs trials one after the other.

    Args:
        oracle: One of `tuner.oracles`.
        directory: `pathlib.Path` of the search.
        settings: Dict of the settings of `recipes.train` that all trials share.
        seeds: Integer, each trial trains a network for each of 0 to `seeds - 1`.
        strategy: See `recipes.train.train`.
        **places: `data_dir` and `download` of `recipes.train.train`.
    """

    def __init__(self, oracle, directory, settings, seeds, strategy=None, **places):
        self.settings = settings
        self.seeds = seeds
        self.strategy = strategy
        self.places = places
        self.runs_dir = directory / "runs"
        super().__init__(
            oracle, directory=str(directory.parent), project_name=directory.name
        )

    # The oracle has all that there is to keep.

    def _get_tuner_fname(self):
        return str(pathlib.Path(self.project_dir) / "oracle.json")

    def save(self):
        if not self._is_worker():
            self.oracle.save()

    def reload(self):
        if not self._is_worker():
            self.oracle.reload()

    def run_trial(self, trial):
        """Trains the networks of a trial, or goes on with them.

        Returns:
            What `metrics` returns.

        Raises:
            keras_tuner.errors.FailedTrialError: If one of them diverged.
            keras_tuner.errors.FatalRuntimeError: On any other error, which would meet
                every trial, and ends the search; the same command goes on with it.
        """
        configs, until = self.configs(trial)
        outcomes = []
        try:
            for config in configs:
                outcomes.append(self._train(config, until))
                refuse_diverged(outcomes[-1:])
        except keras_tuner.errors.FailedTrialError:
            raise
        except Exception as error:
            raise keras_tuner.errors.FatalRuntimeError(
                f"Trial {trial.trial_id} ended with an error: {error}"
            ) from error
        return metrics(outcomes)

    def _train(self, config, until):
        gc.collect()  # the last network, in cycles that Python finds too late
        while True:
            try:
                return train.train(
                    config,
                    runs_dir=self.runs_dir,
                    saved_models_dir=None,
                    verbose=0,
                    until=until,
                    strategy=self.strategy,
                    **self.places,
                )
            except files.InUse:
                # By a worker that the chief believed to be gone. One of both tells it.
                time.sleep(IN_USE_SECONDS)

    def configs(self, trial):
        """The settings of a trial's runs, and the epoch until which they train."""
        values = trial.hyperparameters.values
        until = values.get("tuner/epochs", self.settings["epochs"])
        config = self.settings | changes(values)
        return [config | {"seed": seed} for seed in range(self.seeds)], int(until)


def changes(values):
    """The settings of `recipes.train` that hyperparameters stand for.

    Args:
        values: Dict from a hyperparameter, which may be "rho_<stage>", to its value.
    """
    values = {key: value for key, value in values.items() if "/" not in key}
    stages = {key: value for key, value in values.items() if key.startswith("rho_")}
    config = {key: value for key, value in values.items() if key not in stages}
    if stages:
        parts = [f"{key[4:]}={value:g}" for key, value in stages.items()]
        config["stage_rho"] = ",".join(parts)
    return config


def stages(model):
    """The names of a network's stages that have CBN layers, in their order."""
    layers = model._flatten_layers()
    found = [
        norms.stage(layer.name) for layer in layers if isinstance(layer, norms.CBN)
    ]
    return list(dict.fromkeys(found))


def refuse_diverged(outcomes):
    """Raises a FailedTrialError if the training of a seed diverged."""
    for outcome in outcomes:
        if outcome["diverged"]:
            raise keras_tuner.errors.FailedTrialError(
                f"{outcome['name']} diverged in epoch {outcome['epochs']}"
            )


def metrics(outcomes):
    """What the oracle gets to know of a trial.

    Args:
        outcomes: List of the results of `recipes.train.train`, one a seed.

    Returns:
        Dict of floats: `accuracy`, the mean over the seeds of that of the last epoch;
        `accuracy_<seed>`, each of them; `epochs`; and `seconds`, of all training steps.
    """
    accuracies = [outcome["test_accuracy"] for outcome in outcomes]
    return {
        "accuracy": float(np.mean(accuracies)),
        **{f"accuracy_{seed}": value for seed, value in enumerate(accuracies)},
        "epochs": float(outcomes[0]["epochs"]),
    }
