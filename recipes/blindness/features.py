r"""Features of classifiers that were trained on batches of one label, by norm.

The small run, VGG-11 on scikit-learn's 8x8 digits; two networks; a third network; and
the paper's networks and data, for a GPU:

    python -m recipes.blindness.features
    python -m recipes.blindness.features --networks=vgg11,resnet18
    python -m recipes.blindness.features --networks=densenet121 --norms=bn,layer
    python -m recipes.blindness.features --dataset=cifar10 --data_dir=<where it is> \
        --networks=vgg11,vgg16,resnet18,resnet34,densenet121,densenet169 --width=1 \
        --epochs=100 --batch_size=128

Claim (Section 4, Experiment 2, Figure 2): if all images of a batch have one label,
networks with BN learn features that are much less clustered by label than those with LN
or without a norm; with mixed labels, BN's are well clustered. VGGs have a single norm,
before the second Dense layer from the top; ResNets and DenseNets have it everywhere.

Silhouettes (1: one cluster for each label, 0: none) are measured on what the last layer
reads from test images, at inference, and on the paper's t-SNE pictures. Both are also
measured with fresh statistics of mixed batches, in case BN's moving ones are at fault.
Training is Adam at a fixed rate on unaugmented images; the paper does not say how it
trains.

The small run takes 3.5 minutes on two cores of an AMD EPYC, a training of ResNet-18 1
to 4 on one. Silhouettes of VGG-11's features with one label are 0.05 with BN, 0.03 with
CBN, 0.32 with LN and 0.31 without a norm; with mixed labels 0.22, 0.23, 0.34 and 0.32
(mean of seeds 0 and 1, TensorFlow). The claim holds, and BN with fresh statistics is no
better. ResNet-18 and VGG-16 show the same (docs/results/blindness_features.md). On
CIFAR-10, at a quarter of the width, LN and no norm lose 2 to 5 points of accuracy with
one label; BN and CBN are left with 8 and 13 %. The full run has not been made.

Reference: Zhou et al., 2022, https://arxiv.org/abs/2205.15146
"""

import dataclasses
import functools
import itertools
import pathlib

import keras
import numpy as np

from keras_norms import CBN, LpNorm, NoisyBN, recalibrate
from recipes import models
from recipes.engine import command, data, figures, files, results, training
from recipes.engine.errors import UserError
from recipes.engine.settings import SEED, Images, Sweep, setting
from recipes.models import norms

KINDS = ("one_label", "mixed")
WITH_STATISTICS = keras.layers.BatchNormalization, CBN, NoisyBN, LpNorm
COLUMNS = {
    "silhouette": ("test", "silhouette"),
    "of the picture": ("test", "silhouette_of_picture"),
    "recalibrated": ("recalibrated", "silhouette"),
    "training images": ("train", "silhouette"),
    "test accuracy (%)": ("test", "accuracy"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Images):
    """The settings of one network."""

    NAMED = ("dataset", "network", "norm", "kind", "seed")
    VARIABLE = (
        *("kind", "seed", "omega", "epochs", "learning_rate"),
        *("train_size", "test_size"),
    )

    network: str = setting("vgg11", models.NAMES)
    norm: str = setting("bn", "Normalisation.", choices=sorted(norms.NORMS))
    omega: float | None = setting(
        None, "omega of CBN layers; 10 if not given.", at_least=0
    )
    kind: str = setting("one_label", "Labels in a batch: one, or mixed.", choices=KINDS)
    test_size: int = setting(1000, "Test images to measure.", at_least=1)
    width: float = setting(0.125, "Factor of all channels.", above=0)
    epochs: int = setting(20, "Epochs of training.", at_least=1)
    batch_size: int = setting(32, "Images in a batch.", at_least=1)
    learning_rate: float = setting(1e-4, "Learning rate of Adam.", above=0)
    seed: int = setting(0, "Seed of weights and batches.", **SEED)

    def __post_init__(self):
        super().__post_init__()
        models.check(self.network, "relu")
        if self.network in models.SMALL and norms.get(self.norm).wrapper is not None:
            raise ValueError(
                "Argument `norm` must not normalise kernels where the network has one "
                f"norm. Received: norm={self.norm!r} with network={self.network!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Training, Sweep):
    """Every network with every norm, on both kinds of batches."""

    RUN = Training

    networks: tuple[str, ...] = ("vgg11",)
    norms: tuple[str, ...] = ("none", "bn", "layer", "cbn")
    kinds: tuple[str, ...] = KINDS
    seeds: int = 2


class OneLabel(data.Batches):
    """Batches of images that have the same label, otherwise like `data.Batches`.

    In an epoch the images of each label are permuted once, remainders that do not fill
    a batch are dropped, and the batches of all labels come in one random order.
    """

    def __init__(self, x, y, batch_size, seed, first_epoch=0):
        super().__init__(x, y, batch_size, seed, first_epoch=first_epoch)
        self._places = [np.flatnonzero(y == label) for label in np.unique(y)]
        if (fewest := min(map(len, self._places))) < batch_size:
            raise UserError(
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


def build(network, image_shape, num_classes, norm, width=1.0, omega=10.0):
    """A `keras.Model` whose last layer makes the logits.

    VGG-11 and VGG-16 have one norm, before the second Dense layer from the top; other
    networks are normalised everywhere. `width` multiplies all channels and sizes.
    """
    kind, shape = norms.get(norm, omega=omega), (image_shape, num_classes)
    if make := models.SMALL.get(network):
        size = max(1, round(width * 4096))
        layer = kind.layer(size, name="norm") if kind.layer else None
        model = make(*shape, norms.get("none"), "relu", (size, size), layer)
    else:
        model = models.build(network, *shape, kind, "relu")
    return models.scaled(model, width) if width != 1 else model


def problem(settings):
    """The `recipes.engine.training.Problem` of a `Training`."""
    images = data.enlarged(data.images(settings))
    some, rate = slice(settings.test_size), settings.learning_rate
    kind = OneLabel if settings.kind == "one_label" else data.Batches
    of = images.x_train, images.y_train, settings.batch_size, settings.seed
    return training.Problem(
        network=functools.partial(_network, settings, images),
        batches=lambda first_epoch=0: kind(*of, first_epoch=first_epoch),
        steps=kind(*of).steps,
        epochs=settings.epochs,
        test=(images.x_test[some], images.y_test[some]),
        schedule=keras.optimizers.schedules.PiecewiseConstantDecay([], [rate]),
        amat=norms.get(settings.norm).amat,
        images=images,
    )


def _network(settings, images):
    shape = images.x_train.shape[1:], images.num_classes
    omega = 10.0 if settings.omega is None else settings.omega
    model = build(settings.network, *shape, settings.norm, settings.width, omega)
    model.compile(
        keras.optimizers.Adam(settings.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def split(model):
    """A model of all layers but the last, and the last, a Dense layer of logits."""
    last = model.layers[-1]
    return keras.Model(model.inputs, last.input), last


def silhouette(points, labels):
    """How well points are clustered by their labels (Rousseeuw, 1987).

    The mean over points of (b - a) / max(a, b), with a the mean distance to points of
    the same label and b the mean distance to those of the nearest other label. `None`
    if values are not finite or all the same, or if there is a single label.
    """
    from sklearn.metrics import silhouette_score

    several = 1 < len(np.unique(labels)) < len(labels)
    # Without any variance, t-SNE too fails, and ends the whole process.
    if not (several and np.isfinite(points).all() and np.var(points, axis=0).any()):
        return None
    return float(silhouette_score(points, labels))


def scores(parts, x, y, path=None, seed=0):
    """The accuracy of a classifier at inference, and how well its features cluster.

    `parts` is what `split` returns. `constant` is the share of features that are
    constant over the samples. Given the path of an .npz file, a t-SNE picture of the
    features (van der Maaten and Hinton, 2008) is written there, as `points` and
    `labels`, and measured too.
    """
    from sklearn.manifold import TSNE

    below, last = parts
    points = below.predict(x, batch_size=100, verbose=0)
    logits = keras.ops.convert_to_numpy(last(points))
    found = {
        "accuracy": float(np.mean(logits.argmax(-1) == y)),
        "silhouette": silhouette(points, y),
        "constant": float(np.mean(np.ptp(points, axis=0) == 0)),
    }
    if path is not None:
        found["silhouette_of_picture"] = None
        if found["silhouette"] is not None:
            perplexity = min(30.0, (len(points) - 1) / 3)
            flat = TSNE(perplexity=perplexity, random_state=seed).fit_transform(points)
            files.write(path, lambda file: np.savez(file, points=flat, labels=y))
            found["silhouette_of_picture"] = silhouette(flat, y)
    return found


def train(settings):
    """Trains a network and measures it; see `measure` for the results."""
    return training.train(settings, "features", problem, at_end=measure)


def measure(model, problem, settings, run):
    """What `scores` finds for training images and for as many test images.

    `recalibrated` is for the test images, with statistics of mixed training batches;
    `None` if there are no statistics.
    """
    some = slice(settings.test_size)
    seen, labels = problem.images.x_train[some], problem.images.y_train[some]
    parts, picture = split(model), run.directory / "picture.npz"
    found = {
        "train": scores(parts, seen, labels),
        "test": scores(parts, *problem.test, picture, settings.seed),
        "recalibrated": None,
    }
    if any(type(v) in WITH_STATISTICS and v.trainable for v in model.layers):
        weights = model.get_weights()
        recalibrate(model, seen, batch_size=settings.batch_size, verbose=0)
        found["recalibrated"] = scores(parts, *problem.test)
        model.set_weights(weights)
    return found


def run(settings):
    """Trains and measures; returns the directory with the results."""
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows = []
    for network, norm in itertools.product(settings.networks, settings.norms):
        case = {"network": network, "norm": norm}
        found = {kind: outcomes.of(**case, kind=kind) for kind in settings.kinds}
        rows.append(case | {kind: summary(each) for kind, each in found.items()})
    directory = settings.directory("blindness_features")
    results.write(directory, table(rows, settings), {"rows": rows})
    for network in settings.networks:
        draw(directory / f"{network}.png", outcomes, network, settings)
    return directory


def summary(outcomes):
    """Dict from the name of each of `COLUMNS` to its result over several seeds."""
    found = {}
    for name, (part, key) in COLUMNS.items():
        values = [(each.results.get(part) or {}).get(key) for each in outcomes]
        number = results.mean_and_std(values)
        found[name] = number and number | {"count": len(values) - values.count(None)}
    return found


def table(rows, settings):
    """The rows as Markdown, with a column for each kind of batches."""
    lines = []
    for row in rows:
        norm = figures.name_of(row["norm"])
        line = {"network": row["network"], "norm": norm}
        for name, kind in itertools.product(COLUMNS, settings.kinds):
            number = row[kind][name]
            digits, factor = (1, 100) if "%" in name else (3, 1)
            text = results.spread(number, digits, factor)
            if number and number["count"] < settings.seeds:
                text += f" ({number['count']} of {settings.seeds})"
            line[f"{name}, {kind.replace('_', ' ')}"] = text
        lines.append(line)
    text = results.markdown(lines[0], [line.values() for line in lines])
    return (
        f"{text}\n{results.note(settings.seeds)} "
        "Silhouettes of what the last layer reads of test images, at inference, and of "
        "its t-SNE picture; recalibrated: with statistics of mixed training batches.\n"
    )


def draw(path, outcomes, network, settings):
    """Draws Figure 2 for one network, with the first seed."""
    title = f"{data.stem(settings.dataset)}, {network}"
    title += "" if settings.width == 1 else f" of {settings.width:g} width"
    shape = len(settings.kinds), len(settings.norms)
    figure, axes = figures.subplots(*shape, title, sharey=False)
    for row, kind in zip(axes, settings.kinds):
        row[0].set_ylabel(kind.replace("_", " "))
        for axis, norm in zip(row, settings.norms):
            found = outcomes.of(network=network, norm=norm, kind=kind)[0].results
            picture = pathlib.Path(settings.runs_dir, found["name"], "picture.npz")
            score = "–"
            if picture.exists():
                score = f"{found['test']['silhouette']:.2f}"
                with np.load(picture) as file:
                    points, labels = file["points"], file["labels"]
                for label in np.unique(labels):
                    style = {"s": 6, "lw": 0, "color": f"C{label % 10}"}
                    axis.scatter(*points[labels == label].T, **style, label=str(label))
            name = figures.name_of(norm)
            axis.set_title(f"{name}\nsilhouette {score}", fontsize="small")
            axis.set(xticks=[], yticks=[])
    figures.legend(figure, axes)
    figures.save(figure, path)


if __name__ == "__main__":
    command.run(run, Settings)
