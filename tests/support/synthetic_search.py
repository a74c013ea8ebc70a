"""Searches of a function in the place of trainings."""

import math

import keras_tuner

from recipes.engine import classifier
from tuner import oracles, spaces, trials

SETTINGS = classifier.Saved(epochs=9, saved_models_dir=None)


def accuracy(values):
    """Has its maximum at rho = 1/2, omega = 20."""
    rho, omega = values["rho"], values["omega"]
    return 0.9 - 0.1 * math.log2(2 * rho) ** 2 / 9 - 0.1 * (omega / 100 - 0.2) ** 2


class Killed(BaseException):
    """Ends a search at once, as SIGKILL does."""


class Tuner(trials.Tuner):
    """Calls `accuracy`; `fails(values)` says which trials diverge.

    Attributes:
        ran: List with the id of each trial that ran.
    """

    def __init__(self, oracle, directory, fails=lambda values: False):
        super().__init__(oracle, directory, SETTINGS, seeds=2)
        self.fails = fails
        self.ran = []

    def run_trial(self, trial):
        self.ran.append(trial.trial_id)
        values = trial.hyperparameters.values
        if self.fails(values):
            raise keras_tuner.errors.FailedTrialError("diverged")
        score = accuracy(values)
        epochs = values.get("tuner/epochs", SETTINGS.epochs)
        outcomes = [
            {"test_accuracy": score + sign * 0.01, "epochs": epochs} for sign in (-1, 1)
        ]
        return trials.metrics(outcomes)


def oracle(algorithm, count=8, tune="rho,omega", seed=1):
    space = keras_tuner.HyperParameters()
    for each in spaces.parse(tune):
        each.add(space, each.name, grid=algorithm == "grid")
    return oracles.make(algorithm, space, count, SETTINGS.epochs, seed)
