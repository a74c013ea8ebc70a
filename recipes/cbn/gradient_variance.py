r"""AMAT lowers the variance of the gradient; a fixed moving average need not.

The small run, and one closer to the paper's, for a GPU:

    python -m recipes.cbn.gradient_variance
    python -m recipes.cbn.gradient_variance --dataset=cifar10 \
        --data_dir=<where it is> --model=resnet20 --seeds=3

Claim (Section 6.5, Figure 10, ResNet-18 on ILSVRC2012): CBN with AMAT (eta = 1 - 10 *
learning rate) has a smaller variance of the mini-batch gradient, and a smaller
gradient, than CBN with each batch's own statistics, and than BN; with moving averages
of a fixed eta = 0.9 this need not be so. The paper has curves only, no numbers.

Each variant trains with its own statistics. After every epoch the gradients of
`--batches` mini-batches are computed, all from the same moving averages. The variance
is the trace of their covariance; the squared norm is that of their mean, unbiased.

Variance relative to CBN without AMAT at 0.1, 0.01 and 0.001, ResNet-8 on digits, one
seed (20 trainings, 7 minutes on two cores of an AMD EPYC). AMAT lowers it, as claimed
(with sigmoid 1.00, 0.66, 0.61, with ReLU 1.00, 0.38, 0.35); the fixed eta also does,
with sigmoid by more (0.49, 0.12, 0.28 and 0.49, 0.42, 0.44). BN's is 2.87, 9.93, 24.4
and 1.22, 1.78, 1.76. The squared bias of the fixed eta is a tenth of the variance or
less. On 10,000 images of CIFAR-10, AMAT lowers it to 0.87 at best, BN's is smaller
still, and the fixed eta costs 8.7 points of accuracy with sigmoid. See
docs/results/cbn_gradient_variance.md.

Reference: Peng, Yu and Yu, TPAMI 2023, https://doi.org/10.1109/TPAMI.2023.3319005
"""

import dataclasses
import functools

import numpy as np
import pandas as pd
from keras import ops

from keras_norms import diagnostics
from keras_norms.diagnostics import gradient_noise
from recipes.engine import classifier, command, data, figures, results, training
from recipes.engine.optimizers import DROPS, followers
from recipes.engine.settings import setting

PHASES = ("first rate", "a tenth", "a hundredth")
VALUES = {
    "gradient_variance": "Variance of the mini-batch gradient",
    "gradient_squared_norm": "Squared norm of the gradient",
    "gradient_squared_bias": "Squared bias of the gradient by old statistics",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(classifier.Training):
    """A training whose gradients are measured."""

    VARIABLE = (*classifier.Training.VARIABLE, "batches")

    batches: int = setting(16, "Mini-batches to measure.", at_least=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Measured, classifier.Grid):
    """The variants with every activation."""

    RUN = Measured

    model: str = "resnet8"
    activations: tuple[str, ...] = classifier.ACTIVATIONS
    norms: tuple[str, ...] = ("bn", "cbn_batch", "cbn_fixed", "cbn")
    seeds: int = 1


def measure(model, problem, settings):
    """Variance, squared norm and bias of the gradient over `--batches` mini-batches."""
    batches = list(data.other_batches(settings, settings.batches))
    noise = gradient_noise(model, batches)
    return {
        "gradient_variance": noise.variance,
        "gradient_squared_norm": noise.squared_norm,
        "gradient_squared_bias": squared_bias(model, batches),
    }


def squared_bias(model, batches):
    """`|E d|^2`, estimated without bias; 0 without CBN.

    `d` is the difference that moving averages make to the gradient of a batch, compared
    with the statistics of the batch alone.
    """
    layers = followers(model)
    rates = [float(ops.convert_to_numpy(layer.learning_rate)) for layer in layers]
    total, squares, n = np.zeros(()), 0.0, len(batches)
    for x, y in batches if layers else ():
        found = []
        for told in (rates, [-1.0] * len(rates)):
            for layer, rate in zip(layers, told, strict=True):
                layer.set_learning_rate(rate)
            gradients = diagnostics.value_and_grad(model, x, y).gradient
            found.append(np.concatenate([g.ravel() for g in gradients], dtype=float))
        difference = found[0] - found[1]
        total, squares = total + difference, squares + difference @ difference
    for layer, rate in zip(layers, rates, strict=True):
        layer.set_learning_rate(rate)
    return float((np.sum(total**2) - squares) / (n * (n - 1)))


train = functools.partial(classifier.train, kind="cbn_gradient_variance", after=measure)


def run(settings):
    """Trains everything; returns the directory with the table and the figure."""
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows, panels = [], {}
    for activation in settings.activations:
        panels[activation] = {}
        for norm in settings.norms:
            found = outcomes.of(activation=activation, norm=norm)
            metrics = [each.metrics for each in found]
            panels[activation][norm] = metrics
            row = {"activation": activation, "norm": norm}
            row |= {key: by_phase(metrics, key, settings.epochs) for key in VALUES}
            row |= {"test_accuracy": results.percent(found)}
            rows.append(row | {"runs": [each.results for each in found]})
    directory = settings.directory("cbn_gradient_variance")
    results.write(directory, table(rows), {"batches": settings.batches, "rows": rows})
    log = {"yscale": "log"}
    drawn = [
        ("gradient_variance", "gradient variance", log),
        ("gradient_squared_norm", "squared norm", log),
        ("train_loss", "training loss (nats)", log),
    ]
    figures.curves(directory / "gradient_variance.png", panels, drawn, settings.about())
    return directory


def by_phase(curves, key, epochs):
    """The geometric mean over runs of a positive value, at each learning rate."""
    lines = pd.DataFrame([line for curve in curves for line in curve])
    lines = lines.reindex(columns=["epoch", key]).astype(float)
    lines = lines[lines[key] > 0]
    # An epoch counts at the rate of its last step.
    phase = pd.cut(lines["epoch"] / epochs, [0, *DROPS, 1], labels=PHASES)
    means = np.exp(np.log(lines[key]).groupby(phase, observed=False).mean())
    return {name: None if np.isnan(mean) else mean for name, mean in means.items()}


def table(rows):
    """The rows as Markdown, relative to CBN without AMAT."""
    base = {row["activation"]: row for row in rows if row["norm"] == "cbn_batch"}
    text = ""
    for key, title in VALUES.items():
        lines = []
        for row in rows:
            of_base = base.get(row["activation"], {}).get(key, {})
            cells = [_with_ratio(row[key][p], of_base.get(p)) for p in PHASES]
            name = figures.name_of(row["norm"])
            lines.append([row["activation"], name, *cells])
        header = ["activation", "norm", *PHASES]
        text += f"{title}\n\n{results.markdown(header, lines)}\n"
    cells = {(row["activation"], row["norm"]): row["test_accuracy"] for row in rows}
    activations, of = (list(dict.fromkeys(each)) for each in zip(*cells))
    lines = [
        [figures.name_of(norm), *(cells[a, norm] for a in activations)] for norm in of
    ]
    text += "Test accuracy after the last epoch, %\n\n"
    text += f"{results.markdown(['norm', *activations], lines)}\n"
    return text + (
        "Geometric mean over the epochs at each learning rate, without estimates of "
        "the squared norm and bias that are not positive; in parentheses the ratio to "
        "CBN without AMAT. The bias is the distance of the mean gradient from the one "
        "with the statistics of each batch alone, at the same weights.\n"
    )


def _with_ratio(value, reference):
    if value is None:
        return "–"
    return f"{value:.2e}" + (f" ({value / reference:.2f})" if reference else "")


if __name__ == "__main__":
    command.run(run, Settings)
