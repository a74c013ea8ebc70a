r"""CBN's rho: speed and final accuracy against rho in {1/4, 1/2, 1, 2, 4, 8}.

The small run and the paper's, for a GPU:

    python -m recipes.cbn.rho
    python -m recipes.cbn.rho --dataset=cifar100 --data_dir=<where it is> \
        --model=vgg16 --seeds=10

Claim (Section 6.4, Figures 8 and 9): a moderately large rho makes training faster and
the final loss smaller; a very large one is still faster, but ends at a higher loss; a
small one is slow and unstable. The paper has curves only, no numbers.

Test accuracy in %, mean of three seeds, ResNet-8 on digits (90 trainings, 4 minutes and
20 seconds on 2 cores of an AMD EPYC). Small rhos fail with sigmoid and tanh, as
claimed. Contrary to the claim, the training loss is smallest at the smallest rho that
trains (ReLU: the next one), and 4 and 8 are slower than 1 and 2:

    rho          1/4    1/2      1      2      4      8
    sigmoid     10.0   96.0   98.1   97.8   97.2   95.2
    tanh        10.1   16.9   97.2   98.4   98.5   98.9
    relu        97.1   97.7   98.7   99.0   98.8   98.2

Reference: Peng, Yu and Yu, TPAMI 2023, https://doi.org/10.1109/TPAMI.2023.3319005
"""

import dataclasses

import pandas as pd

from recipes.engine import classifier, command, figures, results, training
from recipes.engine.settings import setting
from recipes.models import norms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Grid):
    """Every rho with every activation."""

    model: str = "resnet8"
    norm: str = setting(
        "cbn", "Normalisation that has a rho.", choices=sorted(norms.CBN_FAMILY)
    )
    activations: tuple[str, ...] = classifier.ACTIVATIONS
    rhos: tuple[float, ...] = (1 / 4, 1 / 2, 1, 2, 4, 8)
    target_accuracy: float = setting(
        0.9, "Count the epochs to this test accuracy.", at_least=0, at_most=1
    )


def run(settings):
    """Trains everything; returns the directory with the table and the figures."""
    outcomes = training.train_all(classifier.train, settings.runs(), settings.workers)
    rows, panels, accuracies = [], {}, {}
    for activation in settings.activations:
        panels[activation], by_rho = {}, {}
        for rho in settings.rhos:
            found = outcomes.of(activation=activation, rho=rho)
            summary = results.summarise(found, settings.target_accuracy)
            rows.append({"activation": activation, "rho": rho, **summary})
            panels[activation][f"rho = {rho:g}"] = [each.metrics for each in found]
            by_rho[rho] = results.accuracies(found)
        accuracies[activation] = {settings.norm: by_rho}
    directory = settings.directory("cbn_rho")
    found = {"norm": settings.norm, "best_rho": best_rhos(rows), "rows": rows}
    results.write(directory, table(rows, settings), found)
    title = f"{settings.norm}, {settings.about()}"
    loss = [("train_loss", "training loss (nats)", {"yscale": "log"})]
    shades = figures.shades([f"rho = {rho:g}" for rho in settings.rhos])
    figures.curves(directory / "curves.png", panels, loss, title, shades)
    path, labels = directory / "accuracy.png", ("rho", "test accuracy (%)")
    figures.against(path, accuracies, *labels, title, base=2)
    return directory


def best_rhos(rows):
    """For each activation the rho with the best test accuracy, then the least loss."""
    best = {}
    for row in rows:
        if row["test_accuracy"] is not None:
            score = row["test_accuracy"]["mean"], -row["train_loss"]["mean"]
            best.setdefault(row["activation"], []).append((score, row["rho"]))
    return {activation: max(scores)[1] for activation, scores in best.items()}


def table(rows, settings):
    """The rows as Markdown, a line for each rho."""
    titles = (
        "Test accuracy after the last epoch, %",
        "Training loss of the last epoch, nats",
        f"Epochs until the test accuracy reaches {settings.target_accuracy:.0%}",
    )
    lines = []
    for row in rows:
        lost = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        accuracy = results.spread(row["test_accuracy"], 2, 100) + lost
        loss = results.spread(row["train_loss"], 4)
        epochs = results.epochs(row["epochs_to_target"])
        lines.append([f"{row['rho']:g}", row["activation"], accuracy, loss, epochs])
    frame, text = pd.DataFrame(lines, columns=["rho", "activation", *titles]), ""
    rhos = [f"{rho:g}" for rho in settings.rhos]
    for title in titles:
        part = frame.pivot_table(title, "rho", "activation", aggfunc="first")
        part = part.loc[rhos, list(settings.activations)].reset_index()
        text += f"{title}\n\n{results.markdown(part, part.values)}\n"
    return f"{text}{results.note(settings.seeds)}\n"


if __name__ == "__main__":
    command.run(run, Settings)
