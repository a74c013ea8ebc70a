"""Classifiers that are trained on batches of one label, or of mixed ones, and measured.

A run is a network with one norm, one kind of batches and one seed.
"""

import dataclasses
import functools

import keras
import numpy as np

from keras_norms import recalibrate
from keras_norms.surgery.affine import NORMS as WITH_STATISTICS
from recipes import models
from recipes.blindness import _features_measured as measured
from recipes.engine import data, training
from recipes.engine.settings import Images, setting
from recipes.models import norms
from recipes.models.vgg import vgg

KINDS = ("one_label", "mixed")
DEPTH = {"vgg11": 11, "vgg16": 16}
HIDDEN = 4096  # the size of VGG's hidden Dense layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Images):
    """The settings of one network."""

    NAMED = ("dataset", "network", "norm", "kind", "seed")
    VARIABLE = (
        *("kind", "seed", "epochs", "learning_rate", "train_size", "test_size"),
    )

    network: str = setting("vgg11", models.NAMES)
    norm: str = setting("bn", "Normalisation.", choices=sorted(norms.NORMS))
    kind: str = setting("one_label", "The labels of a batch.", choices=KINDS)
    test_size: int = setting(
        1000, "So many images are measured, the first ones.", at_least=1
    )
    width: float = setting(0.125, "Factor of all channels.", above=0)
    epochs: int = setting(20, "Of training.", at_least=1)
    batch_size: int = setting(32, "Of training.", at_least=1)
    learning_rate: float = setting(1e-4, "Of Adam.", above=0)
    seed: int = setting(0, "Of weights and batches.", at_least=0)

    def __post_init__(self):
        super().__post_init__()
        models.check(self.network, "relu")
        if self.network in DEPTH and norms.get(self.norm).wrapper is not None:
            raise ValueError(
                "Argument `norm` must not normalise kernels where the network has one "
                f"normalisation. Received: norm={self.norm!r} with "
                f"network={self.network!r}"
            )


class OneLabel(data.Batches):
    """Batches of images that have the same label, otherwise as `data.Batches`.

    An epoch is one permutation of the images of each label, less the remainders that do
    not fill a batch, and the batches of all labels in one random order.
    """

    def __init__(self, x, y, batch_size, seed, first_epoch=0):
        super().__init__(x, y, batch_size, seed, first_epoch=first_epoch)
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
        norm: A name in `recipes.models.norms.NORMS`; for a VGG it is one of a layer.
        width: Positive number, factor of all channels and sizes.

    Returns:
        A `keras.Model`.
    """
    kind = norms.get(norm)
    if network not in DEPTH:
        model = models.build(network, image_shape, num_classes, kind, "relu")
        return models.scaled(model, width) if width != 1 else model
    size = max(1, round(width * HIDDEN))
    layer = kind.layer(size, name="norm") if kind.layer else None
    plain = norms.get("none")
    shape = (DEPTH[network], image_shape, num_classes)
    model = vgg(*shape, plain, "relu", (size, size), layer, place=2)
    return models.scaled(model, width) if width != 1 else model


def problem(settings):
    """The `recipes.engine.training.Problem` of a `Training`."""
    images = data.enlarged(data.images(settings))
    some = slice(settings.test_size)
    kind = OneLabel if settings.kind == "one_label" else data.Batches
    x, y, size = images.x_train, images.y_train, settings.batch_size

    def batches(first_epoch=0):
        return kind(x, y, size, settings.seed, first_epoch=first_epoch)

    constant = keras.optimizers.schedules.PiecewiseConstantDecay
    return training.Problem(
        functools.partial(_network, settings, images),
        batches,
        batches().steps,
        settings.epochs,
        (images.x_test[some], images.y_test[some]),
        constant([], [settings.learning_rate]),
        norms.get(settings.norm).amat,
        images,
    )


def _network(settings, images):
    shape = images.x_train.shape[1:], images.num_classes
    model = build(settings.network, *shape, settings.norm, settings.width)
    model.compile(
        keras.optimizers.Adam(settings.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(settings):
    """Trains a network and measures it; see `measure` for the results."""
    return training.train(settings, "features", problem, at_end=measure)


def measure(model, problem, settings, run):
    """Measures a trained network.

    Returns:
        Dict of what `_features_measured.measure` returns: `train` of training images,
        `test` of as many test images, with a picture in the directory of the run, and
        `recalibrated` of those with statistics of mixed training batches, `None` where
        there are no statistics.
    """
    some = slice(settings.test_size)
    seen, labels = problem.images.x_train[some], problem.images.y_train[some]
    parts = measured.split(model)
    picture = run.directory / "picture.npz"
    found = {
        "train": measured.measure(parts, seen, labels),
        "test": measured.measure(parts, *problem.test, picture, settings.seed),
        "recalibrated": None,
    }
    if any(isinstance(layer, WITH_STATISTICS) for layer in model.layers):
        weights = model.get_weights()
        recalibrate(model, seen, batch_size=settings.batch_size, verbose=0)
        found["recalibrated"] = measured.measure(parts, *problem.test)
        model.set_weights(weights)
    return found
