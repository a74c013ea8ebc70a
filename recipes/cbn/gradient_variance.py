"""AMAT lowers the variance of the gradient; a fixed moving average need not.

The small run and one nearer to the paper's, for a GPU:

    python -m recipes.cbn_gradient_variance
    python -m recipes.cbn_gradient_variance --dataset=cifar10 \
        --data_dir=<where it is> --model=resnet20 --seeds=3

Claim (Section 6.5, Figure 10, ResNet-18 on ILSVRC2012): CBN with AMAT (eta = 1 - 10 *
learning rate) has a smaller variance of the mini-batch gradient, and a smaller
gradient, than CBN with each batch's own statistics; with moving averages of a fixed
eta = 0.9 it need not. The paper has curves only, no numbers.

Each variant trains with its own statistics. After every epoch the weights are held
still, and the gradients of `--batches` mini-batches are taken, all from the moving
averages as they then are. The variance is the trace of the covariance of these
gradients, the squared norm is that of their mean, without bias.

The small run (ResNet-8 on digits, 20 trainings) took 9 minutes and 30 seconds on 2
cores of an Intel Xeon that other work shared. Variance as a ratio to that of CBN
without AMAT, at 0.1, 0.01 and 0.001, one seed:

                              BN       CBN, eta = 0.9     CBN with AMAT
    sigmoid     2.87  9.93  24.4    0.49  0.12  0.28    1.00  0.66  0.61
    tanh        0.88  5.24  4.67    0.43  0.53  0.59    1.00  0.54  0.52
    relu        1.16  1.81  1.76    0.50  0.47  0.47    1.14  0.38  0.35
    selu        1.32  2.49  1.58    0.77  0.38  0.50    1.00  0.64  0.60
    swish       1.28  2.33  2.12    0.49  0.47  0.46    1.00  0.41  0.41

AMAT lowers it, as claimed. The fixed eta does so too, and not less.

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023, Section 6.5. https://doi.org/10.1109/TPAMI.2023.3319005
"""

import functools

import numpy as np
from absl import app, flags

from keras_norms.diagnostics import gradient_noise
from recipes import figures, grid

NORMS = ("bn", "cbn_batch", "cbn_fixed", "cbn")
# The seed of the measured batches, which training does not see in this composition.
OTHER_BATCHES = 1_000_000
# The learning rates of a training, as parts of it: `optimizers.piecewise_schedule`.
PHASES = {
    "first rate": (0, 1 / 2),
    "a tenth": (1 / 2, 5 / 6),
    "a hundredth": (5 / 6, np.inf),
}


def measure(model, images, config, batches):
    """Variance and squared norm of the gradient over so many mini-batches."""
    stream = grid.training_batches(images, config, OTHER_BATCHES)
    # The first of an epoch each: independent draws, not parts of one permutation.
    chosen = (stream[i * stream.steps] for i in range(batches))
    noise = gradient_noise(model, chosen)
    return {
        "gradient_variance": noise.variance,
        "gradient_squared_norm": noise.squared_norm,
    }


def cbn_gradient_variance(
    settings,
    activations=grid.ACTIVATIONS,
    seeds=1,
    batches=16,
    rho=1.0,
    runs_dir="runs",
    **places,
):
    """Trains the variants with every activation; writes the table and the figure.

    Args:
        settings: Dict of the settings of `recipes.train.train` that all runs share.
        activations: List of names.
        seeds: Integer, each cell is trained with the seeds 0 to `seeds - 1`.
        batches: Integer, at least 2: mini-batches whose gradients are compared.
        rho: Float, CBN's.
        runs_dir: Where the runs, and the outcome, are recorded.
        **places: Other arguments of `recipes.grid.train_all`.

    Returns:
        The path of the directory with table.md, results.json and gradient_variance.png
        (Figure 10).
    """
    if batches < 2:
        raise ValueError(
            f"Argument `batches` must be at least 2. Received: batches={batches}"
        )
    settings = {**settings, "rho": rho}
    cells = [(activation, norm) for activation in activations for norm in NORMS]
    configs = [
        {**settings, "norm": norm, "activation": activation, "seed": seed}
        for activation, norm in cells
        for seed in range(seeds)
    ]
    outcomes = grid.train_all(
        configs,
        kind=f"cbn_gradient_variance{batches}",
        measure=functools.partial(measure, batches=batches),
        runs_dir=runs_dir,
        **places,
    )
    rows, panels = [], {}
    for i, (activation, norm) in enumerate(cells):
        runs, curves = zip(*outcomes[i * seeds : (i + 1) * seeds], strict=True)
        rows.append(
            {
                "activation": activation,
                "norm": norm,
                "gradient_variance": by_phase(curves, "gradient_variance"),
                "gradient_squared_norm": by_phase(curves, "gradient_squared_norm"),
                "runs": runs,
            }
        )
        panels.setdefault(activation, {})[norm] = curves
    lists = [activations, [f"batches{batches}"], [f"seeds{seeds}"]]
    directory = grid.directory("cbn_gradient_variance", runs_dir, settings, *lists)
    grid.write(directory, table(rows), {"batches": batches, "rows": rows})
    figures.curves(
        directory / "gradient_variance.png",
        panels,
        [
            ("gradient_variance", "gradient variance", {"yscale": "log"}),
            ("gradient_squared_norm", "squared norm", {"yscale": "log"}),
            ("train_loss", "training loss (nats)", {"yscale": "log"}),
        ],
        grid.about(settings, seeds),
    )
    return directory


def by_phase(curves, key):
    """The geometric mean of a positive value over the epochs at each learning rate.

    Args:
        curves: List with the metrics of each run.
        key: Of the metrics.

    Returns:
        Dict from the names in `PHASES` to a float, `None` where nothing is positive.
    """
    means = {}
    for phase, (start, end) in PHASES.items():
        values = [
            line.get(key)
            for curve in curves
            for line in curve
            # It is measured with the rate that the next step uses.
            if start <= line["epoch"] / len(curve) < end
        ]
        values = [value for value in values if value is not None and value > 0]
        means[phase] = float(np.exp(np.mean(np.log(values)))) if values else None
    return means


def table(rows):
    """Returns the rows of `cbn_gradient_variance` as Markdown."""
    text = ""
    base = {
        (row["activation"], key): row[key]
        for row in rows
        if row["norm"] == "cbn_batch"
        for key in ("gradient_variance", "gradient_squared_norm")
    }
    titles = {
        "gradient_variance": "Variance of the mini-batch gradient",
        "gradient_squared_norm": "Squared norm of the gradient",
    }
    for key, title in titles.items():
        lines = []
        for row in rows:
            of_batch = base[row["activation"], key]
            lines.append(
                [
                    row["activation"],
                    figures.NAME_OF.get(row["norm"], row["norm"]),
                    *(_with_ratio(row[key][p], of_batch[p]) for p in PHASES),
                ]
            )
        header = ["activation", "norm", *PHASES]
        text += f"{title}\n\n{grid.markdown(header, lines)}\n"
    return text + (
        "Geometric mean over the epochs at each learning rate, without estimates of "
        "the squared norm that are not positive; in parentheses the ratio to CBN "
        "without AMAT.\n"
    )


def _with_ratio(value, base):
    if value is None:
        return "–"
    return f"{value:.2e}" + ("" if base is None else f" ({value / base:.2f})")


def main(_):
    values = flags.FLAGS
    grid.report(
        cbn_gradient_variance(
            batches=values.batches, rho=values.rho, **grid.arguments_of_flags()
        )
    )


if __name__ == "__main__":
    grid.define_flags("resnet8", seeds=1)
    flags.DEFINE_integer("batches", 16, "Mini-batches measured.", lower_bound=2)
    flags.DEFINE_float("rho", 1.0, "CBN's rho.", lower_bound=0)
    app.run(main)
