r"""Blindness of a BN layer inside trained classifiers.

The small run, on scikit-learn's 8x8 digits, and the paper's runs, for a GPU:

    python -m recipes.blindness.classifier
    python -m recipes.blindness.classifier --networks=vgg11 --dataset=cifar10 \
        --data_dir=<where it is> --epochs=100 --hidden=4096 --batches=20
    python -m recipes.blindness.classifier --dataset=mnist --data_dir=<where it is> \
        --networks=alexnet1,alexnet2,alexnet3,lenet1,lenet2,lenet3 --epochs=20 \
        --width=1 --batches=20

Claim (Zhou et al., Tables 2 to 4): let x be the input and y the output of one BN layer
between Dense layers. It stands before the second Dense layer from the top in VGG-11,
and before the k-th in AlexNet-k and LeNet-k. First-order and diagonal second-order
terms of the loss do not affect the gradient in x; off-diagonal ones do (Table 2, here
for every network). Of the off-diagonal loss of feature d, the part L_linear_d, due to
linearly correlated features, has no gradient in x_d (Table 3), but contributes a large
part of the gradient in y_d (4).

Training is in float32; networks are then measured in float32 and, on TensorFlow, in
float64. The small run takes 3.5 minutes on two shared cores of an AMD EPYC
(TensorFlow). Batches of mixed labels, float64 (float32 in brackets):

                   Table 2                             3       4, linear    the paper
              first      diagonal         off-diagonal
    vgg11     5e-13 (2e-4)  6e-13 (4e-4)  6300         –            –           –
    alexnet1  2e-16 (2e-7)  6e-16 (3e-7)   4.1   1e-15 (1e-6)  0.50 ± 0.25  0.84 ± 0.19
    lenet1    2e-16 (8e-8)  3e-16 (4e-7)   3.1   9e-16 (8e-7)  0.33 ± 0.21  0.67 ± 0.29

Tables 2 and 3 hold up to rounding, which is large in VGG-11: its loss is small compared
with the terms. The linear part of Table 4 is considerable, but not the larger one. Nor
is it in LeNet on all of MNIST (0.48, 0.31 and 0.50, the paper 0.67 to 0.77; 9 minutes
or more on a shared core). In AlexNet at a quarter of the width it is 0.66, 0.51 and
0.20, and the other part 0.67, 0.80 and 0.97 (16 minutes on a shared core for the
third). All networks: docs/results/blindness.md.

Reference: Zhou et al., 2022, https://arxiv.org/abs/2205.15146
"""

import collections
import dataclasses
import functools

import keras
import numpy as np
from keras import layers

from keras_norms.diagnostics import second_order
from keras_norms.diagnostics.blindness import TERMS, blindness
from recipes.engine import command, data, results, training
from recipes.engine.precision import available, precision
from recipes.engine.settings import SEED, Images, Sweep, setting
from recipes.models import norms
from recipes.models.alexnet import alexnet
from recipes.models.lenet import lenet
from recipes.models.vgg import vgg

NETWORKS = ("vgg11", *(f"{n}{k}" for n in ("alexnet", "lenet") for k in (1, 2, 3)))
PAPER = {  # Table 4
    "alexnet1": ("0.84 ± 0.19", "0.47 ± 0.22"),
    "alexnet2": ("0.73 ± 0.25", "0.56 ± 0.29"),
    "alexnet3": ("0.85 ± 0.22", "0.40 ± 0.28"),
    "lenet1": ("0.67 ± 0.29", "0.63 ± 0.27"),
    "lenet2": ("0.68 ± 0.29", "0.61 ± 0.29"),
    "lenet3": ("0.77 ± 0.27", "0.51 ± 0.27"),
}
NUMBERS = (*TERMS, "shared")  # of Table 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Images):
    """The settings of one network."""

    NAMED = ("dataset", "network", "seed")
    VARIABLE = ("seed", "epochs", "learning_rate", "train_size", "batches")

    network: str = setting("vgg11", "Network to train.", choices=NETWORKS)
    epochs: int = setting(15, "Epochs of training.", at_least=1)
    batch_size: int = setting(
        128, "Images in a batch, in training and in measuring.", at_least=1
    )
    learning_rate: float = setting(1e-3, "Learning rate of Adam.", above=0)
    hidden: int = setting(
        256, "Units of VGG-11's Dense layers; 4096 in the paper.", above=0
    )
    width: float = setting(1 / 16, "Factor of AlexNet's channels.", above=0)
    batches: int = setting(3, "Batches to measure.", at_least=1)
    seed: int = setting(0, "Seed of weights and batches.", **SEED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Training, Sweep):
    """Several networks."""

    RUN = Training

    networks: tuple[str, ...] = NETWORKS
    seeds: int = 1


def build(settings, images, run_eagerly=False):
    """The network of a `Training`, in the current precision of Keras."""
    name, shape = settings.network, (images.x_train.shape[1:], images.num_classes)
    norm = layers.BatchNormalization(epsilon=1e-20, name="norm")  # as the paper
    if name == "vgg11":
        hidden = (settings.hidden,) * 2
        model = vgg(11, *shape, norms.get("none"), "relu", hidden, norm)
    elif name.startswith("alexnet"):
        model = alexnet(*shape, norm, int(name[-1]), width=settings.width)
    else:
        model = lenet(*shape, norm, int(name[-1]))
    model.compile(
        keras.optimizers.Adam(settings.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        run_eagerly=run_eagerly,
    )
    return model


def _batches(images, settings, seed, first_epoch=0):
    x, y = images.x_train, images.y_train
    return data.Batches(x, y, settings.batch_size, seed, first_epoch=first_epoch)


def problem(settings):
    """The `recipes.engine.training.Problem` of a `Training`."""
    images = data.images(settings)
    batches = functools.partial(_batches, images, settings, settings.seed)
    network, epochs = functools.partial(build, settings, images), settings.epochs
    return training.Problem(network, batches, batches().steps, epochs, images=images)


def train(settings):
    """Trains a network, and measures it in every precision."""
    kind = "blindness_classifier"
    return training.train(settings, kind, problem, at_end=_in_every_precision)


def _in_every_precision(model, problem, settings, run):
    """Dict from each dtype to the mean, deviation and count of what `measure` finds."""
    found = {}
    for dtype in available():
        with precision(dtype):
            # Compiling would take longer than the gradients.
            new = build(settings, problem.images, run_eagerly=True)
            new.set_weights(model.get_weights())
            values = measure(new, problem.images, settings)
        found[dtype] = {
            key: results.mean_and_std(each) | {"count": len(each)}
            for key, each in values.items()
        }
    return found


def measure(model, images, settings):
    """Tables 2 to 4 of a trained network, over some training batches: a dict of lists.

    The keys are `NUMBERS` for mixed batches, `<number>, one label`, and those of Tables
    3 and 4, with a value for every feature that varies.
    """
    values = collections.defaultdict(list)
    batches = _batches(images, settings, settings.seed + 1)
    for index in range(settings.batches):
        x, y = batches[index]
        found = blindness(model, x, y, layers=["norm"], seed=index)
        for batch, label in enumerate(found.batches):
            end = "" if label == "mixed" else f", {label}"
            numbers = np.append(found.changes[0, batch], found.shared[0, batch])
            for key, number in zip(NUMBERS, numbers.tolist(), strict=True):
                values[f"{key}{end}"].append(number)
        if settings.network != "vgg11":  # the others have 20 features, as in the paper
            parts = second_order(model, x, y, layer="norm")
            varies = np.isfinite(parts.linear)
            for key in ("linear_at_input", "non_at_input", "linear", "non"):
                values[key] += getattr(parts, key)[varies].tolist()
    return dict(values)


def run(settings):
    """Trains and measures; returns the directory with table.md and results.json."""
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    lines = [
        {"network": run.network, "seed": run.seed, **outcome.results}
        for run, outcome in outcomes.items()
    ]
    directory = settings.directory("blindness_classifier")
    results.write(directory, table(lines), {"networks": lines})
    return directory


def table(lines):
    """The results as Markdown: Table 2, and Tables 3 and 4."""
    second = ["network", "train accuracy", "precision", "batch", *NUMBERS]
    paper = ["1.37e-08", "2.72e-08", "1019.49", "", ""]
    rows = [["paper, VGG-11", "", "", "mixed", *paper]]
    third = ["network", "precision", "norm of dL_linear/dx", "of dL_non/dx"]
    third += ["linear / all", "paper", "non / all", "paper", "features"]
    others, cell = [], functools.partial(results.spread, digits=1, kind="e")
    for line in lines:
        name = line["network"] + (f", seed {line['seed']}" if line["seed"] else "")
        accuracy = "diverged" if line["diverged"] else f"{line['train_accuracy']:.1%}"
        for dtype in [key for key in ("float32", "float64") if key in line] or ["–"]:
            values = line.get(dtype, {})
            for batch, end in (("mixed", ""), ("one label", ", one label")):
                cells = [cell(values.get(f"{key}{end}")) for key in NUMBERS]
                rows.append([name, accuracy, dtype, batch, *cells])
            if "linear" in values:
                cells = [cell(values[f"{key}_at_input"]) for key in ("linear", "non")]
                for key, number in zip(("linear", "non"), PAPER[line["network"]]):
                    cells += [results.spread(values[key], 2), number]
                others.append([name, dtype, *cells, values["linear"]["count"]])
    return f"{results.markdown(second, rows)}\n{results.markdown(third, others)}"


if __name__ == "__main__":
    command.run(run, Settings)
