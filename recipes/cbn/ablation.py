"""Each of CBN's four parts adds accuracy: rows 1 to 7 of Tables 1 to 4.

The small run and the paper's (one of its four tables), for a GPU:

    python -m recipes.cbn_ablation
    python -m recipes.cbn_ablation --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet20 --seeds=10 --rho_before=<for each activation> --rho_after=<...>

The parts are the place (before the linear layer), decoupling (the shift before the
norm), a tuned rho, and AMAT. The paper does not say which rho it chose; with
`recipes.cbn_rho` one finds it for each activation.

The small run (ResNet-8 on digits, 102 trainings) took 13 minutes on 2 cores of an Intel
Xeon that other work shared. Test accuracy in %, mean of three seeds, and in brackets
the paper's, ResNet-20 on CIFAR-10:

    row        sigmoid        tanh        relu        selu       swish
    1 (BN)  97.5 [79.0] 98.3 [87.6] 98.1 [91.1] 97.8 [89.7] 98.4 [91.2]
    3       97.6 [88.8] 97.8 [89.9] 98.3 [91.3] 98.4 [91.1] 98.4 [91.7]
    4       98.1 [89.8] 97.4 [91.3] 98.6 [91.5] 98.4 [91.2] 98.4 [91.9]
    5       98.1 [90.9] 98.8 [91.4] 99.1 [91.6] 98.6 [91.5] 99.3 [91.9]
    2 (CBN) 98.1 [91.2] 98.9 [91.7] 99.2 [92.0] 98.7 [91.6] 99.3 [92.2]
    6       98.3 [79.8] 98.3 [87.6] 98.0 [91.5] 98.1 [90.1] 98.5 [91.3]
    7       98.3 [80.3] 98.3 [87.8] 98.0 [91.7] 98.0 [90.3] 98.5 [91.5]

The mean over activations goes up with each part, most of it with rho.

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023, Section 6.2, Tables 1-4. https://doi.org/10.1109/TPAMI.2023.3319005
"""

from typing import NamedTuple

import numpy as np
from absl import app, flags

from recipes import compare, data, figures, grid
from recipes.cbn_tables import TABLES


class Row(NamedTuple):
    """A row of the tables: its number there, and what it is here."""

    number: int
    parts: tuple  # before, decoupled, tuned rho, AMAT
    norm: str


# In the order in which parts are added.
ROWS = (
    Row(1, (False, False, False, False), "bn"),
    Row(3, (True, False, False, False), "bn_before"),
    Row(4, (True, True, False, False), "cbn_batch"),
    Row(5, (True, True, True, False), "cbn_batch"),
    Row(2, (True, True, True, True), "cbn"),
    Row(6, (False, False, True, False), "bn_rho"),
    Row(7, (False, False, True, True), "bn_rho_amat"),
)
# What a part adds: the number of the row with it, and of the one without.
GAINS = {
    "before the linear layer (3 - 1)": (3, 1),
    "decoupled (4 - 3)": (4, 3),
    "tuned rho (5 - 4)": (5, 4),
    "AMAT (2 - 5)": (2, 5),
    "all four (2 - 1)": (2, 1),
    "tuned rho after the layer (6 - 1)": (6, 1),
    "AMAT after the layer (7 - 6)": (7, 6),
}
# The best of `recipes.cbn_rho` on digits, with --norm=cbn and with --norm=bn_rho.
RHO_BEFORE = {"sigmoid": 1, "tanh": 8, "relu": 2, "selu": 2, "swish": 8}
RHO_AFTER = {"sigmoid": 0.5, "tanh": 1, "relu": 0.5, "selu": 0.5, "swish": 2}


def cbn_ablation(
    settings,
    activations=grid.ACTIVATIONS,
    seeds=3,
    rho_before=None,
    rho_after=None,
    runs_dir="runs",
    **places,
):
    """Trains the seven rows with every activation; writes the table and the figure.

    Args:
        settings: Dict of the settings of `recipes.train.train` that all runs share.
        activations: List of names.
        seeds: Integer, each cell is trained with the seeds 0 to `seeds - 1`.
        rho_before, rho_after: Dicts from each activation to the rho of rows 2 and 5,
            and of rows 6 and 7. Missing ones are those found for digits, else 1.
        runs_dir: Where the runs, and the outcome, are recorded.
        **places: Other arguments of `recipes.grid.train_all`.

    Returns:
        The path of the directory with table.md, results.json and accuracy.png.
    """
    rho_before = {a: float((rho_before or RHO_BEFORE).get(a, 1)) for a in activations}
    rho_after = {a: float((rho_after or RHO_AFTER).get(a, 1)) for a in activations}

    def rho(row, activation):
        before, _, tuned, _ = row.parts
        if not tuned:
            return 1.0
        return (rho_before if before else rho_after)[activation]

    cells = [(row, activation) for activation in activations for row in ROWS]
    configs = [
        {
            **settings,
            "norm": row.norm,
            "activation": activation,
            "rho": rho(row, activation),
            "seed": seed,
        }
        for row, activation in cells
        for seed in range(seeds)
    ]
    outcomes = grid.train_all(configs, runs_dir=runs_dir, **places)
    results = []
    for i, (row, activation) in enumerate(cells):
        runs, curves = zip(*outcomes[i * seeds : (i + 1) * seeds], strict=True)
        results.append(
            {
                "row": row.number,
                "activation": activation,
                "norm": row.norm,
                "rho": rho(row, activation),
                **compare.summarise(runs, curves, 0.9),
                "runs": runs,
            }
        )
    rhos = [sorted(set(values.values())) for values in (rho_before, rho_after)]
    directory = grid.directory(
        "cbn_ablation", runs_dir, settings, activations, *rhos, [f"seeds{seeds}"]
    )
    title, paper = paper_table(settings)
    grid.write(directory, table(results, activations, title, paper), {"rows": results})
    _draw(
        directory / "accuracy.png",
        results,
        activations,
        grid.about(settings, seeds),
        title,
        paper,
    )
    return directory


def paper_table(settings):
    """The paper's table of the same data set and network, or else its first."""
    key = data.stem(settings.get("dataset", "digits")), settings.get("model")
    number = {
        ("cifar10", "vgg16"): 2,
        ("cifar100", "resnet20"): 3,
        ("cifar100", "vgg16"): 4,
    }.get(key, 1)
    return TABLES[number]


def _cells(results):
    return {(row["row"], row["activation"]): row for row in results}


def table(results, activations, title, paper):
    """Returns the rows of `cbn_ablation` as Markdown, the paper's numbers beside them.

    Args:
        results: List of dicts with `row` (the number), `activation`, `rho`, `runs` and
            the mean `test_accuracy`.
        activations: List of names.
        title, paper: One of `recipes.cbn_tables.TABLES`.
    """
    cell = _cells(results)
    known = [activation for activation in activations if activation in paper]
    header = ["row", "before", "decoupled", "rho", "AMAT", *activations]
    lines = []
    for row in ROWS:
        before, decoupled, tuned, amat = ("✓" if part else "" for part in row.parts)
        rhos = [f"{cell[row.number, a]['rho']:g}" for a in activations]
        rhos = ", ".join(rhos if len(set(rhos)) > 1 else rhos[:1])
        accuracies = [grid.percent(cell[row.number, a]["runs"]) for a in activations]
        lines.append(
            [row.number, before, decoupled, rhos if tuned else "1", amat, *accuracies]
        )
    ours = grid.markdown(header, lines)
    theirs = grid.markdown(
        ["row", *known],
        [
            [row.number, *(_mean_and_std(paper[a][row.number - 1]) for a in known)]
            for row in ROWS
        ],
    )
    gains = []
    for name, (with_part, without) in GAINS.items():
        differences = [
            _difference(cell[with_part, a], cell[without, a]) for a in activations
        ]
        of_paper = [
            paper[a][with_part - 1][0] - paper[a][without - 1][0] for a in known
        ]
        gains.append(
            [
                name,
                *(_signed(difference) for difference in differences),
                _signed(_mean(differences)),
                _signed(_mean(of_paper)),
            ]
        )
    added = grid.markdown(["part", *activations, "mean", "the paper's mean"], gains)
    return (
        f"Test accuracy after the last epoch, %\n\n{ours}\n"
        f"The paper's {title}\n\n{theirs}\n"
        f"What each part adds, points of test accuracy\n\n{added}\n"
        "Mean ± standard deviation over the seeds of runs that did not diverge.\n"
    )


def _mean_and_std(pair):
    mean, std = pair
    return f"{mean:.2f}" if np.isnan(std) else f"{mean:.2f} ± {std:.2f}"


def _difference(with_part, without):
    pair = with_part["test_accuracy"], without["test_accuracy"]
    if None in pair:
        return None
    return 100 * (pair[0]["mean"] - pair[1]["mean"])


def _mean(differences):
    known = [difference for difference in differences if difference is not None]
    return float(np.mean(known)) if known else None


def _signed(difference):
    # Adding 0 makes 0 of -0.
    return "–" if difference is None else f"{round(difference, 2) + 0:+.2f}"


def _draw(path, results, activations, about, title, paper):
    cell = _cells(results)
    panels = {}
    for activation in activations:
        ours = [cell[row.number, activation]["test_accuracy"] for row in ROWS]
        panels[activation] = {
            "test accuracy (%)": [
                value and {key: 100 * value[key] for key in value} for value in ours
            ]
        }
        theirs = [
            dict(zip(("mean", "std"), paper[activation][row.number - 1], strict=True))
            if activation in paper
            else None
            for row in ROWS
        ]
        panels[activation]["the paper's (%)"] = theirs
    ticks = [str(row.number) for row in ROWS]
    figures.steps(path, panels, ticks, f"Above: {about}. Below: the paper's {title}")


def main(_):
    grid.report(
        cbn_ablation(
            rho_before=_by_activation("rho_before"),
            rho_after=_by_activation("rho_after"),
            **grid.arguments_of_flags(),
        )
    )


def _by_activation(name):
    rhos, activations = flags.FLAGS[name].value, flags.FLAGS.activations
    if rhos is None:
        return None
    if len(rhos) != len(activations):
        raise ValueError(
            f"Argument `{name}` must have one number for each of the activations "
            f"{activations}. Received: {name}={rhos}"
        )
    return {a: float(rho) for a, rho in zip(activations, rhos, strict=True)}


if __name__ == "__main__":
    grid.define_flags("resnet8", seeds=3)
    flags.DEFINE_list("rho_before", None, "Of rows 2 and 5, for each activation.")
    flags.DEFINE_list("rho_after", None, "Of rows 6 and 7, for each activation.")
    app.run(main)
