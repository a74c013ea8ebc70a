r"""Compares normalisations: CBN learns faster than BN, most of all with sigmoid.

The first comparison is `make demo`: 30 trainings of ResNet-8 on scikit-learn's 8x8
digits, 2 to 4 minutes on two cores. The second is the paper's, with ten seeds, for a
GPU. The third is the same, but trains the ten seeds of a combination together in one
program (JAX, for an accelerator: a CPU gains nothing; batches come in another order):

    python -m recipes.compare --models=resnet8 --rho=2
    python -m recipes.compare --dataset=cifar10 --data_dir=<where it is> \
        --models=resnet20,vgg16 --seeds=10
    KERAS_BACKEND=jax python -m recipes.compare --dataset=cifar10 \
        --data_dir=<where it is> --models=resnet20,vgg16 --seeds=10 --population=10

Epochs until 90 % test accuracy on digits, and the test accuracy of the last epoch:

    activation       sigmoid        tanh        relu        selu       swish
    BN             4.0  97.5   1.0  98.3   2.0  98.1   1.7  97.7   1.7  98.4
    CBN, rho = 2   1.0  97.8   1.0  98.4   1.0  99.0   1.0  98.7   1.0  98.8

(TensorFlow 2.21, one thread per run; deviations are 0.0 to 0.5 points.) In the paper's
Table 1, ResNet-20 on CIFAR-10 goes from 79.0 % to 91.2 with sigmoid, and from 91.1 to
92.0 with ReLU.

Reference: Peng, Yu and Yu, TPAMI 2023, https://doi.org/10.1109/TPAMI.2023.3319005
"""

import dataclasses
import itertools

from recipes import train
from recipes.engine import (
    classifier,
    command,
    data,
    figures,
    files,
    joint_training,
    results,
)
from recipes.engine.settings import setting

LOOK = (
    " Look at the epochs first: how soon a norm gets there. Accuracies that differ by "
    "less than their deviations do not differ."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Saved, classifier.Populations):
    """Every model with every activation and norm."""

    RUN = classifier.Saved

    models: tuple[str, ...] = ("resnet20",)
    norms: tuple[str, ...] = ("bn", "cbn")
    activations: tuple[str, ...] = classifier.ACTIVATIONS
    target_accuracy: float = setting(
        0.9, "Count the epochs to this test accuracy.", at_least=0, at_most=1
    )


def run(settings):
    """Trains every combination; returns the directory with tables and picture."""
    runs = settings.runs()
    outcomes = joint_training.train_all(settings, runs, train.train)
    rows, panels = [], {}
    for model, activation, norm in itertools.product(
        settings.models, settings.activations, settings.norms
    ):
        cell = {"model": model, "activation": activation, "norm": norm}
        found = outcomes.of(**cell)
        summary = results.summarise(found, settings.target_accuracy)
        rows.append({**cell, **summary, "runs": [each.results for each in found]})
        title = activation if len(settings.models) == 1 else f"{model} {activation}"
        panels.setdefault(title, {})[norm] = [each.metrics for each in found]
    directory = settings.directory("compare")
    results.write(directory, table(rows, settings), {"rows": rows})
    text = details(rows, settings)
    files.write_text(directory / "details.md", text)
    figures.training_curves(
        directory / "curves.png",
        panels,
        f"{data.stem(settings.dataset)}, {', '.join(settings.models)}: mean and range "
        f"of {settings.seeds} runs",
    )
    return directory


def table(rows, settings):
    """Accuracies and epochs of all rows as Markdown, a column for each activation."""
    cell = {(row["model"], row["norm"], row["activation"]): row for row in rows}
    several = len(settings.models) > 1
    header = [*["model"] * several, "norm", *settings.activations]
    accuracies, epochs = [], []
    for model, norm in itertools.product(settings.models, settings.norms):
        names = [*[model] * several, figures.name_of(norm)]
        of = [cell[model, norm, each] for each in settings.activations]
        accuracies.append([*names, *map(_accuracy, of)])
        epochs.append([*names, *(results.epochs(r["epochs_to_target"]) for r in of)])
    return (
        "Test accuracy after the last epoch, %\n\n"
        f"{results.markdown(header, accuracies)}\n"
        f"Epochs until the test accuracy is {settings.target_accuracy:.0%}\n\n"
        f"{results.markdown(header, epochs)}\n{results.note(settings.seeds)}{LOOK}\n"
    )


def _accuracy(row):
    lost = f" ({row['diverged']} of {row['seeds']} diverged)" if row["diverged"] else ""
    return results.spread(row["test_accuracy"], 2, 100) + lost


def details(rows, settings):
    """All numbers of all rows as Markdown."""
    header = ["model", "activation", "norm", "test accuracy, %", "training loss"]
    header += [f"epochs to {settings.target_accuracy:.0%}", "ms per step"]
    lines, speeds = [], ""
    for row in rows:
        norm = figures.name_of(row["norm"])
        names = row["model"], row["activation"], norm
        loss = results.spread(row["train_loss"], 4)
        epochs = results.epochs(row["epochs_to_target"])
        seconds = results.spread(row["seconds_per_step"], 1, 1000)
        lines.append([*names, _accuracy(row), loss, epochs, seconds])
        if "trials_at_once" in row:
            speeds += (
                f"- {', '.join(names)}: {row['trials_at_once']} trials at once, "
                f"{row['images_per_second']:,.0f} images per second\n"
            )
    text = results.markdown(header, lines) + (
        "\nTraining loss (cross-entropy) of the last epoch. A step is one batch of "
        "training, without compilation.\n"
    )
    if speeds:
        text += (
            "\nTrained together in one program, where a step is that of all trials "
            f"divided by their number:\n\n{speeds}"
        )
    return text


if __name__ == "__main__":
    command.run(run, Settings)
