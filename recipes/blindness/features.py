"""Features of classifiers that were trained on batches of one label, by norm.

The small run, on scikit-learn's 8x8 digits, another network, and the paper's networks
and data, for a GPU:

    python -m recipes.blindness.features
    python -m recipes.blindness.features --networks=densenet121 --norms=bn,layer
    python -m recipes.blindness.features --dataset=cifar10 --data_dir=<where it is> \
        --networks=vgg11,vgg16,resnet18,resnet34,densenet121,densenet169 --width=1 \
        --epochs=100 --batch_size=128

Claim (Section 4, Experiment 2, Figure 2): where all images of a batch have one label,
so that one formula of the loss holds for all of them, networks with BN learn features
that are much less clustered by label than those with LN or without a norm. With mixed
labels, BN's are well clustered. VGGs have a single norm, before the second Dense layer
from the top; ResNets and DenseNets are normalised everywhere. LN takes one mean and one
variance of a whole sample, `layer` of `recipes.models.norms`.

The features are those of test images that the last layer reads, at inference. The paper
shows t-SNE pictures alone; here silhouette scores (1: one cluster for each label, 0:
none) measure the features and the picture. So that it is seen whether the features or
BN's moving statistics are at fault, BN is measured once more with fresh statistics, of
mixed batches. The paper gives no settings of the training: here it is Adam, at a fixed
rate, on images as they are.

The small run has 32 trainings of 1 to 4 minutes each on one core of 4 of an Intel Xeon
that much other work shared. Silhouettes of the features, mean ± deviation over seeds 0
and 1 (CBN in ResNet-18: seed 0), TensorFlow:

                        VGG-11                         ResNet-18
              one label        mixed          one label        mixed
    none    0.31 ± 0.02    0.32 ± 0.04      0.16 ± 0.02    0.20 ± 0.01
    BN      0.03 ± 0.00    0.22 ± 0.02     -0.04 ± 0.00    0.16 ± 0.01
    LN      0.32 ± 0.00    0.34 ± 0.01      0.29 ± 0.03    0.37 ± 0.03
    CBN    -0.01 ± 0.04    0.26 ± 0.07     -0.03           0.07

The claim holds, and BN with fresh statistics is no better. VGG-16, ResNet-34 and both
DenseNets, with one seed, show the same. The full run has not been
made; for a reduced one of CIFAR-10 see docs/results/blindness_features.md.

Reference: Zhou, Shen, Chen, Tang and Zhang, Batch Normalization Is Blind to the First
and Second Derivatives of the Loss, 2022, Section 4 and Figure 2.
https://arxiv.org/abs/2205.15146
"""

import dataclasses
import pathlib

import matplotlib
import numpy as np

from recipes import models
from recipes.blindness import _features_training as features_training
from recipes.blindness._features_training import KINDS, Training
from recipes.engine import command, data, figures, results, training
from recipes.engine.settings import Sweep, setting

COLUMNS = (
    ("silhouette", "test", "silhouette"),
    ("of the picture", "test", "silhouette_of_picture"),
    ("recalibrated", "recalibrated", "silhouette"),
    ("training images", "train", "silhouette"),
    ("test accuracy (%)", "test", "accuracy"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Training, Sweep):
    """Every network with every norm, on both kinds of batches."""

    RUN = Training

    networks: tuple[str, ...] = setting(("vgg11",), models.NAMES)
    norms: tuple[str, ...] = setting(("none", "bn", "layer", "cbn"), "Normalisations.")
    kinds: tuple[str, ...] = setting(KINDS, "Labels of a batch.", choices=KINDS)
    seeds: int = 2


def run(settings):
    """Trains and measures every network.

    Returns:
        The path of the directory with table.md, results.json and <network>.png.
    """
    outcomes = training.train_all(
        features_training.train, settings.runs(), settings.workers
    )
    rows = [
        {
            "network": network,
            "norm": norm,
            **{
                kind: summary(outcomes.of(network=network, norm=norm, kind=kind))
                for kind in settings.kinds
            },
        }
        for network in settings.networks
        for norm in settings.norms
    ]
    directory = settings.directory("blindness_features")
    results.write(directory, table(rows, settings), {"rows": rows})
    for network in settings.networks:
        draw(directory / f"{network}.png", outcomes, network, settings)
    return directory


def summary(outcomes):
    """Dict from the name of each of `COLUMNS` to what several seeds have in common."""
    found = {}
    for name, part, key in COLUMNS:
        values = [(each.results.get(part) or {}).get(key) for each in outcomes]
        count = sum(value is not None for value in values)
        number = results.mean_and_std(values)
        found[name] = number and number | {"count": count}
    return found


def table(rows, settings):
    """The rows as Markdown, with a column for each kind of batches."""
    header = ["network", "norm"]
    header += [
        f"{name}, {kind.replace('_', ' ')}"
        for name, *_ in COLUMNS
        for kind in settings.kinds
    ]
    cells = [
        [
            row["network"],
            figures.NAME_OF.get(row["norm"], row["norm"]),
            *(
                _cell(row[kind][name], settings.seeds, "%" in name)
                for name, *_ in COLUMNS
                for kind in settings.kinds
            ),
        ]
        for row in rows
    ]
    return (
        f"{results.markdown(header, cells)}\n{results.note(settings.seeds)} "
        "Silhouettes of what the last layer reads of test images, at inference, and of "
        "its t-SNE picture; recalibrated: with statistics of mixed training batches.\n"
    )


def _cell(number, seeds, percent):
    text = results.spread(number, *((1, 100) if percent else (3,)))
    if number is None or number["count"] == seeds:
        return text
    return f"{text} ({number['count']} of {seeds})"


def draw(path, outcomes, network, settings):
    """Draws Figure 2 for one network, with the first seed."""
    panels = {}
    for kind in settings.kinds:
        panel = panels[kind.replace("_", " ")] = {}
        for norm in settings.norms:
            outcome, *_ = outcomes.of(network=network, norm=norm, kind=kind)
            name = figures.NAME_OF.get(norm, norm)
            picture = pathlib.Path(settings.runs_dir, outcome.results["name"])
            found, score = None, "–"
            if (picture / "picture.npz").exists():
                with np.load(picture / "picture.npz") as file:
                    found = file["points"], file["labels"]
                score = f"{outcome.results['test']['silhouette']:.2f}"
            panel[f"{name}\nsilhouette {score}"] = found
    title = f"{data.stem(settings.dataset)}, {network}"
    title += "" if settings.width == 1 else f" of {settings.width:g} width"
    _clusters(path, panels, title)


def _clusters(path, panels, title):
    figure, axes = figures.subplots(
        len(panels), len(next(iter(panels.values()))), title, sharey=False
    )
    colourmap = matplotlib.colormaps["tab10"]
    for row, (name, panel) in zip(axes, panels.items()):
        row[0].set_ylabel(name)
        for axis, (text, found) in zip(row, panel.items()):
            axis.set_title(text, fontsize="small")
            axis.set(xticks=[], yticks=[])
            if found is None:
                continue
            points, labels = found
            for label in np.unique(labels):
                x, y = points[labels == label].T
                colour = colourmap(label % colourmap.N)
                axis.scatter(x, y, s=6, lw=0, color=colour, label=str(label))
    figures.legend(figure, axes)
    figures.save(figure, path)


if __name__ == "__main__":
    command.run(run, Settings)
