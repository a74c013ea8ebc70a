r"""Finds rho, omega and other settings of a recipe, with KerasTuner.

On this machine, a trial on each core at a time; one after the other, with all of the
machine; and many at once in one program, for an accelerator (JAX), where half of them
end early at each rung:

    python -m tuner.search --dataset=digits --model=resnet20 --activation=sigmoid \
        --algorithm=bayesian --tune=rho,omega,learning_rate --trials=20
    python -m tuner.search ... --workers=1
    KERAS_BACKEND=jax python -m tuner.search ... --population=16

`docs/tuning.md` has many machines, many devices, TPUs, and what is recorded in
`<--runs_dir>/tuner-<what was asked>/`. A trial is a training of `recipes.train`, one
for each seed. It is scored by the accuracy of the last epoch on training images that
are held out, so that the test images choose nothing; the best setting, printed as a
command of `recipes.train`, then trains on all of them. The same command continues
where it stopped, to the epoch, or with more `--trials` searches further.

Reference: Peng, Yu and Yu, TPAMI 2023, https://doi.org/10.1109/TPAMI.2023.3319005
"""

import contextlib
import dataclasses
import os

import keras_tuner

from recipes.engine import classifier, command, data, devices, population, workers
from recipes.engine.run import Run
from recipes.engine.settings import SEED, setting
from recipes.models import norms
from tuner import cluster, oracles, ranges, report, trials
from tuner import population as side_by_side

# Training images to hold out: of digits a fifth, of CIFAR a tenth.
VALIDATION_SIZES = {"digits": 288, "mnist": 10_000, "cifar10": 5000, "cifar100": 5000}
TRIALS = {"random": 20, "bayesian": 20, "grid": None, "hyperband": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Training):
    """What all trials share, what is looked for, and how."""

    NAMED = (*classifier.Training.NAMED, "algorithm", "tune")

    validation_size: int | None = setting(
        None,
        "Training images held out for the score; with 0, test images give it.",
        at_least=0,
    )
    tune: tuple[str, ...] = setting(
        ("rho", "omega", "learning_rate"),
        "What to find, with bounds or without, as rho=0.5..2,omega. Of "
        f"{', '.join(ranges.RANGES)}.",
    )
    algorithm: str = setting(
        "bayesian", "KerasTuner's oracle.", choices=tuple(oracles.ALGORITHMS)
    )
    trials: int | None = setting(
        None,
        "Trials; 20 if not given, for a grid and Hyperband all there are.",
        at_least=1,
        compare=False,
    )
    seeds: int = setting(1, "Networks of a trial, whose mean is its score.", at_least=1)
    rho_per: str = setting(
        "network",
        "Whether each stage of the network has its own rho.",
        choices=("network", "stage"),
    )
    workers: int | None = setting(
        None,
        "Trials at once, each in a process; one for each core if not given.",
        at_least=1,
        compare=False,
    )
    population: int | None = setting(
        None, "Trials at once in one program, on JAX.", at_least=1
    )
    halving: int = setting(
        2,
        "One in this many trials continues at each rung of a population; with 1, all.",
        at_least=1,
    )
    strategy: str = setting(
        "none",
        "How a training is spread over devices.",
        choices=("none", *devices.BACKENDS),
    )
    search_seed: int = setting(
        0,
        "Seed of the oracle, which takes the next number.",
        at_least=0,
        at_most=SEED["at_most"] - 1,
    )
    name: str | None = setting(
        None, "Name of the search, made of the settings if not given.", compare=False
    )

    def __post_init__(self):
        super().__post_init__()
        tuned = {each.name for each in self.ranges()}
        for name in norms.unused(self.norm):
            if name in tuned:
                uses = [each for each in norms.NORMS if name not in norms.unused(each)]
                raise ValueError(
                    f"Argument `tune` must not have {name}, which the norm {self.norm} "
                    f"does not use. Those that use it are {', '.join(uses)}"
                )
        usual = classifier.Training(dataset=self.dataset)
        for name in sorted(tuned):
            if (value := getattr(self, name)) != getattr(usual, name):
                raise ValueError(
                    f"Argument `{name}` has no effect, because `tune` has it. "
                    f"Received: {name}={value!r}"
                )
        if self.rho_per == "stage" and "rho" not in tuned:
            raise ValueError(
                "Argument `rho_per` must be 'network', or 'stage' if rho is tuned. "
                f"Received: rho_per={self.rho_per!r}"
            )
        if self.population is None:
            if self.halving != Settings.halving:
                raise ValueError(
                    "Argument `halving` has no effect without `population`. "
                    f"Received: halving={self.halving}"
                )
            return
        population.check_backend()
        if self.population < self.seeds:
            raise ValueError(
                f"Argument `population` must have room for the {self.seeds} seeds of a "
                f"trial. Received: population={self.population}"
            )
        if self.strategy != "none":
            raise ValueError(
                "A population uses all devices by itself: give no `strategy`. "
                f"Received: strategy={self.strategy!r}"
            )
        if shared := sorted(tuned - set(population.OWN)):
            raise ValueError(
                "The trials of a population may differ in rho, omega and "
                f"learning_rate. Received: tune with {', '.join(shared)}"
            )

    def ranges(self):
        """The list of `tuner.ranges.Range` to search."""
        return ranges.parse(",".join(self.tune))

    def directory(self):
        """Where the search is recorded."""
        return super().directory("tuner", self.name)

    def shared(self):
        """The `recipes.engine.classifier.Saved` that all trials share."""
        fields = dataclasses.fields(classifier.Training)
        values = {field.name: getattr(self, field.name) for field in fields}
        values["runs_dir"] = str(self.directory() / "runs")
        values["validation_size"] = self._held_out() or None
        return classifier.Saved(**values, saved_models_dir=None)

    def same_everywhere(self):
        """What trials share, wherever data are: chief and workers must agree on it."""
        shared = self.shared().config()
        return shared | {"dataset": data.stem(self.dataset), "seeds": self.seeds}

    def _held_out(self):
        if self.validation_size is not None or self.dataset in data.STREAMED:
            return self.validation_size
        if self.train_size:
            return self.train_size // 5
        known = VALIDATION_SIZES.get(self.dataset)
        return known or len(data.images(self).y_train) // 10

    def processes(self):
        """How many train at the same time."""
        if self.workers:
            return self.workers
        if self.population or self.strategy != "none":
            return 1  # which has all devices
        return min(workers.default_count(), self.total() or workers.MOST)

    def total(self):
        """How many trials at most; `None` for all that the algorithm has."""
        return self.trials or TRIALS[self.algorithm]


def search(settings):
    """Runs a search, or continues one, or says what came out.

    Where KerasTuner's environment variables are set, it is the chief of a cluster, or a
    worker, see `tuner.cluster`.

    Returns:
        The text of `tuner.report.write`; `None` of a worker.
    """
    role = cluster.role()
    shared, directory = settings.shared(), settings.directory()
    tuned, space = _named(settings, shared), keras_tuner.HyperParameters()
    for name, each in tuned.items():
        each.add(space, name, grid=settings.algorithm == "grid")
    limits = settings.total(), settings.epochs, settings.search_seed + 1
    oracle = oracles.make(settings.algorithm, space, *limits)
    count = 1 if role else settings.processes()

    def found():
        return report.results(oracle, shared, settings.seeds)

    def tell(trial):
        rows = found()
        row = next(row for row in rows["trials"] if row["trial"] == trial.trial_id)
        best = rows["best"] and rows["best"]["accuracy"]["mean"]
        ended = len(oracle.end_order)
        print(report.progress(row, ended, settings.total(), best), flush=True)

    oracle.on_end = tell
    recorded = Run(directory, settings.config())
    with contextlib.nullcontext() if role == "worker" else recorded:
        if role == "chief" or count > 1:  # it trains nothing
            tuner = trials.Tuner(oracle, directory, shared, settings.seeds)
        else:
            tuner = _tuner(settings, oracle, directory, shared)
        if role == "worker":
            cluster.check(tuner.oracle, settings.same_everywhere())
        else:
            cluster.tell(oracle, settings.same_everywhere())
        if ended := len(oracle.end_order):
            print(f"{ended} trials were finished before", flush=True)
        if role == "chief":
            cluster.serve(oracle, *(os.environ[name] for name in cluster.VARIABLES[1:]))
        elif count > 1:
            if ended != settings.total():
                cluster.run(oracle, count, search, settings)
        else:
            tuner.search()
        if role == "worker":
            return None
        return report.write(directory, found(), shared, list(tuned))


def _tuner(settings, oracle, directory, shared):
    arguments = oracle, directory, shared, settings.seeds
    if settings.population is None:
        return trials.Tuner(*arguments, devices.get(settings.strategy))
    halving = 1 if settings.algorithm == "hyperband" else settings.halving
    return side_by_side.Tuner(*arguments, settings.population, halving)


def _named(settings, shared):
    """A dict from the name of each hyperparameter to its range."""
    tuned = {each.name: each for each in settings.ranges()}
    if settings.rho_per == "stage":
        rho, model = tuned.pop("rho"), classifier.problem(shared).network()
        tuned = {f"rho_{stage}": rho for stage in trials.stages(model)} | tuned
    return tuned


def run(settings):
    """Searches, and prints what came out."""
    if text := search(settings):
        print(f"\n{text}")


if __name__ == "__main__":
    command.run(run, Settings)
