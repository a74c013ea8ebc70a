r"""Each of CBN's four parts adds accuracy: rows 1 to 7 of Tables 1 to 4.

The small run and the paper's (one of its four tables), for a GPU:

    python -m recipes.cbn.ablation
    python -m recipes.cbn.ablation --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet20 --seeds=10

The parts are the place (before the linear layer), decoupling (the shift before the
norm), a tuned rho, and AMAT. The paper does not say which rho it chose; the defaults of
`--rho_before` (rows 2 and 5) and `--rho_after` (rows 6 and 7) are what
`recipes.cbn.rho` found.

Test accuracy in %, mean of two seeds, ResNet-8 on digits (68 trainings, 5 minutes
on two cores of an AMD EPYC); in brackets the paper's, ResNet-20 on CIFAR-10. The mean
over activations rises with each part, most with rho and least with AMAT:

    row        sigmoid        tanh        relu        selu       swish
    1 (BN)  97.5 [79.0] 98.3 [87.6] 97.9 [91.1] 97.8 [89.7] 98.5 [91.2]
    3       97.1 [88.8] 97.9 [89.9] 98.6 [91.3] 98.5 [91.1] 99.0 [91.7]
    4       97.9 [89.8] 97.6 [91.3] 98.6 [91.5] 98.6 [91.2] 99.0 [91.9]
    5       97.9 [90.9] 99.0 [91.4] 99.0 [91.6] 98.6 [91.5] 99.3 [91.9]
    2 (CBN) 97.9 [91.2] 99.0 [91.7] 99.0 [92.0] 98.9 [91.6] 99.3 [92.2]

On CIFAR-10 (10,000 images, ResNet-8, three seeds) the place adds 10 points with
sigmoid, 1 with tanh and 0 with ReLU; all four parts together add 11, 5 and 0, and AMAT
adds nothing. docs/results/cbn_ablation.md has these numbers, rows 6 and 7, digits with
ten seeds, and a VGG.

Reference: Peng, Yu and Yu, TPAMI 2023, https://doi.org/10.1109/TPAMI.2023.3319005
"""

import collections
import dataclasses
from typing import ClassVar

import numpy as np
import pandas as pd

from recipes.cbn._paper_tables import TABLES
from recipes.engine import classifier, command, data, figures, results, training
from recipes.engine.settings import setting

# The rows of the tables in the order in which parts are added, and their names.
Row = collections.namedtuple("Row", "number before decoupled tuned amat norm name")
ROWS = (
    Row(1, False, False, False, False, "bn", "1: BN"),
    Row(3, True, False, False, False, "bn_before", "3: before the layer"),
    Row(4, True, True, False, False, "cbn_batch", "4: and decoupled"),
    Row(5, True, True, True, False, "cbn_batch", "5: and rho"),
    Row(2, True, True, True, True, "cbn", "2: and AMAT (CBN)"),
    Row(6, False, False, True, False, "bn_rho", "6: BN with rho"),
    Row(7, False, False, True, True, "bn_rho_amat", "7: BN with rho and AMAT"),
)
# For each part, the row with it and the row without: the difference is what it adds.
GAINS = {
    "before the linear layer (3 - 1)": (3, 1),
    "decoupled (4 - 3)": (4, 3),
    "tuned rho (5 - 4)": (5, 4),
    "AMAT (2 - 5)": (2, 5),
    "all four (2 - 1)": (2, 1),
    "tuned rho after the layer (6 - 1)": (6, 1),
    "AMAT after the layer (7 - 6)": (7, 6),
}
# The best of `recipes.cbn.rho` on digits, with --norm=cbn and with --norm=bn_rho.
RHO_BEFORE = {"sigmoid": 1.0, "tanh": 8.0, "relu": 2.0, "selu": 2.0, "swish": 8.0}
RHO_AFTER = {"sigmoid": 0.5, "tanh": 1.0, "relu": 0.5, "selu": 0.5, "swish": 2.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Grid):
    """The seven rows with every activation."""

    norms: ClassVar = tuple(row.norm for row in ROWS)  # each row has its own, and a rho
    rhos: ClassVar = ()

    model: str = "resnet8"
    seeds: int = 2
    activations: tuple[str, ...] = classifier.ACTIVATIONS
    rho_before: tuple[float, ...] | None = setting(
        None,
        "rho of rows 2 and 5, for each activation; the best on digits if not given.",
        above=0,
    )
    rho_after: tuple[float, ...] | None = setting(
        None,
        "rho of rows 6 and 7, for each activation; the best on digits if not given.",
        above=0,
    )

    def usual(self):
        return super().usual() | {
            "rho_before": tuple(RHO_BEFORE.get(a, 1.0) for a in self.activations),
            "rho_after": tuple(RHO_AFTER.get(a, 1.0) for a in self.activations),
        }

    def __post_init__(self):
        super().__post_init__()
        for name in ("rho_before", "rho_after"):
            if len(rhos := getattr(self, name)) != len(self.activations):
                raise ValueError(
                    f"Argument `{name}` must have one number for each of the "
                    f"activations {self.activations}. Received: {name}={rhos}"
                )

    def runs(self, **values):
        """All runs of one row, or by default of BN's, to check what is swept."""
        return super().runs(**({"norm": "bn", "rho": 1.0} | values))

    def rho_of(self, row, activation):
        """The rho of a `Row`."""
        if not row.tuned:
            return 1.0
        rhos = self.rho_before if row.before else self.rho_after
        return rhos[self.activations.index(activation)]

    def paper(self):
        """The paper's table for this data set and kind of network, or its first."""
        others = {"cifar10 vgg16": 2, "cifar100 resnet20": 3, "cifar100 vgg16": 4}
        network = self.model.partition("_")[0]  # of any width
        return TABLES[others.get(f"{data.stem(self.dataset)} {network}", 1)]


def run(settings):
    """Trains everything; returns the directory with the table and the figure."""
    cells = {
        (a, row.number): dict(activation=a, norm=row.norm, rho=settings.rho_of(row, a))
        for a in settings.activations
        for row in ROWS
    }
    runs = [run for cell in cells.values() for run in settings.runs(**cell)]
    outcomes = training.train_all(classifier.train, runs, settings.workers)
    found = {key: outcomes.of(**cell) for key, cell in cells.items()}
    rows = [
        {"row": number, **cells[a, number], **results.summarise(of, 0.9)}
        for (a, number), of in found.items()
    ]
    directory = settings.directory("cbn_ablation")
    results.write(directory, table(found, settings), {"rows": rows})
    title, paper = settings.paper()
    numbers, panels = [row.number for row in ROWS], {}
    for a in settings.activations:
        ours = [results.mean_and_std(results.accuracies(found[a, n])) for n in numbers]
        theirs = [_of_paper(paper[a], n) if a in paper else None for n in numbers]
        panels[a] = {"test accuracy (%)": ours, "the paper's (%)": theirs}
    title = f"Above: {settings.about()}. Below: the paper's {title}"
    names = [row.name for row in ROWS]
    figures.steps(directory / "accuracy.png", panels, names, title)
    return directory


def table(outcomes, settings):
    """A dict from activation and row number to outcomes, as Markdown."""
    activations = settings.activations
    title, paper = settings.paper()
    known = [activation for activation in activations if activation in paper]
    ours, theirs, gains = [], [], []
    for row in ROWS:
        parts = row.before, row.decoupled, row.amat
        before, decoupled, amat = ("✓" if part else "" for part in parts)
        rhos = [f"{settings.rho_of(row, a):g}" for a in activations]
        rhos = ", ".join(rhos if len(set(rhos)) > 1 else rhos[:1])
        accuracies = [results.percent(outcomes[a, row.number]) for a in activations]
        ours.append([row.number, before, decoupled, rhos, amat, *accuracies])
        numbers = [_of_paper(paper[a], row.number) for a in known]
        theirs.append([row.number, *(results.spread(number, 2) for number in numbers)])
    means = {key: _mean(results.accuracies(found)) for key, found in outcomes.items()}
    for name, (high, low) in GAINS.items():
        points = [means[a, high] - means[a, low] for a in activations]
        of_paper = [paper[a][high - 1][0] - paper[a][low - 1][0] for a in known]
        values = [*points, _mean(points), _mean(of_paper)]
        gains.append([name, *map(_signed, values)])
    header = ["row", "before", "decoupled", "rho", "AMAT", *activations]
    added = ["part", *activations, "mean", "the paper's mean"]
    return (
        f"Test accuracy after the last epoch, %\n\n{results.markdown(header, ours)}\n"
        f"The paper's {title}\n\n{results.markdown(['row', *known], theirs)}\n"
        "What each part adds, points of test accuracy\n\n"
        f"{results.markdown(added, gains)}\n{results.note(settings.seeds)}\n"
    )


def _of_paper(rows, number):
    """A row of the paper in the form of `recipes.engine.results.mean_and_std`."""
    mean, std = rows[number - 1]
    return {"mean": mean, "std": None if np.isnan(std) else std}


def _mean(values):
    return pd.Series(values, dtype=float).mean()  # ignores NaN


def _signed(difference):
    # Adding 0 turns -0 into 0.
    return "–" if np.isnan(difference) else f"{round(difference, 2) + 0:+.2f}"


if __name__ == "__main__":
    command.run(run, Settings)
