"""Classifiers that are trained on batches of one label, or of mixed ones, and measured.

A run is a network with one norm, one kind of batches and one seed.
"""

import pathlib

import keras
import numpy as np

from keras_norms import AMAT, recalibrate
from keras_norms.surgery.affine import NORMS as WITH_STATISTICS
from recipes import data, experiment, features_measured, models
from recipes.models import norms
from recipes.models.vgg import vgg
from recipes.problems import enlarged

BATCHES = ("one label", "mixed")
DEPTH = {"vgg11": 11, "vgg16": 16}
HIDDEN = 4096  # the size of VGG's hidden Dense layers
DEFAULTS = {
    "dataset": "digits",
    "train_size": None,
    "test_size": 1000,
    "width": 0.125,
    "epochs": 20,
    "batch_size": 32,
    "learning_rate": 1e-4,
}
USUAL = DEFAULTS | {"backend": "tensorflow"}


class OneLabel(data.Batches):
    """Batches of images that have the same label, otherwise as `data.Batches`.

    An epoch is one permutation of the images of each label, less the remainders that do
    not fill a batch, and the batches of all labels in one random order.
    """

    def __init__(self, x, y, batch_size, seed):
        super().__init__(x, y, batch_size, seed)
        self._places = [np.flatnonzero(y == label) for label in np.unique(y)]
        if (fewest := min(map(len, self._places))) < batch_size:
            raise ValueError(
                f"Argument `batch_size` must be at most {fewest}, the training images "
                f"of the rarest label. Received: batch_size={batch_size}"
            )
        self.steps = sum(len(places) // batch_size for places in self._places)

    def __getitem__(self, i):
        epoch, step = self.first_epoch + i // self.steps, i % self.steps
        rng = np.random.default_rng((self.seed, epoch))
        batches = []
        for places in self._places:
            whole = len(places) // self.batch_size * self.batch_size
            batches.extend(rng.permutation(places)[:whole].reshape(-1, self.batch_size))
        chosen = batches[rng.permutation(self.steps)[step]]
        return self.x[chosen], self.y[chosen]


def build(network, image_shape, num_classes, norm, width=1.0):
    """A network whose last layer makes the logits.

    Args:
        network: `"vgg11"` or `"vgg16"`, with two hidden Dense layers and one
            normalisation, before the second of all Dense layers from the top; or
            another name in `recipes.models`, which is normalised everywhere.
        image_shape: `(height, width, channels)`.
        num_classes: Integer.
        norm: A name in `recipes.models.norms.NORMS`. For a VGG it is `"none"`, or one
            that is a layer.
        width: Positive number, factor of all channels and sizes.

    Returns:
        A `keras.Model`.
    """
    kind = norms.get(norm)
    if network not in DEPTH:
        model = models.build(network, image_shape, num_classes, kind, "relu")
        return models.scaled(model, width) if width != 1 else model
    if kind.wrapper is not None:
        raise ValueError(
            "Argument `norm` must not normalise kernels where the network has one "
            f"normalisation. Received: norm={norm!r} with network={network!r}"
        )
    size = max(1, round(width * HIDDEN))
    layer = kind.layer(size, name="norm") if kind.layer else None
    plain = norms.get("none")
    shape = (DEPTH[network], image_shape, num_classes)
    model = vgg(*shape, plain, "relu", (size, size), layer, place=2)
    return models.scaled(model, width) if width != 1 else model


def complete(config):
    """Returns `config` with the default of each setting that it lacks or has as None.

    Args:
        config: Dict with `network`, `norm`, `batches`, one of `BATCHES`, `seed`, and
            any of the keys of `DEFAULTS`.
    """
    config = {key: value for key, value in config.items() if value is not None}
    wanted = ("network", "norm", "batches", "seed", *USUAL)
    if unknown := sorted(config.keys() - set(wanted)):
        raise ValueError(
            f"Argument `config` must have the keys {sorted(wanted)}. "
            f"Received: config with {unknown}"
        )
    config = DEFAULTS | config | {"backend": keras.backend.backend()}
    if (batches := config.get("batches", BATCHES[0])) not in BATCHES:
        raise ValueError(
            f"Argument `batches` must be one of {BATCHES}. "
            f"Received: batches={batches!r}"
        )
    norms.get(config.get("norm", "none"))
    for key in ("test_size", "width", "epochs", "batch_size", "learning_rate"):
        if not config[key] > 0:
            raise ValueError(
                f"Argument `{key}` must be positive. Received: {key}={config[key]}"
            )
    return config


def train(config, runs_dir="runs", data_dir=None, download=False):
    """Trains and measures a network, or goes on, or returns what came out before.

    Args:
        config: See `complete`.
        runs_dir: The run is recorded in `<runs_dir>/<name>/`.
        data_dir, download: Arguments of `recipes.data.load`.

    Returns:
        Dict of `name`, `diverged`, the `train_accuracy` and `train_loss` of the last
        epoch, as training saw them, and what `features_measured.measure` returns:
        `train` of training images, `test` of as many test images, and `recalibrated`
        of those with statistics of mixed training batches. What there is not is `None`.
    """
    config = complete(config)
    name = "-".join(["features", *_parts(config)])
    run = experiment.Run(pathlib.Path(runs_dir) / name, config)
    if run.results is not None:
        return run.results
    images = data.load(
        config["dataset"], data_dir, config["train_size"], download=download
    )
    images = enlarged(images)
    keras.backend.clear_session()
    keras.utils.set_random_seed(config["seed"])
    model = build(
        config["network"],
        images.x_train.shape[1:],
        images.num_classes,
        config["norm"],
        config["width"],
    )
    some = slice(config["test_size"])
    test = images.x_test[some], images.y_test[some]
    recorder = _fit(model, images, test, config, run)
    last = run.metrics[-1]
    results = {
        "name": name,
        "diverged": recorder.diverged,
        **{key: last[key] for key in ("train_accuracy", "train_loss")},
        "train": None,
        "test": None,
        "recalibrated": None,
    }
    if not recorder.diverged:
        parts = features_measured.split(model)
        seen = images.x_train[some]
        results["train"] = features_measured.measure(parts, seen, images.y_train[some])
        path = run.directory / "picture.npz"
        results["test"] = features_measured.measure(parts, *test, path, config["seed"])
        if any(isinstance(layer, WITH_STATISTICS) for layer in model.layers):
            recalibrate(model, seen, batch_size=config["batch_size"], verbose=0)
            results["recalibrated"] = features_measured.measure(parts, *test)
    run.finish(results)
    return run.results


def _fit(model, images, test, config, run):
    kind = OneLabel if config["batches"] == BATCHES[0] else data.Batches
    batches = kind(images.x_train, images.y_train, config["batch_size"], config["seed"])
    model.compile(
        keras.optimizers.Adam(config["learning_rate"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    recorder = experiment.Recorder(run, model)
    batches.first_epoch = recorder.epoch
    if recorder.epoch < config["epochs"]:
        amat = norms.get(config["norm"]).amat
        model.fit(
            batches,
            steps_per_epoch=batches.steps,
            epochs=config["epochs"],
            initial_epoch=recorder.epoch,
            shuffle=False,  # `batches` are
            validation_data=test,
            validation_batch_size=data.TEST_BATCH_SIZE,
            callbacks=[AMAT(), recorder] if amat else [recorder],
            verbose=0,
        )
    return recorder


def _parts(config):
    """The name of a run: what it is, then every setting that is not the default."""
    names = (config["network"], data.stem(config["dataset"]), config["norm"])
    named = {"network", "norm", "batches", "seed", "dataset"}
    return [
        *names,
        config["batches"].replace(" ", "_"),
        f"seed{config['seed']}",
        *changes(config, named),
    ]


def changes(config, named=("dataset",)):
    """A list of the settings, without those in `named`, that are not the default."""
    return [
        f"{key}{config[key]}"
        for key in sorted(config.keys() - set(named))
        if config[key] != USUAL[key]
    ]
