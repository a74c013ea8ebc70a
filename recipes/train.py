"""Trains one network with one normalisation, as Section 6.1 of the CBN paper does.

The small run, on scikit-learn's 8x8 digits, takes half a minute on 2 cores (with 15
epochs, the default, less), and the paper's run needs a GPU:

    python -m recipes.train --dataset=digits --model=resnet20 --norm=cbn \
        --activation=sigmoid --rho=1 --omega=10 --epochs=30 --seed=0
    python -m recipes.train --dataset=cifar10 --data_dir=<where it is> --norm=cbn

With sigmoid and seed 0, the small run passes 90 % test accuracy in epoch 2 and ends at
98.9 %; with `--norm=bn`, in epoch 7 and at 98.6 %. The paper's table has 120 epochs of
CIFAR-10, ten seeds, and a rho for each activation (`recipes.compare` has the mean of
several seeds).

The same command goes on where it was interrupted, with the same batches: on one
machine with the same number of threads, the outcome is that of an uninterrupted run.

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023, Section 6.1. https://doi.org/10.1109/TPAMI.2023.3319005
"""

import pathlib

import keras
import numpy as np
from absl import app, flags

from keras_norms import AMAT
from recipes import data, experiment, models, optimizers
from recipes.models import norms

# The settings that decide the outcome. They are the paper's for CIFAR.
DEFAULTS = {
    "dataset": "digits",
    "model": "resnet20",
    "norm": "cbn",
    "activation": "sigmoid",
    "rho": 1.0,
    "omega": 10.0,
    "epochs": 120,
    "seed": 0,
    "batch_size": 128,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "train_size": None,
    "augment": False,
}
EPOCHS = {"digits": 15, "mnist": 10}  # where 120 are not needed
TEST_BATCH_SIZE = 500


def complete(config):
    """Returns `config` with the default of each setting that it lacks or has as None.

    Args:
        config: Dict with any of the keys of `DEFAULTS`.

    Returns:
        Dict with all of them, and `"backend"`, that of Keras.
    """
    if unknown := sorted(config.keys() - DEFAULTS.keys() - {"backend"}):
        raise ValueError(
            f"Argument `config` must have the keys {sorted(DEFAULTS)}. "
            f"Received: config with {unknown}"
        )
    config = {key: value for key, value in config.items() if value is not None}
    dataset = data.stem(config.get("dataset", DEFAULTS["dataset"]))
    defaults = DEFAULTS | {
        "epochs": EPOCHS.get(dataset, DEFAULTS["epochs"]),
        "augment": data.augmented(dataset),
    }
    config = defaults | config | {"backend": keras.backend.backend()}
    models.check(config["model"], config["activation"])
    norms.get(config["norm"], config["rho"], config["omega"])
    for key in ("epochs", "batch_size", "learning_rate"):
        if not config[key] > 0:
            raise ValueError(
                f"Argument `{key}` must be positive. Received: {key}={config[key]}"
            )
    return config


NAMED = ("dataset", "model", "norm", "activation", "seed")


def run_name(config):
    """The name of a run: what it is, then every setting that is not the default."""
    return "-".join(
        [
            data.stem(config["dataset"]),
            config["model"],
            config["norm"],
            config["activation"],
            f"seed{config['seed']}",
            *changes(config),
        ]
    )


def changes(config):
    """A list of the settings, without those in `NAMED`, that are not the default."""
    usual = complete({"dataset": config["dataset"]}) | {"backend": "tensorflow"}
    return [
        f"{key}{config[key]}"
        for key in sorted(config.keys() - set(NAMED))
        if config[key] != usual[key]
    ]


def train(
    config,
    name=None,
    runs_dir="runs",
    saved_models_dir="saved_models",
    data_dir=None,
    download=False,
    verbose="auto",
):
    """Trains a network, or goes on with that, or returns what came out before.

    Args:
        config: Dict with any of the keys of `DEFAULTS`; the others have that value.
        name: Name of the run; `run_name(config)` where None.
        runs_dir: The run is recorded in `<runs_dir>/<name>/`.
        saved_models_dir: The network as it was after the epoch of the highest test
            accuracy goes to `<saved_models_dir>/<name>.keras`.
        data_dir, download: Arguments of `recipes.data.load`.
        verbose: As in `keras.Model.fit`.

    Returns:
        Dict with the name of the run, its last epoch (`epochs`, and if the loss became
        NaN there, `diverged`), train and test loss and accuracy in that epoch, the
        highest test accuracy and its epoch, the median seconds of a training step, and
        the path of the saved model. A loss is the mean cross-entropy in nats. What
        there is not is None: a loss that is NaN, the best of no epoch.
    """
    config = complete(config)
    name = name or run_name(config)
    run = experiment.Run(pathlib.Path(runs_dir) / name, config)
    if run.results is not None:
        return run.results

    keras.backend.clear_session()
    keras.utils.set_random_seed(config["seed"])
    images = data.load(config["dataset"], data_dir, config["train_size"], download)
    model = models.build(
        config["model"],
        images.x_train.shape[1:],
        images.num_classes,
        norm=config["norm"],
        activation=config["activation"],
        rho=config["rho"],
        omega=config["omega"],
    )
    batches = data.Batches(
        images.x_train,
        images.y_train,
        config["batch_size"],
        seed=config["seed"],
        augment=config["augment"],
    )
    rate = optimizers.piecewise_schedule(
        config["learning_rate"], batches.steps * config["epochs"]
    )
    model.compile(
        optimizers.SGD(rate, config["momentum"], config["weight_decay"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    recorder = experiment.Recorder(run, model)
    batches.first_epoch = recorder.epoch
    if recorder.epoch < config["epochs"]:
        model.fit(
            batches,
            steps_per_epoch=batches.steps,
            epochs=config["epochs"],
            initial_epoch=recorder.epoch,
            shuffle=False,  # `batches` are
            validation_data=(images.x_test, images.y_test),
            validation_batch_size=TEST_BATCH_SIZE,
            callbacks=[AMAT(), recorder] if config["norm"] == "cbn" else [recorder],
            verbose=verbose,
        )

    saved_model = None
    if recorder.best is not None:
        saved_model = pathlib.Path(saved_models_dir) / f"{name}.keras"
        for variable in model.variables:
            variable.assign(recorder.best[variable.path])
        # A new model has no optimizer, so that reading it needs keras_norms only.
        bare = keras.Model(model.inputs, model.outputs, name=model.name)
        experiment.write(saved_model, bare.save)
    metrics = run.metrics
    finite = [line for line in metrics if line["train_loss"] is not None]
    best = max(finite, key=lambda line: line["test_accuracy"], default={})
    seconds = [line["seconds_per_step"] for line in metrics]
    seconds = [value for value in seconds if value is not None]
    scores = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
    results = {
        "name": name,
        "epochs": len(metrics),
        "diverged": recorder.diverged,
        **{key: metrics[-1][key] for key in scores},
        "best_test_accuracy": best.get("test_accuracy"),
        "best_epoch": best.get("epoch"),
        "seconds_per_step": float(np.median(seconds)) if seconds else None,
        "saved_model": saved_model and str(saved_model),
    }
    run.finish(results)
    return results


def define_shared_flags():
    """Defines the flags that train.py and compare.py have in common."""
    flags.DEFINE_string(
        "dataset",
        DEFAULTS["dataset"],
        f"digits, {', '.join(data.TFDS)}, or the path of an .npz file.",
    )
    flags.DEFINE_float("rho", DEFAULTS["rho"], "CBN's rho.", lower_bound=0)
    flags.DEFINE_float("omega", DEFAULTS["omega"], "CBN's omega.", lower_bound=0)
    flags.DEFINE_integer(
        "epochs", None, "120; for digits 15, for mnist 10.", lower_bound=1
    )
    flags.DEFINE_integer("batch_size", DEFAULTS["batch_size"], "", lower_bound=1)
    flags.DEFINE_float("learning_rate", DEFAULTS["learning_rate"], "Of epoch 1.")
    flags.DEFINE_float("momentum", DEFAULTS["momentum"], "", 0, 1)
    flags.DEFINE_float(
        "weight_decay", DEFAULTS["weight_decay"], "Added to the gradient.", 0
    )
    flags.DEFINE_integer(
        "train_size", None, "Use so many training images only.", lower_bound=1
    )
    flags.DEFINE_bool(
        "augment", None, "Pad by 4, crop and mirror training images; CIFAR's if None."
    )
    flags.DEFINE_string("data_dir", None, "Where tensorflow_datasets looks.")
    flags.DEFINE_bool("download", False, "Download the data set if it is not there.")
    flags.DEFINE_string("runs_dir", "runs", "Where runs are recorded.")
    flags.DEFINE_string("saved_models_dir", "saved_models", "Where models are saved.")


def main(_):
    values = flags.FLAGS.flag_values_dict()
    config = {key: values[key] for key in DEFAULTS}
    places = ("name", "runs_dir", "saved_models_dir", "data_dir", "download")
    results = train(config, **{key: values[key] for key in places})
    print(f"{results['name']} is complete:")
    for key, value in results.items():
        print(f"  {key}: {value}")


if __name__ == "__main__":
    define_shared_flags()
    flags.DEFINE_string("model", DEFAULTS["model"], "resnet8, resnet20, ..., vgg16.")
    flags.DEFINE_enum("norm", DEFAULTS["norm"], sorted(norms.NORMS), "")
    flags.DEFINE_string("activation", DEFAULTS["activation"], "As Keras calls it.")
    flags.DEFINE_integer("seed", DEFAULTS["seed"], "Of weights, order, augmentation.")
    flags.DEFINE_string("name", None, "Name of the run, made of the settings if None.")
    app.run(main)
