"""Trainings by plain gradient descent that are measured every so many steps.

What the recipes of Santurkar et al. have in common: the two networks of Appendix A.1,
with one normalisation each, trained at a fixed rate, without momentum, weight decay or
augmentation; and a measurement of the weights that a step starts from, with the batch
of that step. Another measurement is one more function, see `train`.
"""

import pathlib
import time

import keras
import numpy as np
from absl import flags
from tqdm import tqdm

from recipes import data, experiment, problems
from recipes.models import dln, norms

NETWORKS = ("vgg", "dln")
VGG = {
    "dataset": "digits",
    "train_size": None,
    "test_size": None,
    "width": 0.125,
    "batch_size": 128,
    "steps": 400,
    "every": 20,
    "learning_rate": 0.1,
}
# The paper's, but for `every`, which it does not give.
DLN = {
    "depth": dln.DEPTH,
    "dtype": "float64",
    "steps": 10_000,
    "every": 100,
    "learning_rate": 1e-6,
}


def complete(config):
    """Returns `config` with the default of each setting that it lacks or has as None.

    Args:
        config: Dict with `network` and any of the keys of `VGG` or `DLN`, `norm` and
            `seed`.
    """
    config = {key: value for key, value in config.items() if value is not None}
    network = config.get("network", "vgg")
    if network not in NETWORKS:
        raise ValueError(
            f"Argument `network` must be one of {NETWORKS}. Received: {network!r}"
        )
    defaults = {"network": network, "norm": "bn", "seed": 0}
    defaults |= VGG if network == "vgg" else DLN
    if unknown := sorted(config.keys() - defaults.keys() - {"backend"}):
        raise ValueError(
            f"The network {network!r} has the settings {sorted(defaults)}. "
            f"Received: config with {unknown}"
        )
    config = defaults | config | {"backend": keras.backend.backend()}
    norms.get(config["norm"])
    for key in ("width", "steps", "every", "batch_size", "learning_rate"):
        if not config.get(key, 1) > 0:
            raise ValueError(
                f"Argument `{key}` must be positive. Received: {key}={config[key]}"
            )
    if config["steps"] % config["every"]:
        raise ValueError(
            "Argument `steps` must be a multiple of `every`. "
            f"Received: steps={config['steps']}, every={config['every']}"
        )
    return config


def run_name(kind, config):
    """The name of a run: what it is, then every setting that is not the default."""
    parts = [kind, config["network"]]
    if config["network"] == "vgg":
        parts.append(data.stem(config["dataset"]))
    return "-".join([*parts, config["norm"], f"seed{config['seed']}", *changes(config)])


def changes(config):
    """A list of the settings, without those in every name, that are not the default."""
    usual = VGG | DLN if config["network"] == "dln" else VGG
    usual = usual | {"backend": "tensorflow"}
    named = ("network", "norm", "seed", "dataset")
    return [
        f"{key}{config[key]}"
        for key in sorted(config.keys() - set(named))
        if config[key] != usual.get(key)
    ]


class _From(keras.utils.PyDataset):
    """Batches without end, from a step on."""

    def __init__(self, batch, step):
        super().__init__()
        self._batch, self._step = batch, step

    @property
    def num_batches(self):
        return None

    def __getitem__(self, i):
        return self._batch(self._step + i)


class _Recorder(keras.callbacks.Callback):
    """Measures before each interval of steps; logs and checkpoints after it.

    An interval is what Keras calls an epoch.
    """

    def __init__(self, run, problem, measure):
        super().__init__()
        self.run, self.problem, self.measure = run, problem, measure
        self.epoch = 0
        if run.checkpoint.exists():
            self._restore(problem.model)
        run.keep(self.epoch)

    def _restore(self, model):
        model.optimizer.build(model.trainable_variables)
        with np.load(self.run.checkpoint) as file:
            self.epoch = int(file["epoch"])
            for variable in model.variables:
                variable.assign(file[f"model/{variable.path}"])
            for i, variable in enumerate(model.optimizer.variables):
                variable.assign(file[f"optimizer/{i}"])

    def _save(self, file):
        arrays = {
            f"model/{v.path}": experiment.numpy_copy(v) for v in self.model.variables
        }
        for i, variable in enumerate(self.model.optimizer.variables):
            arrays[f"optimizer/{i}"] = experiment.numpy_copy(variable)
        np.savez(file, epoch=self.epoch, **arrays)

    def on_epoch_begin(self, epoch, logs=None):
        self._step = epoch * self.run.config["every"]
        start = time.perf_counter()
        batch, config = self.problem.batch, self.run.config
        self._measured = self.measure(self.model, batch, self._step, config)
        self._seconds = time.perf_counter() - start

    def on_epoch_end(self, epoch, logs=None):
        self.epoch = epoch + 1
        scores = {"train_loss": "loss", "train_accuracy": "accuracy"}
        scores |= {"test_loss": "val_loss", "test_accuracy": "val_accuracy"}
        self.run.log(
            step=self._step,
            **{key: float(logs[name]) for key, name in scores.items() if name in logs},
            seconds_of_measurement=self._seconds,
            **self._measured,
        )
        if np.isfinite(logs["loss"]):
            experiment.write(self.run.checkpoint, self._save)
        else:
            self.model.stop_training = True


def train(
    kind,
    config,
    measure,
    at_end=None,
    runs_dir="runs",
    data_dir=None,
    download=False,
):
    """Trains a network, or goes on with that, or returns what came out before.

    Args:
        kind: Start of the name of the run.
        config: See `complete`.
        measure: Callable `measure(model, batch, step, config)`, `batch` a function of a
            step. It is called with the weights that step 0, `every`, 2 `every` ...
            starts from, returns a dict for the line of metrics.jsonl, and must not
            change the model.
        at_end: Callable `at_end(problem, config)`, or `None`. It is called with the
            `recipes.problems.Problem` of the trained model, unless that diverged, and
            returns a dict of more results.
        runs_dir: The run is recorded in `<runs_dir>/<name>/`.
        data_dir, download: Arguments of `recipes.data.load`.

    Returns:
        The results, a dict with `name`, `diverged` and the losses and accuracies of the
        last interval (those of training are means over its steps); and the lines of
        metrics.jsonl, a list of dicts. What is not finite is `None`.
    """
    config = complete(config)
    name = run_name(kind, config)
    run = experiment.Run(pathlib.Path(runs_dir) / name, config)
    if run.results is not None:
        return run.results, run.metrics
    keras.backend.clear_session()
    keras.utils.set_random_seed(config["seed"])
    found = problems.problem(config, data_dir, download)
    recorder = _Recorder(run, found, measure)
    every, intervals = config["every"], config["steps"] // config["every"]
    if recorder.epoch < intervals:
        found.model.fit(
            _From(found.batch, recorder.epoch * every),
            steps_per_epoch=every,
            epochs=intervals,
            initial_epoch=recorder.epoch,
            shuffle=False,
            validation_data=found.test,
            validation_batch_size=data.TEST_BATCH_SIZE,
            callbacks=[recorder],
            verbose=0,
        )
    last = run.metrics[-1]
    scores = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
    diverged = last["train_loss"] is None
    run.finish(
        {
            "name": name,
            "diverged": diverged,
            **{key: last[key] for key in scores if key in last},
            **(at_end(found, config) if at_end and not diverged else {}),
        }
    )
    return run.results, run.metrics


def train_all(kind, settings, norm_names, measure, **others):
    """Trains the network with each norm.

    Args:
        kind, measure: See `train`.
        settings: Dict of settings that all runs share, see `complete`.
        norm_names: List of names of `recipes.models.norms`.
        **others: Other arguments of `train`.

    Returns:
        Two dicts, from a norm to its results, and to its lines of metrics.
    """
    results, metrics = {}, {}
    for norm in (progress := tqdm(norm_names, unit="run")):
        progress.set_postfix_str(norm)
        config = {**settings, "norm": norm}
        results[norm], metrics[norm] = train(kind, config, measure, **others)
    return results, metrics


def directory(kind, runs_dir, settings, norm_names):
    """Where the table and the figures of a recipe go: a name of all that was asked."""
    config = complete({**settings, "norm": "bn"}) | {"norm": "+".join(norm_names)}
    return pathlib.Path(runs_dir) / f"all-{run_name(kind, config)}"


def about(settings):
    """The network, the data and the steps, for the title of a figure."""
    config = complete({**settings, "norm": "bn"})
    rate = f"learning rate {config['learning_rate']:g}, one run each"
    if config["network"] == "dln":
        return f"{config['depth']}-layer deep linear network\n{rate}"
    width = "" if config["width"] == 1 else f" of {config['width']:g} width"
    return f"{data.stem(config['dataset'])}, VGG-16{width}\n{rate}"


def define_flags(norm_names):
    """Defines the flags that these recipes have in common.

    Args:
        norm_names: Default of the flag `norms`.
    """
    flags.DEFINE_enum("network", "vgg", NETWORKS, "VGG-16 or deep linear network.")
    flags.DEFINE_list("norms", list(norm_names), "Names of normalisations.")
    flags.DEFINE_integer("steps", None, "400; of the dln 10,000.", lower_bound=1)
    flags.DEFINE_integer("every", None, "Measure every 20; the dln 100.", lower_bound=1)
    flags.DEFINE_float("learning_rate", None, "0.1; of the dln 1e-6.", lower_bound=0)
    flags.DEFINE_integer("seed", None, "0. Of weights, order and the dln's data.")
    flags.DEFINE_string("dataset", None, "digits; the vgg's, as in recipes.train.")
    flags.DEFINE_integer("train_size", None, "All; the vgg's images.", lower_bound=1)
    flags.DEFINE_integer("test_size", None, "All; the first ones.", lower_bound=1)
    flags.DEFINE_integer("batch_size", None, "128; the vgg's.", lower_bound=1)
    flags.DEFINE_float("width", None, "0.125; the vgg's filters. 1 is VGG-16.", 0)
    flags.DEFINE_integer("depth", None, "25; the dln's layers.", lower_bound=1)
    flags.DEFINE_enum("dtype", None, ("float32", "float64"), "float64; the dln's.")
    flags.DEFINE_string("data_dir", None, "Where tensorflow_datasets looks.")
    flags.DEFINE_bool("download", False, "Download the data set if it is not there.")
    flags.DEFINE_string("runs_dir", "runs", "Where runs are recorded.")


def arguments_of_flags():
    """Keyword arguments that all these recipes have, from the flags."""
    values = flags.FLAGS.flag_values_dict()
    settings = {
        key: values[key]
        for key in ("network", "seed", *(VGG | DLN))
        if values[key] is not None
    }
    places = {key: values[key] for key in ("runs_dir", "data_dir", "download")}
    return {"settings": settings, "norm_names": values["norms"], **places}
