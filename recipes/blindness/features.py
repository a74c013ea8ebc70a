"""Features of classifiers that were trained on batches of one label, by norm.

The small run, on scikit-learn's 8x8 digits, another network, and the paper's networks
and data, for a GPU:

    python -m recipes.blindness_features
    python -m recipes.blindness_features --networks=densenet121 --norms=bn,layer
    python -m recipes.blindness_features --dataset=cifar10 --data_dir=<where it is> \
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

import pathlib

import matplotlib
import numpy as np
from absl import app, flags
from tqdm import tqdm

from recipes import data, figures, grid, models
from recipes.features_training import BATCHES, DEFAULTS, changes, complete, train

NETWORKS = ("vgg11", "resnet18")
NORMS = ("none", "bn", "layer", "cbn")
COLUMNS = (
    ("silhouette", "test", "silhouette"),
    ("of the picture", "test", "silhouette_of_picture"),
    ("recalibrated", "recalibrated", "silhouette"),
    ("training images", "train", "silhouette"),
    ("test accuracy", "test", "accuracy"),
)


def blindness_features(
    settings, networks=NETWORKS, norm_names=NORMS, seeds=2, runs_dir="runs", **places
):
    """Trains every network with every norm, on both kinds of batches.

    Args:
        settings: Dict of settings that all runs share, with any keys of `DEFAULTS`.
        networks, norm_names: Lists of names.
        seeds: Integer, the seeds are 0 to `seeds` - 1.
        runs_dir: Where the runs, and the outcome, are recorded.
        **places: Other arguments of `train`.

    Returns:
        The path of the directory, with table.md, results.json and <network>.png.
    """
    configs = [
        {**settings, "network": network, "norm": norm, "batches": batches, "seed": seed}
        for seed in range(seeds)
        for network in networks
        for norm in norm_names
        for batches in BATCHES
    ]
    outcomes = {}
    for config in (progress := tqdm(configs, unit="run")):
        key = tuple(config[name] for name in ("network", "norm", "batches"))
        progress.set_postfix_str(", ".join(key))
        results = train(config, runs_dir, **places)
        outcomes.setdefault(key, []).append(results)
    parts = ["blindness_features", data.stem(complete(settings)["dataset"])]
    parts += ["+".join(networks), "+".join(norm_names), f"seeds{seeds}"]
    parts += changes(complete(settings))
    directory = pathlib.Path(runs_dir) / "-".join(parts)
    rows = [
        {
            "network": network,
            "norm": norm,
            **{batches: outcomes[network, norm, batches] for batches in BATCHES},
        }
        for network in networks
        for norm in norm_names
    ]
    grid.write(directory, table(rows), {"rows": rows})
    for network in networks:
        draw(directory, runs_dir, settings, network, rows)
    return directory


def table(rows):
    """Returns the rows of `blindness_features` as Markdown."""
    header = ["network", "norm"]
    header += [f"{name}, {batches}" for name, *_ in COLUMNS for batches in BATCHES]
    cells = [
        [
            row["network"],
            figures.NAME_OF.get(row["norm"], row["norm"]),
            *(
                _cell(row[batches], part, key)
                for _, part, key in COLUMNS
                for batches in BATCHES
            ),
        ]
        for row in rows
    ]
    return grid.markdown(header, cells) + (
        "\nMean ± deviation over seeds. Silhouettes of what the last layer reads of "
        "test images, at inference, and of its t-SNE picture; recalibrated: with "
        "statistics of mixed training batches.\n"
    )


def _cell(results, part, key):
    found = [r[part] and r[part][key] for r in results]
    values = [value for value in found if value is not None]
    if not values:
        return "–"
    form = "{:.1%}" if key == "accuracy" else "{:.3f}"
    of = (np.mean, np.std)[: len(values)]  # one seed has no deviation
    text = " ± ".join(form.format(f(values)) for f in of)
    less = len(values) < len(results)
    return f"{text} ({len(values)} of {len(results)})" if less else text


def draw(directory, runs_dir, settings, network, rows):
    """Draws Figure 2 for one network, with the first seed."""
    panels = {batches: {} for batches in BATCHES}
    for row in rows:
        if row["network"] != network:
            continue
        for batches, panel in panels.items():
            results = row[batches][0]
            path = pathlib.Path(runs_dir) / results["name"] / "picture.npz"
            found, score = None, "–"
            if path.exists():
                with np.load(path) as file:
                    found = file["points"], file["labels"]
                score = f"{results['test']['silhouette']:.2f}"
            name = figures.NAME_OF.get(row["norm"], row["norm"])
            panel[f"{name}\nsilhouette {score}"] = found
    config = complete(settings)
    title = f"{data.stem(config['dataset'])}, {network}"
    title += "" if config["width"] == 1 else f" of {config['width']:g} width"
    _clusters(directory / f"{network}.png", panels, title)


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


def main(_):
    values = flags.FLAGS.flag_values_dict()
    settings = {key: values[key] for key in DEFAULTS}
    places = ("networks", "seeds", "runs_dir", "data_dir", "download")
    places = {key: values[key] for key in places}
    grid.report(blindness_features(settings, norm_names=values["norms"], **places))


def _define_flags():
    sets = f"digits, {', '.join(data.TFDS)}, or the path of an .npz."
    flags.DEFINE_string("dataset", DEFAULTS["dataset"], sets)
    flags.DEFINE_list("networks", list(NETWORKS), models.NAMES)
    flags.DEFINE_list("norms", list(NORMS), "Names of normalisations.")
    flags.DEFINE_integer("seeds", 2, "How many seeds, from 0 on.", lower_bound=1)
    for key, text in (
        ("test_size", "So many images are measured, the first ones."),
        ("epochs", "Of training."),
        ("batch_size", "Of training."),
    ):
        flags.DEFINE_integer(key, DEFAULTS[key], text, lower_bound=1)
    flags.DEFINE_integer("train_size", None, "Use so many training images only.", 1)
    flags.DEFINE_float("width", DEFAULTS["width"], "Factor of all channels.", 0)
    flags.DEFINE_float("learning_rate", DEFAULTS["learning_rate"], "Of Adam.", 0)
    flags.DEFINE_string("data_dir", None, "Where tensorflow_datasets looks.")
    flags.DEFINE_bool("download", False, "Download the data set if it is not there.")
    flags.DEFINE_string("runs_dir", "runs", "Where runs are recorded.")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
