"""Searches over a function instead of trainings."""

import contextlib
import itertools
import math

import keras_tuner
import pytest

from recipes.engine import classifier, files
from tuner import oracles, ranges, trials

SETTINGS = classifier.Saved(epochs=9, saved_models_dir=None)


def accuracy(values):
    """Has its maximum at rho = 1/2, omega = 20."""
    rho, omega = values["rho"], values["omega"]
    return 0.9 - 0.1 * math.log2(2 * rho) ** 2 / 9 - 0.1 * (omega / 100 - 0.2) ** 2


@contextlib.contextmanager
def ends_at_write(fatal, error):
    """What runs in this context must end with `error`, from the `fatal`-th write on."""
    write, number = files.write, itertools.count(1)

    def count_down(path, save):
        if next(number) >= fatal:
            raise error
        write(path, save)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(files, "write", count_down)
        yield


class Tuner(trials.Tuner):
    """Calls `accuracy`; `fails(values)` says which trials diverge, `ran` which ran."""

    def __init__(self, oracle, directory, fails=lambda values: False):
        super().__init__(oracle, directory, SETTINGS, seeds=2)
        self.fails = fails
        self.ran = []

    def run_trial(self, trial):
        self.ran.append(trial.trial_id)
        values = trial.hyperparameters.values
        if self.fails(values):
            raise keras_tuner.errors.FailedTrialError("diverged")
        epochs = values.get("tuner/epochs", SETTINGS.epochs)
        scores = [accuracy(values) + difference for difference in (-0.01, 0.01)]
        return trials.metrics([{"test_accuracy": a, "epochs": epochs} for a in scores])


def oracle(algorithm, count=8, tune="rho,omega", directory=None):
    """The oracle of a search, in its directory if given, as a tuner sets it up."""
    space = keras_tuner.HyperParameters()
    for each in ranges.parse(tune):
        each.add(space, each.name, grid=algorithm == "grid")
    made = oracles.make(algorithm, space, count, SETTINGS.epochs, seed=1)
    if directory is not None:
        made._set_project_dir(str(directory.parent), directory.name)
    return made
