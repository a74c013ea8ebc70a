"""Finds rho, omega and other settings of a recipe, with KerasTuner.

On this machine, one trial after the other; with two at a time; and many at once in one
program, for an accelerator (JAX), where half of them end early at each rung:

    python -m tuner.search --dataset=digits --model=resnet20 --activation=sigmoid \
        --algorithm=bayesian --tune=rho,omega,learning_rate --trials=20
    python -m tuner.search ... --workers=2
    KERAS_BACKEND=jax python -m tuner.search ... --population=16

`docs/tuning.md` has many machines, many devices and TPUs. A trial is a training of
`recipes.train`, one for each seed. It is scored by the accuracy of the last epoch on
training images that are held out, so that the test images choose nothing; the best
setting, printed as a command of `recipes.train`, then trains on all of them.

The search is recorded in `<--runs_dir>/tuner-<what was asked>/`: KerasTuner's files,
the runs, tuner_results.json, table.md, accuracy.png, parallel.png, best_so_far.png. The
same command again goes on where it was, to the epoch, or with more `--trials` looks
further. A trial that diverges is one that failed, and the search goes on.

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023, Section 6.4. https://doi.org/10.1109/TPAMI.2023.3319005
"""

import contextlib
import pathlib

import keras_tuner
from absl import app, flags

from recipes import data, experiment, models, strategies, train
from recipes import population as populations
from recipes.models import norms
from tuner import cluster, oracles, report, spaces, trials

# Training images that are held out, as many as there are test images, or a tenth.
VALIDATION_SIZES = {"digits": 288, "mnist": 10_000, "cifar10": 5000, "cifar100": 5000}
RHO_PER = ("network", "stage")
TRIALS = {"random": 20, "bayesian": 20, "grid": None, "hyperband": None}


def search(
    settings,
    tune="rho,omega,learning_rate",
    algorithm="bayesian",
    trials=None,
    seeds=1,
    rho_per="network",
    workers=None,
    population=None,
    halving=2,
    strategy=None,
    search_seed=0,
    name=None,
    runs_dir="runs",
    data_dir=None,
    download=False,
):
    """Runs a search, or goes on with one, or says what came out.

    Where KerasTuner's environment variables are set, it is the chief of a cluster, or a
    worker, which reports nothing, see `tuner.cluster`.

    Args:
        settings: Dict of settings of `recipes.train.train` that all trials share. Where
            it lacks `validation_size`, that is `VALIDATION_SIZES`', or a fifth of
            `train_size`; with 0, trials are scored by the test images.
        tune: What is looked for, see `tuner.spaces.parse`.
        algorithm: `"random"`, `"grid"`, `"bayesian"` or `"hyperband"`.
        trials: Integer, how many at most. 20 if `None`, but all of a grid, and of one
            iteration of Hyperband.
        seeds: Integer, networks of a trial, whose mean accuracy is its score.
        rho_per: `"network"`, or `"stage"` for a rho of each stage.
        workers: Integer, processes on this machine that train a trial each at the same
            time, with one thread. `None`: this process alone, with all of the machine.
        population: Integer, how many networks train at once in one program, on JAX.
        halving: Integer, one of so many trials of a population stays at each rung, 1
            for all; with Hyperband it is not used.
        strategy: A name in `recipes.strategies`, for one training on many devices;
            `None` and `"none"` are one device.
        search_seed: Integer, of the oracle.
        name: Name of the search, made of the settings if `None`.
        runs_dir, data_dir, download: See `recipes.train.train`.

    Returns:
        The text of `tuner.report.write`; `None` of a worker.

    Raises:
        ValueError: If an argument is not such, or they do not go together.
    """
    places = {"data_dir": data_dir, "download": download}
    settings = _settings(settings, places)
    strategy = None if strategy == "none" else strategy
    ranges = spaces.parse(tune)
    _check(settings, ranges, algorithm, trials, seeds, rho_per)
    _check_population(ranges, population, seeds, halving, strategy)
    names = _names(ranges, rho_per, settings, places)
    about = {
        "tune": ",".join(_text(each) for each in ranges),
        "algorithm": algorithm,
        "seeds": seeds,
        "rho_per": rho_per,
        "population": population,
        "halving": halving if population else None,
        "strategy": strategy,
        "search_seed": search_seed,
    }
    directory = pathlib.Path(runs_dir) / (name or _name(settings, about))
    role = cluster.role()
    run = experiment.Run(directory, settings | about)
    if workers and role is None:
        with run:  # so that another search in this directory ends here
            pass
        cluster.run(
            search,
            workers,
            **about | {"halving": halving, "name": directory.name},
            settings=settings | {"validation_size": settings["validation_size"] or 0},
            trials=trials,
            runs_dir=runs_dir,
            **places,
        )
        return (directory / "report.txt").read_text()

    space = keras_tuner.HyperParameters()
    for each_name, each in names.items():
        each.add(space, each_name, grid=algorithm == "grid")
    total = trials or TRIALS[algorithm]
    oracle = oracles.make(algorithm, space, total, settings["epochs"], search_seed + 1)

    def found():
        return report.results(oracle, settings, seeds)

    def tell(trial):
        rows = found()
        row = next(row for row in rows["trials"] if row["trial"] == trial.trial_id)
        best = rows["best"] and rows["best"]["accuracy"]["mean"]
        ended = len(oracle.end_order)
        print(report.progress(row, ended, total, best), flush=True)

    oracle.on_end = tell
    if role == "chief":  # it trains nothing
        make = _alone(settings, seeds, places)
    else:
        make = _tuner(settings, seeds, population, halving, algorithm, strategy, places)
    with contextlib.nullcontext() if role == "worker" else run:
        tuner = make(oracle, directory)
        if ended := len(oracle.end_order):
            print(f"{ended} trials were finished before", flush=True)
        if role == "chief":
            cluster.serve(oracle)
        else:
            tuner.search()
        if role == "worker":
            return None
        text = report.write(directory, found(), settings, list(names), data_dir)
        experiment.write(directory / "report.txt", lambda path: path.write_text(text))
    return text


def _alone(settings, seeds, places, strategy=None):
    def make(oracle, directory):
        return trials.Tuner(oracle, directory, settings, seeds, strategy, **places)

    return make


def _tuner(settings, seeds, population, halving, algorithm, strategy, places):
    """A function of the oracle and the directory that makes the tuner."""
    if population is None:
        strategy = strategy and strategies.get(strategy)
        return _alone(settings, seeds, places, strategy)
    from tuner.population import Tuner  # needs JAX

    halving = 1 if algorithm == "hyperband" else halving

    def make(oracle, directory):
        return Tuner(oracle, directory, settings, seeds, population, halving, **places)

    return make


def _settings(settings, places):
    """All settings of `recipes.train`, but the seed."""
    settings = dict(settings)
    size = settings.pop("validation_size", None)
    settings = train.complete(settings)
    if size is None:
        size = _validation_size(settings, places)
    settings["validation_size"] = size or None
    settings = train.complete(settings)
    del settings["seed"]
    return settings


def _validation_size(settings, places):
    dataset = settings["dataset"]
    if dataset in data.STREAMED:
        return None
    if settings["train_size"]:
        return settings["train_size"] // 5
    if dataset in VALIDATION_SIZES:
        return VALIDATION_SIZES[dataset]
    return len(data.load(dataset, **places).y_train) // 10


def _check(settings, ranges, algorithm, trials, seeds, rho_per):
    if algorithm not in oracles.ALGORITHMS:
        raise ValueError(
            f"Argument `algorithm` must be one of {', '.join(oracles.ALGORITHMS)}. "
            f"Received: algorithm={algorithm!r}"
        )
    for key, value in (("trials", 1 if trials is None else trials), ("seeds", seeds)):
        if value < 1:
            raise ValueError(
                f"Argument `{key}` must be positive. Received: {key}={value}"
            )
    tuned = {each.name for each in ranges}
    norm = settings["norm"]
    if "rho" in tuned and norm not in norms.CBN_FAMILY:
        raise ValueError(
            f"Argument `tune` must not have rho, which the norm {norm} lacks. Those "
            f"with a rho are {', '.join(norms.CBN_FAMILY)}"
        )
    if "omega" in tuned and not norms.get(norm).amat:
        having = [name for name in norms.NORMS if norms.get(name).amat]
        raise ValueError(
            f"Argument `tune` must not have omega, which is AMAT's: the norm {norm} is "
            f"without it. Those with AMAT are {', '.join(having)}"
        )
    if rho_per not in RHO_PER or (rho_per == "stage" and "rho" not in tuned):
        raise ValueError(
            "Argument `rho_per` must be 'network', or 'stage' where rho is tuned. "
            f"Received: rho_per={rho_per!r}"
        )


def _check_population(ranges, population, seeds, halving, strategy):
    if population is None:
        return
    populations.check_backend()
    if population < seeds:
        raise ValueError(
            f"Argument `population` must have room for the {seeds} seeds of a trial. "
            f"Received: population={population}"
        )
    if halving < 1:
        raise ValueError(
            f"Argument `halving` must be positive. Received: halving={halving}"
        )
    if strategy is not None:
        raise ValueError(
            "A population uses all devices by itself: give no `strategy`. "
            f"Received: strategy={strategy!r}"
        )
    own = set(populations.OWN)
    if shared := [each.name for each in ranges if each.name not in own]:
        raise ValueError(
            "The trials of a population may differ in rho, omega and learning_rate. "
            f"Received: tune with {', '.join(shared)}"
        )


def _names(ranges, rho_per, settings, places):
    """A dict from the name of each hyperparameter to its range."""
    names = {each.name: each for each in ranges}
    if rho_per == "network":
        return names
    source = data.source({**settings, "seed": 0}, **places)
    model = models.build(
        settings["model"],
        source.image_shape,
        source.num_classes,
        settings["norm"],
        settings["activation"],
    )
    rho = names.pop("rho")
    return {f"rho_{stage}": rho for stage in trials.stages(model)} | names


def _text(each):
    if each == spaces.RANGES[each.name]:
        return each.name
    return f"{each.name}={each.low:g}..{each.high:g}"


def _name(settings, about):
    usual = {"seeds": 1, "rho_per": "network", "search_seed": 0}
    parts = [about["algorithm"], about["tune"].replace(",", "+")]
    parts += [
        f"{key}{value}"
        for key, value in about.items()
        if key not in ("tune", "algorithm") and value not in (None, usual.get(key))
    ]
    run = train.run_name(settings | {"seed": 0}).replace("-seed0", "", 1)
    return "-".join(["tuner", run, *parts])


def main(_):
    values = flags.FLAGS.flag_values_dict()
    keys = (
        *("tune", "algorithm", "trials", "seeds", "rho_per", "workers", "population"),
        *("halving", "strategy", "search_seed", "name"),
        *("runs_dir", "data_dir", "download"),
    )
    settings = {key: values[key] for key in train.DEFAULTS if key in values}
    text = search(settings, **{key: values[key] for key in keys})
    if text is not None:
        print(f"\n{text}")


if __name__ == "__main__":
    train.define_shared_flags()
    flags.DEFINE_string("model", train.DEFAULTS["model"], models.NAMES)
    flags.DEFINE_enum("norm", train.DEFAULTS["norm"], sorted(norms.NORMS), "")
    flags.DEFINE_string("activation", train.DEFAULTS["activation"], "As Keras has it.")
    flags.DEFINE_integer(
        "validation_size",
        None,
        "Training images held out for the score; 0: score by the test images.",
        lower_bound=0,
    )
    flags.DEFINE_string(
        "tune",
        "rho,omega,learning_rate",
        f"Of {', '.join(spaces.RANGES)}, with bounds or without: rho=0.5..2,omega.",
    )
    flags.DEFINE_enum("algorithm", "bayesian", list(oracles.ALGORITHMS), "")
    flags.DEFINE_integer("trials", None, "20; all of a grid or of Hyperband.", 1)
    flags.DEFINE_integer("seeds", 1, "Networks of a trial.", lower_bound=1)
    flags.DEFINE_enum("rho_per", "network", RHO_PER, "What shares a rho.")
    flags.DEFINE_integer("workers", None, "Trials at once, in processes.", 1)
    flags.DEFINE_integer("population", None, "Networks in one program, on JAX.", 1)
    flags.DEFINE_integer("halving", 2, "One of so many stays at a rung.", 1)
    names = ["none", *strategies.BACKENDS]
    flags.DEFINE_enum("strategy", "none", names, "Many devices.")
    flags.DEFINE_integer("search_seed", 0, "Of the oracle.", lower_bound=0)
    flags.DEFINE_string("name", None, "Name of the search, made of the settings.")
    app.run(main)
