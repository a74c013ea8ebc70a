"""Many trainings of one recipe, several at a time, each with what it measures.

A training is that of `recipes.train`, without a saved model. Its directory is
`<runs_dir>/<kind>-<name of the settings>/`, and a line of its metrics has, next to the
losses and accuracies of the epoch, what the recipe measured.
"""

import pathlib

import keras
import numpy as np
from absl import flags
from tqdm import tqdm

from keras_norms import AMAT
from recipes import compare, data, experiment, models, optimizers
from recipes.data import TEST_BATCH_SIZE
from recipes.models import norms
from recipes.settings import complete, rho, run_name
from recipes.workers import each

ACTIVATIONS = ("sigmoid", "tanh", "relu", "selu", "swish")
SCORES = ("loss", "accuracy", "val_loss", "val_accuracy")  # in every line, renamed


class _Run(experiment.Run):
    measured = {}

    def log(self, **values):
        super().log(**values, **self.measured)


class _Recorder(experiment.Recorder):
    """Adds `measure(model)`, and what callbacks log, to the line of each epoch."""

    measure = None

    def on_epoch_end(self, epoch, logs=None):
        self.run.measured = {}
        if np.isfinite(logs["loss"]):
            if self.measure is not None:
                self.run.measured |= self.measure(self.model)
            self.run.measured |= {k: v for k, v in logs.items() if k not in SCORES}
        super().on_epoch_end(epoch, logs)


def train(
    config,
    kind="grid",
    measure=None,
    optimizer=optimizers.SGD,
    callbacks=None,
    runs_dir="runs",
    data_dir=None,
    download=False,
):
    """Trains a network, or goes on with that, or returns what came out before.

    Args:
        config: See `recipes.train.train`.
        kind: Start of the name of the run.
        measure: Callable of the model, the `ImageData` and the config at the end of an
            epoch, which returns a dict for the line of the epoch. `None` measures
            nothing. It must not change the model. An epoch with a loss that is not
            finite is not measured.
        optimizer: Class of the optimizer, with the arguments of `optimizers.SGD`.
        callbacks: Callable of the `ImageData` and the config that returns a list of
            callbacks. What they put into the `logs` of an epoch goes into its line.
        runs_dir: Where the run is recorded.
        data_dir, download: Arguments of `recipes.data.load`.

    Returns:
        The results, a dict with `name`, `epochs`, `diverged`, the `train_loss` (nats),
        `train_accuracy`, `test_loss`, `test_accuracy` of the last epoch, and
        `seconds_per_step`; and the lines of metrics.jsonl, a list of dicts. What is not
        finite is `None`.
    """
    config = complete(config)
    name = f"{kind}-{run_name(config)}"
    run = _Run(pathlib.Path(runs_dir) / name, config)
    if run.results is not None:
        return run.results, run.metrics
    sizes = config["train_size"], config["validation_size"]
    images = data.load(config["dataset"], data_dir, sizes[0], download, sizes[1])
    batches = training_batches(images, config)
    norm = norms.get(config["norm"], rho(config), config["omega"])
    model = _compiled(config, images, norm, optimizer, batches.steps)
    recorder = _Recorder(run, model)
    if measure is not None:
        recorder.measure = lambda model: measure(model, images, config)
    batches.first_epoch = recorder.epoch
    others = [AMAT()] if norm.amat else []
    others += callbacks(images, config) if callbacks is not None else []
    if recorder.epoch < config["epochs"]:
        model.fit(
            batches,
            steps_per_epoch=batches.steps,
            epochs=config["epochs"],
            initial_epoch=recorder.epoch,
            shuffle=False,  # `batches` are
            validation_data=(images.x_test, images.y_test),
            validation_batch_size=TEST_BATCH_SIZE,
            callbacks=[*others, recorder],
            verbose=0,
        )
    seconds = [line["seconds_per_step"] for line in run.metrics]
    seconds = [value for value in seconds if value is not None]
    scores = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
    run.finish(
        {
            "name": name,
            "epochs": len(run.metrics),
            "diverged": run.metrics[-1]["train_loss"] is None,
            **{key: run.metrics[-1][key] for key in scores},
            "seconds_per_step": float(np.median(seconds)) if seconds else None,
        }
    )
    return run.results, run.metrics


_last = {}  # the key and the model of the last training in this process


def _compiled(config, images, norm, optimizer, steps):
    """The network of a config, compiled.

    Runs that differ in seed and rho alone are one program. Making that takes longer
    than a small training, so the next of them gets the network of the last, with the
    weights of a new one.
    """
    key = {k: v for k, v in config.items() if k not in ("seed", "rho", "stage_rho")}
    key |= {"optimizer": optimizer, "shape": images.x_train.shape}
    again = _last.get("key") == key
    if not again:
        _last.clear()
        keras.backend.clear_session()
    keras.utils.set_random_seed(config["seed"])
    model = models.build(
        config["model"],
        images.x_train.shape[1:],
        images.num_classes,
        norm,
        config["activation"],
        dtype=config["dtype"],
    )
    if again:
        new = {variable.path: variable for variable in model.variables}
        model = _last["model"]
        for variable in model.variables:
            if variable.path in new:  # not what AMAT added, which it sets itself
                variable.assign(new[variable.path])
        for variable in model.optimizer.variables:
            if variable is not model.optimizer._learning_rate:
                variable.assign(np.zeros(variable.shape, variable.dtype))
        return model
    rate = optimizers.piecewise_schedule(
        config["learning_rate"], steps * config["epochs"]
    )
    model.compile(
        optimizer(rate, config["momentum"], config["weight_decay"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    _last.update(key=key, model=model)
    return model


def training_batches(images, config, seed=None):
    """The training batches of a config, or others of the same kind."""
    return data.Batches(
        images.x_train,
        images.y_train,
        config["batch_size"],
        seed=config["seed"] if seed is None else seed,
        augment=config["augment"],
    )


def train_all(configs, workers=None, **arguments):
    """Trains every config with `train`, `workers` at a time.

    Args:
        configs: List of dicts. Equal ones are trained once.
        workers: As in `recipes.compare.compare`.
        **arguments: Other arguments of `train`.

    Returns:
        A list of what `train` returned, in the order of `configs`.
    """
    configs = [complete(config) for config in configs]
    different = {run_name(config): config for config in configs}
    done = {}
    with tqdm(total=len(different), unit="run") as progress:
        names = list(different)
        trained = each(train, list(different.values()), workers, **arguments)
        for place, outcome in trained:
            done[names[place]] = outcome
            compare.show(progress, outcome[0])
    return [done[run_name(config)] for config in configs]


def directory(kind, runs_dir, settings, *lists):
    """Where the table and the figures of a recipe go: a name of all that was asked.

    Args:
        kind: The name of the recipe.
        runs_dir: Where runs are recorded.
        settings: Dict of the settings that all runs share.
        *lists: The lists that the recipe went through.
    """
    config = complete(settings)
    parts = [kind, data.stem(config["dataset"]), config["model"]]
    parts += ["+".join(str(item) for item in items) for items in lists]
    usual = complete({"dataset": config["dataset"]}) | {"backend": "tensorflow"}
    parts += [
        f"{key}{config[key]}"
        for key in sorted(settings.keys() | {"backend"})
        if key not in ("dataset", "model") and config[key] != usual[key]
    ]
    return pathlib.Path(runs_dir) / "-".join(parts)


def about(settings, seeds):
    """The data set, the network and the number of runs, for the title of a figure."""
    config = complete(settings)
    runs = "one run" if seeds == 1 else f"mean and range of {seeds} runs"
    return f"{data.stem(config['dataset'])}, {config['model']}, {runs}"


def write(directory, text, results):
    """Writes table.md and results.json."""
    experiment.write_json(directory / "results.json", results)
    experiment.write(directory / "table.md", lambda path: path.write_text(text))


def markdown(header, rows):
    """A Markdown table: the first column to the left, the others to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def percent(results):
    """Test accuracy of several seeds, as text: mean ± deviation over those that live.

    Args:
        results: List of the results of `train`, one a seed.
    """
    alive = [100 * r["test_accuracy"] for r in results if not r["diverged"]]
    lost = len(results) - len(alive)
    if not alive:
        return "diverged"
    text = f"{np.mean(alive):.2f} ± {np.std(alive):.2f}"
    return f"{text} ({lost} of {len(results)} diverged)" if lost else text


def spread(value, digits):
    """A dict of `mean` and `std`, or `None`, as text."""
    if value is None:
        return "–"
    return f"{value['mean']:.{digits}f} ± {value['std']:.{digits}f}"


def define_flags(model, seeds, activations=ACTIVATIONS):
    """Defines the flags that the recipes of this grid have in common.

    Args:
        model, seeds, activations: Defaults of those flags.
    """
    flags.DEFINE_string(
        "dataset", "digits", f"digits, {', '.join(data.TFDS)}, or the path of an .npz."
    )
    flags.DEFINE_string("model", model, "resnet8, resnet20, ..., vgg16.")
    flags.DEFINE_list("activations", list(activations), "As Keras calls them.")
    flags.DEFINE_integer("seeds", seeds, "How many seeds, from 0 on.", lower_bound=1)
    flags.DEFINE_integer(
        "epochs", None, "120; for digits 15, for mnist 10.", lower_bound=1
    )
    flags.DEFINE_integer("batch_size", None, "128.", lower_bound=1)
    flags.DEFINE_integer(
        "train_size", None, "Use so many training images only.", lower_bound=1
    )
    flags.DEFINE_string("data_dir", None, "Where tensorflow_datasets looks.")
    flags.DEFINE_bool("download", False, "Download the data set if it is not there.")
    flags.DEFINE_string("runs_dir", "runs", "Where runs are recorded.")
    flags.DEFINE_integer(
        "workers", None, "Networks that train at the same time.", lower_bound=1
    )


def arguments_of_flags():
    """Keyword arguments that every recipe of this grid has, from the flags."""
    values = flags.FLAGS.flag_values_dict()
    shared = ("dataset", "model", "epochs", "batch_size", "train_size")
    others = ("activations", "seeds", "data_dir", "download", "runs_dir", "workers")
    return {
        "settings": {key: values[key] for key in shared if values[key] is not None},
        **{key: values[key] for key in others},
    }


def report(directory):
    """Prints the table of a recipe and where its files are."""
    print((directory / "table.md").read_text())
    print(f"Table, figures and results.json are in {directory}")
