"""CBN's rho: speed and final accuracy against rho in {1/4, 1/2, 1, 2, 4, 8}.

The small run and the paper's, for a GPU:

    python -m recipes.cbn_rho
    python -m recipes.cbn_rho --dataset=cifar100 --data_dir=<where it is> \
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

from absl import app, flags

from recipes import compare, figures, grid
from recipes.models import norms

RHOS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def cbn_rho(
    settings,
    activations=grid.ACTIVATIONS,
    seeds=3,
    rhos=RHOS,
    norm="cbn",
    target_accuracy=0.9,
    runs_dir="runs",
    **places,
):
    """Trains with every rho and activation; writes the table and the figures.

    Args:
        settings: Dict of the settings of `recipes.train.train` that all runs share.
        activations: List of names.
        seeds: Integer, each cell is trained with the seeds 0 to `seeds - 1`.
        rhos: List of floats.
        norm: Name of a norm that has a rho.
        target_accuracy: Float, counts the epochs until the test accuracy reaches it.
        runs_dir: Where the runs, and the outcome, are recorded.
        **places: Other arguments of `recipes.grid.train_all`.

    Returns:
        The path of the directory with table.md, results.json, curves.png (Figures 8
        and 9) and accuracy.png.
    """
    cells = [(activation, rho) for activation in activations for rho in rhos]
    configs = [
        {**settings, "norm": norm, "activation": activation, "rho": rho, "seed": seed}
        for activation, rho in cells
        for seed in range(seeds)
    ]
    outcomes = grid.train_all(configs, runs_dir=runs_dir, **places)
    rows, panels, accuracies = [], {}, {}
    for i, (activation, rho) in enumerate(cells):
        runs, curves = zip(*outcomes[i * seeds : (i + 1) * seeds], strict=True)
        rows.append(
            {
                "activation": activation,
                "rho": rho,
                **compare.summarise(runs, curves, target_accuracy),
                "runs": runs,
            }
        )
        panels.setdefault(activation, {})[f"rho = {rho:g}"] = curves
        accuracies.setdefault(activation, {}).setdefault(norm, {})[rho] = [
            100 * run["test_accuracy"] for run in runs if not run["diverged"]
        ]
    directory = grid.directory(
        "cbn_rho", runs_dir, settings, [norm], activations, rhos, [f"seeds{seeds}"]
    )
    results = {"norm": norm, "best_rho": best_rhos(rows), "rows": rows}
    grid.write(directory, table(rows, target_accuracy), results)
    title = f"{norm}, {grid.about(settings, seeds)}"
    loss = [("train_loss", "training loss (nats)", {"yscale": "log"})]
    shades = figures.shades([f"rho = {rho:g}" for rho in rhos])
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

    Of equal ones, that of the smaller training loss.

    Args:
        rows: List of dicts with `activation`, `rho` and what `compare.summarise` gives.

    Returns:
        Dict from an activation to a rho, without those that never trained.
    """
    best = {}
    for row in rows:
        if row["test_accuracy"] is None:
            continue
        score = row["test_accuracy"]["mean"], -row["train_loss"]["mean"]
        best.setdefault(row["activation"], []).append((score, row["rho"]))
    return {activation: max(scores)[1] for activation, scores in best.items()}


def table(rows, target_accuracy):
    """Returns the rows of `cbn_rho` as Markdown, a line a rho."""
    activations = list(dict.fromkeys(row["activation"] for row in rows))
    rhos = list(dict.fromkeys(row["rho"] for row in rows))
    cell = {(row["activation"], row["rho"]): row for row in rows}

    def part(title, form):
        lines = [
            [f"{rho:g}", *(form(cell[activation, rho]) for activation in activations)]
            for rho in rhos
        ]
        return f"{title}\n\n{grid.markdown(['rho', *activations], lines)}"

    parts = [
        part(
            "Test accuracy after the last epoch, %", lambda r: grid.percent(r["runs"])
        ),
        part(
            "Training loss of the last epoch, nats",
            lambda row: grid.spread(row["train_loss"], 4),
        ),
        part(
            f"Epochs until the test accuracy reaches {target_accuracy:.0%}",
            lambda row: _mean_epoch(row["epochs_to_target"]),
        ),
    ]
    note = "Mean ± standard deviation over the seeds of runs that did not diverge."
    return "\n".join([*parts, note]) + "\n"


def _mean_epoch(epochs):
    reached = [epoch for epoch in epochs if epoch is not None]
    if not reached:
        return "never"
    mean = f"{sum(reached) / len(reached):.1f}"
    missing = len(epochs) - len(reached)
    return f"{mean} ({missing} of {len(epochs)} never)" if missing else mean


def main(_):
    values = flags.FLAGS
    grid.report(
        cbn_rho(
            rhos=[float(rho) for rho in values.rhos],
            norm=values.norm,
            target_accuracy=values.target_accuracy,
            **grid.arguments_of_flags(),
        )
    )


if __name__ == "__main__":
    grid.define_flags("resnet8", seeds=3)
    flags.DEFINE_list("rhos", [f"{rho:g}" for rho in RHOS], "Values of rho.")
    flags.DEFINE_enum("norm", "cbn", sorted(norms.CBN_FAMILY), "A norm with a rho.")
    flags.DEFINE_float("target_accuracy", 0.9, "Count epochs until it.", 0, 1)
    app.run(main)
