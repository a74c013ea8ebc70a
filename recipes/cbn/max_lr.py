r"""Mean removal and the l2 norm, alone and together, against the learning rate.

The small run and the paper's, for a GPU:

    python -m recipes.cbn.max_lr
    python -m recipes.cbn.max_lr --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet20 --seeds=10 --activations=sigmoid,tanh,relu,selu,swish

Claim (Section 6.3, Table 6 and Figure 7): either half of CBN raises the largest
learning rate of {0.0001, 0.001, 0.01, 0.1, 1} at which training does not collapse (the
l2 norm more than mean removal) and lowers the norm of the gradient; together they gain
more accuracy than the sum. Our copy of the paper lacks the numbers of Table 6.

The largest rate that trains, ResNet-8, one seed, on digits (60 trainings, 3 to 4
minutes on two cores of an AMD EPYC) and on 10,000 images of CIFAR-10, 5 epochs, rates
0.01 to 1. The claim about rates holds partly with ReLU and sigmoid, not with tanh:

                         none    mean removal    l2 norm     CBN
    digits     sigmoid      -               1        0.1     0.1
               tanh         1               1          1     0.1
               relu       0.1             0.1          1       1
    CIFAR-10   sigmoid      -               1        0.1     0.1
               tanh         1             0.1        0.1     0.1
               relu      0.01             0.1        0.1       1

With BN, all three activations train at 1 on CIFAR-10, as ReLU does on digits
(--norms=none,bn), where it no longer does at 0.0001.

The halves are Eq. 4 and Eq. 5 of the paper. Each replaces CBN and uses its moving
averages. Training has collapsed if the loss is not finite, or if the last epoch's
training accuracy is below twice that of guessing.

Reference: Peng, Yu and Yu, TPAMI 2023, https://doi.org/10.1109/TPAMI.2023.3319005
"""

import dataclasses
import functools
import itertools

import keras
import numpy as np
import pandas as pd
from keras import ops

from recipes.engine import classifier, command, figures, optimizers, results, training
from recipes.engine.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Grid):
    """The four variants at every rate."""

    model: str = "resnet8"
    activations: tuple[str, ...] = ("sigmoid", "tanh", "relu")
    norms: tuple[str, ...] = ("none", "mean_removal", "l2_norm", "cbn")
    learning_rates: tuple[float, ...] = setting(
        (1e-4, 1e-3, 1e-2, 1e-1, 1.0), "Learning rates of the first epoch."
    )
    optimizer: str | None = setting(None, "None: SGD is what is measured.", matches="$")
    seeds: int = 1


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class MeasuringSGD(optimizers.SGD):
    """Sums the squared norm of the gradients it gets, without weight decay."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.gradient_square = self.add_variable((), name="gradient_square")

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)  # builds first
        squares = [ops.sum(ops.square(ops.cast(g, "float32"))) for g in grads]
        self.gradient_square.assign_add(sum(squares))


def measure(model, problem, settings):
    """The root mean square over the steps of an epoch of the gradient's l2 norm."""
    total = model.optimizer.gradient_square
    norm = float(np.sqrt(float(ops.convert_to_numpy(total)) / problem.steps))
    total.assign(0.0)  # for the next epoch
    return {"gradient_norm": norm, "guessing": 1 / model.output_shape[-1]}


problem_of = functools.partial(classifier.problem, optimizer=MeasuringSGD)
train = functools.partial(
    training.train, kind="cbn_max_lr", problem_of=problem_of, after=measure
)


def run(settings):
    """Trains everything; returns the directory with the table and the figures."""
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows, panels, accuracies = [], {}, {}
    swept = settings.activations, settings.norms, settings.learning_rates
    for activation, norm, rate in itertools.product(*swept):
        cell = {"activation": activation, "norm": norm, "learning_rate": rate}
        found = outcomes.of(**cell)
        curves = [each.metrics for each in found]
        row = {"trains": all(map(trains, curves)), "accuracy": results.percent(found)}
        rows.append(cell | row | {"runs": [each.results for each in found]})
        panels.setdefault(rate, {}).setdefault(activation, {})[norm] = curves
        by_rate = accuracies.setdefault(activation, {}).setdefault(norm, {})
        by_rate[rate] = results.accuracies(found)
    directory, title = settings.directory("cbn_max_lr"), settings.about()
    found = {"max_learning_rate": largest(rows), "rows": rows}
    results.write(directory, table(rows, settings), found)
    path, labels = directory / "accuracy.png", ("learning rate", "test accuracy (%)")
    figures.against(path, accuracies, *labels, title, base=10, ylim=(0, 100))
    figures.gradient_norms(directory / "gradient_norm.png", panels, title)
    return directory


def trains(curve):
    """Whether training did not collapse, by the metrics of a run."""
    last = curve[-1]
    alive = last["train_loss"] is not None
    return alive and last["train_accuracy"] >= 2 * last["guessing"]


def largest(rows):
    """The largest rate that trains with every seed, for each activation and norm."""
    found = {}
    for row in rows:
        best = found.setdefault(row["activation"], {})
        rates = [best.get(row["norm"]), row["learning_rate"] if row["trains"] else None]
        best[row["norm"]] = max(filter(None, rates), default=None)
    return found


def table(rows, settings):
    """The rows as Markdown."""
    frame, best, lines = pd.DataFrame(rows), largest(rows), []
    frame["accuracy"] += frame["trains"].map({True: "", False: " ✗"})
    for (activation, norm), of in frame.groupby(["activation", "norm"], sort=False):
        name, rate = figures.name_of(norm), best[activation][norm]
        rate = "none" if rate is None else f"{rate:g}"
        lines.append([activation, name, rate, *of["accuracy"]])
    rates = [f"{rate:g}" for rate in settings.learning_rates]
    header = ["activation", "norm", "largest rate", *rates]
    return (
        "The largest learning rate that trains, and the test accuracy after the last "
        f"epoch at each rate, %\n\n{results.markdown(header, lines)}\n"
        "✗ collapsed, or no better than guessing, with at least one seed. "
        f"{results.note(settings.seeds)}\n"
    )


if __name__ == "__main__":
    command.run(run, Settings)
