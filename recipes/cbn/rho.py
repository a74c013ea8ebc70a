"""CBN's rho: speed and final accuracy against rho in {1/4, 1/2, 1, 2, 4, 8}.

The small run and the paper's, for a GPU:

    python -m recipes.cbn.rho
    python -m recipes.cbn.rho --dataset=cifar100 --data_dir=<where it is> \
        --model=vgg16 --seeds=10

Claim (Section 6.4, Figures 8 and 9): a moderately large rho makes training faster and
the final loss smaller; a very large one is still faster, but ends higher; a small one
is slow and unstable. The paper has curves only, no numbers.

The small run (ResNet-8 on digits, 90 trainings) took 15 minutes on 2 cores of an Intel
Xeon that other work shared. Test accuracy in %, mean of three seeds:

    rho          1/4    1/2      1      2      4      8
    sigmoid     10.0   96.2   98.1   97.8   97.2   92.6
    tanh         9.9   36.1   97.2   98.4   98.5   98.9
    relu        97.2   97.6   98.5   99.2   98.7   98.2
    selu        97.4   98.4   98.4   98.7   98.1   98.0
    swish       97.3   98.0   98.4   98.8   99.0   99.3

Small rhos fail with sigmoid and tanh, as claimed. The training loss is smallest at the
smallest rho that trains, and 4 and 8 are slower than 1 and 2, which is not as claimed.

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023, Section 6.4. https://doi.org/10.1109/TPAMI.2023.3319005
"""

import dataclasses

from recipes.engine import classifier, command, figures, results, training
from recipes.engine.settings import setting
from recipes.models import norms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Grid):
    """Every rho with every activation."""

    model: str = "resnet8"
    norm: str = setting("cbn", "A norm with a rho.", choices=sorted(norms.CBN_FAMILY))
    activations: tuple[str, ...] = setting(classifier.ACTIVATIONS, "As Keras has them.")
    rhos: tuple[float, ...] = setting((1 / 4, 1 / 2, 1, 2, 4, 8), "Values of rho.")
    target_accuracy: float = setting(0.9, "Count epochs until it.", at_most=1)


def run(settings):
    """Trains with every rho and activation; writes the table and the figures.

    Returns:
        The path of the directory with table.md, results.json, curves.png (Figures 8
        and 9) and accuracy.png.
    """
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
    figures.against(
        directory / "accuracy.png",
        accuracies,
        "rho",
        "test accuracy (%)",
        title,
        base=2,
    )
    return directory


def best_rhos(rows):
    """For each activation the rho of the highest mean test accuracy.

    Of equal ones, that of the smaller training loss. Activations that never trained are
    left out.
    """
    best = {}
    for row in rows:
        if row["test_accuracy"] is not None:
            score = row["test_accuracy"]["mean"], -row["train_loss"]["mean"]
            best.setdefault(row["activation"], []).append((score, row["rho"]))
    return {activation: max(scores)[1] for activation, scores in best.items()}


def table(rows, settings):
    """The rows as Markdown, a line a rho."""
    cell = {(row["activation"], row["rho"]): row for row in rows}

    def part(title, form):
        lines = [
            [f"{rho:g}", *(form(cell[activation, rho]) for activation in activations)]
            for rho in settings.rhos
        ]
        return f"{title}\n\n{results.markdown(['rho', *activations], lines)}"

    activations = settings.activations
    parts = [
        part(
            "Test accuracy after the last epoch, %",
            lambda row: (
                results.spread(row["test_accuracy"], 2, 100)
                + (f" ({row['diverged']} diverged)" if row["diverged"] else "")
            ),
        ),
        part(
            "Training loss of the last epoch, nats",
            lambda row: results.spread(row["train_loss"], 4),
        ),
        part(
            f"Epochs until the test accuracy reaches {settings.target_accuracy:.0%}",
            lambda row: results.epochs(row["epochs_to_target"]),
        ),
    ]
    return "\n".join([*parts, results.note(settings.seeds)]) + "\n"


if __name__ == "__main__":
    command.run(run, Settings)
