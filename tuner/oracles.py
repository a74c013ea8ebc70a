"""KerasTuner's oracles, with which a killed search can continue, no trial lost.

KerasTuner 1.4.8 writes its files in place, saves an ended trial as one that still runs,
and forgets the state of a grid. Here files are written whole, a trial that ended never
runs again, and the order of a grid is found again. A trial that did not end continues:
at the same tuner if that asks again, else at any other when nothing else is left.

A trial that diverged counts in Bayesian optimisation and in Hyperband as the worst one
so far. KerasTuner leaves it out, and may suggest it again.
"""

import contextlib
import functools
import pathlib
import warnings

import keras_tuner
import numpy as np
from keras_tuner.engine.hyperparameters import Float
from keras_tuner.engine.trial import Trial
from sklearn.exceptions import ConvergenceWarning

from recipes.engine import files

OBJECTIVE = keras_tuner.Objective("accuracy", "max")
ENDED = ("COMPLETED", "FAILED")


class Durable:
    """Mixin in front of a `keras_tuner.Oracle`."""

    on_end = None  # or a function of each trial that ended

    def __init__(self, **kwargs):
        super().__init__(
            objective=OBJECTIVE, max_consecutive_failed_trials=None, **kwargs
        )
        self.verbose = 0
        self._owners = {}
        self._unended = {}  # after a restart: from a trial's id to its tuner's, or None

    def populate_space(self, trial_id):
        response = super().populate_space(trial_id)
        values = response.get("values") or {}
        for hp in self.hyperparameters.space:
            # A choice of a grid must stay one of its values.
            if hp.name in values and isinstance(hp, Float):
                values[hp.name] = float(f"{values[hp.name]:.4g}")
        return response

    @keras_tuner.synchronized
    def create_trial(self, tuner_id):
        mine = [key for key, owner in self._unended.items() if owner == tuner_id]
        if mine and tuner_id not in self.ongoing_trials:
            return self._go_on(mine[0], tuner_id)
        trial = super().create_trial(tuner_id)
        if trial.status != "RUNNING" and self._unended:
            return self._go_on(next(iter(self._unended)), tuner_id)
        return trial

    def _go_on(self, trial_id, tuner_id):
        del self._unended[trial_id]
        self._retry_queue = [trial_id]
        return super().create_trial(tuner_id)

    @keras_tuner.synchronized
    def end_trial(self, trial):
        if trial.trial_id in self.end_order:
            return
        self._unended.pop(trial.trial_id, None)
        # What came back over the network may have been rounded.
        trial.hyperparameters = self.trials[trial.trial_id].hyperparameters
        super().end_trial(trial)
        self.save()  # which KerasTuner does while the trial still counts as ongoing
        if self.on_end is not None:
            self.on_end(self.trials[trial.trial_id])

    def save(self):
        files.write_json(self._get_oracle_fname(), self.get_state())

    def _save_trial(self, trial):
        directory = pathlib.Path(self._get_trial_dir(trial.trial_id))
        files.write_json(directory / "trial.json", trial.get_state())

    def _check_files(self):
        """Raises a ValueError unless the files are whole, and of this search."""
        path = pathlib.Path(self._get_oracle_fname())
        names = {hp.name for hp in self.hyperparameters.space}
        state = files.read_json(path)
        _check(path, state, self.get_state().keys(), names)
        trials = path.parent.glob("trial_*/trial.json")
        found = {file.parent.name.removeprefix("trial_"): file for file in trials}
        if missing := [key for key in state["start_order"] if key not in found]:
            raise files.damaged(path, f"there is no trial_{missing[0]}/trial.json")
        keys = Trial(keras_tuner.HyperParameters()).get_state().keys()
        for key, file in found.items():
            trial = files.read_json(file)
            _check(file, trial, keys, names)
            if trial["trial_id"] != key:
                raise files.damaged(file, f"it is of trial {trial['trial_id']}")
            with _reading(file):
                Trial.from_state(trial)

    def set_state(self, state):
        super().set_state(state)
        self._owners = {key: owner for owner, key in state["ongoing_trials"].items()}

    def reload(self):
        self._check_files()
        with _reading(self._get_oracle_fname()):
            super().reload()
        self._retry_queue = []
        # A trial that only its own file knows never began, and is made again.
        self.trials = {key: self.trials[key] for key in self.start_order}
        for key, trial in self.trials.items():
            if trial.status not in ENDED:
                trial.metrics = type(trial.metrics)()
                self._unended[key] = self._owners.get(key)
            elif key not in self.end_order:
                self.end_order.append(key)


class RandomSearch(Durable, keras_tuner.oracles.RandomSearchOracle):
    """Independent trials."""


class GridSearch(Durable, keras_tuner.oracles.GridSearchOracle):
    """Every combination, the last hyperparameter first."""

    def reload(self):
        super().reload()
        place = functools.cmp_to_key(self._compare)
        values = {key: each.hyperparameters.values for key, each in self.trials.items()}
        for key in sorted(values, key=lambda key: place(values[key])):
            self._ordered_ids.insert(key)
        self._populate_next = list(self.start_order)


class BayesianOptimization(Durable, keras_tuner.oracles.BayesianOptimizationOracle):
    """Upper confidence bounds of a Gaussian process."""

    def populate_space(self, trial_id):
        # An interrupted search then asks for what it would have asked for.
        self._random_state = np.random.RandomState([self.seed, len(self.trials)])
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
            return super().populate_space(trial_id)

    def _vectorize_trials(self):
        x, y = super()._vectorize_trials()
        space = self._nonfixed_space()
        lost = [trial for trial in self.trials.values() if trial.status == "FAILED"]
        values = [trial.hyperparameters.values for trial in lost]
        failed = [[hp.value_to_prob(one[hp.name]) for hp in space] for one in values]
        if failed:
            x = np.concatenate([x, failed])
            y = np.concatenate([y, np.full(len(failed), y.max())])
        return x, y


class Hyperband(Durable, keras_tuner.oracles.HyperbandOracle):
    """Successive halving, from trials of few epochs to those of many."""

    def populate_space(self, trial_id):
        failed = [trial for trial in self.trials.values() if trial.status == "FAILED"]
        for trial in failed:
            trial.status, trial.score = "COMPLETED", -np.inf
        try:
            return super().populate_space(trial_id)
        finally:
            for trial in failed:
                trial.status, trial.score = "FAILED", None


ALGORITHMS = {
    "random": RandomSearch,
    "grid": GridSearch,
    "bayesian": BayesianOptimization,
    "hyperband": Hyperband,
}


def make(algorithm, hyperparameters, trials, epochs, seed):
    """Makes an oracle.

    Args:
        algorithm: A name in `ALGORITHMS`.
        hyperparameters: The `keras_tuner.HyperParameters` of the space.
        trials: How many at most; `None` for all of a grid or of Hyperband.
        epochs: Of a whole training; Hyperband divides it.
        seed: Positive integer.
    """
    kwargs = {"hyperparameters": hyperparameters, "seed": seed}
    kwargs |= {"tune_new_entries": False, "allow_new_entries": False}
    if algorithm == "hyperband":
        kwargs["max_epochs"] = epochs
    oracle = ALGORITHMS[algorithm](**kwargs)
    oracle.max_trials = trials
    return oracle


def _check(path, state, keys, names):
    """Raises a ValueError unless a state has these keys and these hyperparameters."""
    if missing := sorted(keys - state.keys()):
        raise files.damaged(path, f"it lacks {', '.join(missing)}")
    with _reading(path):
        space = {hp["config"]["name"] for hp in state["hyperparameters"]["space"]}
        values = {*state["hyperparameters"]["values"]} & names
    if space != names or values != names:
        raise files.damaged(
            path, f"it has the hyperparameters {sorted(space)}, values {sorted(values)}"
        )


@contextlib.contextmanager
def _reading(path):
    """Errors of KerasTuner become those of `recipes.engine.files`."""
    try:
        yield
    except Exception as error:
        raise files.damaged(path, f"{type(error).__name__}: {error}") from None
