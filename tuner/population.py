"""Trials side by side in one compiled program, on JAX, which stay or go by halving.

The program has a fixed number of places. A trial takes one place for each of its seeds,
and all places train an epoch at a time. At the rungs, such as epochs 2, 4 and 8 of 15,
a trial that is not among the better half of all that were there ends, and the oracle's
next trial takes its places: the program stays full and is compiled once. At the end of
a search, when no trial comes any more, it is compiled again for those that are left.

With KerasTuner's Hyperband, the oracle alone decides which trials continue, each from
the weights that it ended with.

Reference: Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020,
Algorithm 2, in the form that stops trials. https://arxiv.org/abs/1810.05934
"""

import contextlib
import math
import time

import keras_tuner

from recipes.engine import files, joint_training, training
from tuner import trials


class Tuner(trials.Tuner):
    """Runs trials in a `recipes.engine.population.Population`.

    Args:
        size: Integer, how many networks train at once.
        halving: Integer. One in this many trials stays at a rung. 1: there is none.
        Other arguments: See `tuner.trials.Tuner`.
    """

    def __init__(self, oracle, directory, settings, seeds, size, halving):
        super().__init__(oracle, directory, settings, seeds)
        self._population = None
        self._slots = [_Slot(number) for number in range(max(size // seeds, 1))]
        rungs = rung_epochs(settings.epochs, halving, len(self._slots))
        self._halving = halving
        self._rungs_path = directory / f"rungs-{self.tuner_id}.json"
        # From an epoch to a dict from a trial to its score and whether it stayed.
        self._rungs = {str(epoch): {} for epoch in rungs}
        if self._rungs_path.exists():
            self._rungs = files.read_json(self._rungs_path)

    def search(self):
        with contextlib.ExitStack() as stack:
            for slot in self._slots:
                stack.enter_context(slot.held)
            saved = time.monotonic()
            while True:
                if entered := self._enter():
                    self._prepare(entered)
                else:
                    self._shrink()
                if running := [slot for slot in self._slots if slot.trial is not None]:
                    self._train(running)
                elif all(slot.closed for slot in self._slots):
                    return
                else:
                    time.sleep(0 if entered else trials.IDLE_SECONDS)
                if time.monotonic() - saved >= joint_training.CHECKPOINT_SECONDS:
                    for slot in self._slots:
                        if slot.trial is not None:
                            self._save(slot)
                    saved = time.monotonic()

    def _enter(self):
        """Asks the oracle for trials, and returns the slots that got one."""
        entered = []
        for slot in self._slots:
            while slot.trial is None and not slot.closed:
                trial = self.oracle.create_trial(f"{self.tuner_id}-{slot.number}")
                if trial.status != "RUNNING":
                    slot.closed = trial.status == "STOPPED"
                    break
                runs, slot.until = self.runs(trial)
                slot.trial = trial
                slot.settings = [joint_training.describe(settings) for settings in runs]
                slot.runs = [settings.run() for settings in slot.settings]
                for run in slot.runs:
                    slot.held.enter_context(run)
                if all(run.results is not None for run in slot.runs):
                    self._end(slot)  # the search was killed just then
                else:
                    entered.append(slot)
        return entered

    def _prepare(self, entered):
        """Puts what `_enter` returned into the population."""
        if first := self._population is None:
            # An empty place gets some network too.
            slots = [slot if slot.trial else entered[0] for slot in self._slots]
            runs = [settings for slot in slots for settings in slot.settings]
            self._population = joint_training.of(runs)
        for slot in entered:
            rows = self._rows(slot)
            for row, settings in zip(rows, slot.settings, strict=True):
                if not first:
                    self._population.replace(row, joint_training.own_of(settings))
            if (arrays := slot.runs[0].load()) is not None:
                self._population.restore(arrays, rows)
            epochs = int(self._population.epochs[rows[0]])
            for run in slot.runs:
                if run.results is None:
                    run.keep(epochs)
            if epochs >= slot.until:
                self._end(slot)  # the search was killed just then

    def _shrink(self):
        """Leaves out empty places once half of all are empty and no trial will come."""
        used = [slot for slot in self._slots if slot.trial or not slot.closed]
        if not used or self._population is None or 2 * len(used) > len(self._slots):
            return
        empty = [slot for slot in self._slots if slot not in used]
        while len(used) * self.seeds % self._population.devices:
            used.append(empty.pop())
        if len(used) < len(self._slots):
            self._population.keep([row for slot in used for row in self._rows(slot)])
            self._slots = used

    def _rows(self, slot):
        first = self._slots.index(slot) * self.seeds
        return list(range(first, first + self.seeds))

    def _train(self, running):
        """Trains all an epoch, and ends the trials whose last one it was."""
        scores = self._population.train() | self._population.evaluate()
        for slot in running:
            for run, row in zip(slot.runs, self._rows(slot), strict=True):
                if run.results is None:  # a seed of a search that was killed has some
                    joint_training.log(run, self._population, row, scores)
        diverged = self._population.diverged
        waiting = []
        for slot in running:
            rows = self._rows(slot)
            epoch = int(self._population.epochs[rows[0]])
            if diverged[rows].any() or epoch >= slot.until:
                self._end(slot)
            elif str(epoch) in self._rungs:
                waiting.append((slot, slot.trial.trial_id, self._rungs[str(epoch)]))
        # All that come to a rung at the same time are there before any is judged.
        for slot, key, rung in waiting:
            score = trials.metrics(slot.results())["accuracy"]
            rung.setdefault(key, [score, None])
        for _, key, rung in waiting:
            if rung[key][1] is None:
                scores = [score for score, _ in rung.values()]
                rung[key][1] = stays(list(rung).index(key), scores, self._halving)
        if waiting:
            files.write_json(self._rungs_path, self._rungs)
        for slot, key, rung in waiting:
            if not rung[key][1]:
                self._end(slot)

    def _save(self, slot):
        rows = self._rows(slot)
        epoch = self._population.epochs[rows[0]]
        slot.runs[0].save(epoch=epoch, **self._population.arrays(rows))

    def _end(self, slot):
        """Tells the oracle what came out of the trial in a slot, which becomes free."""
        trial = slot.trial
        results = slot.results()
        if slot.until < self.settings.epochs:
            self._save(slot)  # Hyperband may continue it, in any process
        else:
            for run in reversed(slot.runs):  # the first has the checkpoint
                if run.results is None:
                    joint_training.finish(run, self.settings, None)
        slot.held.close()
        try:
            trials.refuse_diverged(results)
            self.oracle.update_trial(trial.trial_id, trials.metrics(results))
            trial.status = "COMPLETED"
        except keras_tuner.errors.FailedTrialError as error:
            trial.status, trial.message = "FAILED", str(error)
        slot.trial = None
        self.oracle.end_trial(trial)


class _Slot:
    """Places for the seeds of one trial.

    Where there is a `trial`, there are `settings`, those of each seed, `runs`, where
    they are recorded, and `until`, an epoch.
    """

    def __init__(self, number):
        self.number = number  # with the tuner's id, the id that the oracle knows
        self.closed = False  # the oracle has no trial for it any more
        self.trial = None
        self.held = contextlib.ExitStack()  # of its runs

    def results(self):
        return [run.results or training.results_of(run) for run in self.runs]


def rung_epochs(epochs, halving, count):
    """The epochs at which trials are compared: `epochs` divided by powers of `halving`.

    The trials at once, of which there are `count`, are not divided further than to 1.
    With a `halving` of 1 there is no such epoch.
    """
    found, factor = set(), halving
    while 1 < factor <= min(count, epochs):
        found.add(math.ceil(epochs / factor))
        factor *= halving
    return sorted(found - {epochs})


def stays(place, scores, halving):
    """Whether a trial is among the best at a rung; of equal ones the first are better.

    Args:
        place: Integer, of the trial in `scores`.
        scores: List of floats, of all trials that were at the rung so far.
        halving: Integer. One in this many stays, but at least one.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return order.index(place) < math.ceil(len(scores) / halving)
