"""Mean removal and the l2 norm, alone and together, against the learning rate.

The small run and the paper's, for a GPU:

    python -m recipes.cbn_max_lr
    python -m recipes.cbn_max_lr --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet20 --seeds=10 --activations=sigmoid,tanh,relu,selu,swish

Claim (Section 6.3, Table 6 and Figure 7): either half of CBN raises the largest
learning rate of {0.0001, 0.001, 0.01, 0.1, 1} at which training does not collapse, the
l2 norm more than mean removal, and lowers the norm of the gradient; together they do
more than each. The numbers of Table 6 are missing in the copy of the paper that was
read.

The small run (ResNet-8 on digits, 60 trainings) took 19 minutes on 2 cores of an Intel
Xeon that other work shared. The largest rate that trains, one seed:

               none    mean removal    l2 norm     CBN
    sigmoid       -               1        0.1     0.1
    tanh          1               1        0.1     0.1
    relu        0.1             0.1        0.1       1

The claim holds with ReLU, and with tanh it does not: `docs/results/cbn_max_lr.md`.

The halves are Eq. 4 and Eq. 5 of the paper, each in the place of CBN, with its moving
averages. Training has collapsed where the loss is not finite, or where the last epoch's
training accuracy is below twice that of guessing.

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023, Section 6.3. https://doi.org/10.1109/TPAMI.2023.3319005
"""

import keras
import numpy as np
from absl import app, flags
from keras import ops

from recipes import figures, grid, optimizers

NORMS = ("none", "mean_removal", "l2_norm", "cbn")
ACTIVATIONS = ("sigmoid", "tanh", "relu")
RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class MeasuringSGD(optimizers.SGD):
    """Sums the squared norm of the gradients it gets, without weight decay."""

    def build(self, variables):
        super().build(variables)
        self.gradient_square = self.add_variable((), name="gradient_square")

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)  # builds first
        self.gradient_square.assign_add(
            sum(ops.sum(ops.square(ops.cast(g, "float32"))) for g in grads)
        )


def measure(model, images, config):
    """The root mean square over the steps of an epoch of the gradient's l2 norm."""
    steps = len(images.x_train) // config["batch_size"]
    total = model.optimizer.gradient_square
    square = float(ops.convert_to_numpy(total.value))
    total.assign(0.0)
    return {
        "gradient_norm": float(np.sqrt(square / steps)),
        "guessing": 1 / images.num_classes,
    }


def cbn_max_lr(
    settings,
    activations=ACTIVATIONS,
    seeds=1,
    rates=RATES,
    rho=1.0,
    runs_dir="runs",
    **places,
):
    """Trains the four variants at every rate; writes the table and the figures.

    Args:
        settings: Dict of the settings of `recipes.train.train` that all runs share.
        activations: List of names.
        seeds: Integer, each cell is trained with the seeds 0 to `seeds - 1`.
        rates: List of floats, learning rates of the first epoch.
        rho: Float, of the l2 norm and of CBN.
        runs_dir: Where the runs, and the outcome, are recorded.
        **places: Other arguments of `recipes.grid.train_all`.

    Returns:
        The path of the directory with table.md, results.json, accuracy.png and
        gradient_norm.png (Figure 7).
    """
    settings = {**settings, "rho": rho}
    cells = [(a, norm, rate) for a in activations for norm in NORMS for rate in rates]
    configs = [
        {**settings, "norm": norm, "activation": a, "learning_rate": rate, "seed": seed}
        for a, norm, rate in cells
        for seed in range(seeds)
    ]
    outcomes = grid.train_all(
        configs,
        kind="cbn_max_lr",
        measure=measure,
        optimizer=MeasuringSGD,
        runs_dir=runs_dir,
        **places,
    )
    rows, panels, accuracies = [], {}, {}
    for i, (activation, norm, rate) in enumerate(cells):
        runs, curves = zip(*outcomes[i * seeds : (i + 1) * seeds], strict=True)
        rows.append(
            {
                "activation": activation,
                "norm": norm,
                "learning_rate": rate,
                "trains": all(trains(curve) for curve in curves),
                "runs": runs,
            }
        )
        panels.setdefault(rate, {}).setdefault(activation, {})[norm] = curves
        accuracies.setdefault(activation, {}).setdefault(norm, {})[rate] = [
            100 * run["test_accuracy"] for run in runs if not run["diverged"]
        ]
    lists = [activations, rates, [f"seeds{seeds}"]]
    directory = grid.directory("cbn_max_lr", runs_dir, settings, *lists)
    grid.write(
        directory, table(rows), {"max_learning_rate": largest(rows), "rows": rows}
    )
    title = grid.about(settings, seeds)
    figures.against(
        directory / "accuracy.png",
        accuracies,
        "learning rate",
        "test accuracy (%)",
        title,
        base=10,
        ylim=(0, 100),
    )
    figures.gradient_norms(directory / "gradient_norm.png", panels, title)
    return directory


def trains(curve):
    """Whether training did not collapse, by the metrics of a run."""
    last = curve[-1]
    if last["train_loss"] is None:
        return False
    return last["train_accuracy"] >= 2 * last["guessing"]


def largest(rows):
    """For each activation and norm the largest rate that trains with every seed.

    Args:
        rows: List of dicts with `activation`, `norm`, `learning_rate` and `trains`.

    Returns:
        Dict from an activation to a dict from a norm to a rate, `None` where none does.
    """
    found = {}
    for row in rows:
        rate = row["learning_rate"] if row["trains"] else None
        rates = found.setdefault(row["activation"], {}).setdefault(row["norm"], [])
        rates.append(rate)
    return {
        activation: {
            norm: max((rate for rate in rates if rate is not None), default=None)
            for norm, rates in norms.items()
        }
        for activation, norms in found.items()
    }


def table(rows):
    """Returns the rows of `cbn_max_lr` as Markdown."""
    found = largest(rows)
    rates = list(dict.fromkeys(row["learning_rate"] for row in rows))
    cell = {(r["activation"], r["norm"], r["learning_rate"]): r for r in rows}
    lines = []
    for activation, norms in found.items():
        for norm, rate in norms.items():
            outcomes = [cell[activation, norm, rate] for rate in rates]
            accuracies = [
                grid.percent(r["runs"]) + ("" if r["trains"] else " ✗")
                for r in outcomes
            ]
            name = figures.NAME_OF.get(norm, norm)
            best = "none" if rate is None else f"{rate:g}"
            lines.append([activation, name, best, *accuracies])
    header = ["activation", "norm", "largest rate", *(f"{rate:g}" for rate in rates)]
    return (
        "The largest learning rate that trains, and the test accuracy after the last "
        f"epoch at each rate, %\n\n{grid.markdown(header, lines)}\n"
        "✗ collapsed, or no better than guessing, with at least one seed. Mean ± "
        "standard deviation over the seeds of runs that did not diverge.\n"
    )


def main(_):
    values = flags.FLAGS
    grid.report(
        cbn_max_lr(
            rates=[float(rate) for rate in values.rates],
            rho=values.rho,
            **grid.arguments_of_flags(),
        )
    )


if __name__ == "__main__":
    grid.define_flags("resnet8", seeds=1, activations=ACTIVATIONS)
    flags.DEFINE_list("rates", [f"{rate:g}" for rate in RATES], "Learning rates.")
    flags.DEFINE_float("rho", 1.0, "Of the l2 norm and of CBN.", lower_bound=0)
    app.run(main)
