"""Mean removal and the l2 norm, alone and together, against the learning rate.

The small run and the paper's, for a GPU:

    python -m recipes.cbn.max_lr
    python -m recipes.cbn.max_lr --dataset=cifar10 --data_dir=<where it is> \
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

import dataclasses
import functools
import itertools

import keras
import numpy as np
from keras import ops

from recipes.engine import classifier, command, figures, optimizers, results, training
from recipes.engine.settings import setting
from recipes.models import norms

NORMS = ("none", "mean_removal", "l2_norm", "cbn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Grid):
    """The four variants at every rate."""

    model: str = "resnet8"
    activations: tuple[str, ...] = setting(
        ("sigmoid", "tanh", "relu"), "As Keras has them."
    )
    norms: tuple[str, ...] = setting(NORMS, "What to compare.", choices=norms.NORMS)
    learning_rates: tuple[float, ...] = setting(
        (1e-4, 1e-3, 1e-2, 1e-1, 1.0), "Of epoch 1.", above=0
    )
    seeds: int = 1


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class MeasuringSGD(optimizers.SGD):
    """Sums the squared norm of the gradients it gets, without weight decay."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.gradient_square = self.add_variable((), name="gradient_square")

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)  # builds first
        self.gradient_square.assign_add(
            sum(ops.sum(ops.square(ops.cast(g, "float32"))) for g in grads)
        )


def measure(model, problem, settings):
    """The root mean square over the steps of an epoch of the gradient's l2 norm."""
    total = model.optimizer.gradient_square
    square = float(ops.convert_to_numpy(total))
    total.assign(0.0)  # the next epoch starts anew
    return {
        "gradient_norm": float(np.sqrt(square / problem.steps)),
        "guessing": 1 / model.output_shape[-1],
    }


train = functools.partial(
    training.train,
    kind="cbn_max_lr",
    problem_of=functools.partial(classifier.problem, optimizer=MeasuringSGD),
    after=measure,
)


def run(settings):
    """Trains the four variants at every rate; writes the table and the figures.

    Returns:
        The path of the directory with table.md, results.json, accuracy.png and
        gradient_norm.png (Figure 7).
    """
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows, panels, accuracies = [], {}, {}
    names = "activation", "norm", "learning_rate"
    swept = settings.activations, settings.norms, settings.learning_rates
    for activation, norm, rate in itertools.product(*swept):
        cell = dict(zip(names, (activation, norm, rate), strict=True))
        found = outcomes.of(**cell)
        curves = [each.metrics for each in found]
        rows.append(
            {
                **cell,
                "trains": all(map(trains, curves)),
                "accuracy": results.percent(found),
                "runs": [each.results for each in found],
            }
        )
        panels.setdefault(rate, {}).setdefault(activation, {})[norm] = curves
        by_rate = accuracies.setdefault(activation, {}).setdefault(norm, {})
        by_rate[rate] = results.accuracies(found)
    directory = settings.directory("cbn_max_lr")
    found = {"max_learning_rate": largest(rows), "rows": rows}
    results.write(directory, table(rows, settings), found)
    figures.against(
        directory / "accuracy.png",
        accuracies,
        "learning rate",
        "test accuracy (%)",
        settings.about(),
        base=10,
        ylim=(0, 100),
    )
    path = directory / "gradient_norm.png"
    figures.gradient_norms(path, panels, settings.about())
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
        best = found.setdefault(row["activation"], {})
        rates = [best.get(row["norm"]), row["learning_rate"] if row["trains"] else None]
        best[row["norm"]] = max(filter(None, rates), default=None)
    return found


def table(rows, settings):
    """The rows as Markdown."""
    rates = [f"{rate:g}" for rate in settings.learning_rates]
    lines = []
    for activation, best in largest(rows).items():
        for norm, rate in best.items():
            accuracies = [
                row["accuracy"] + ("" if row["trains"] else " ✗")
                for row in rows
                if (row["activation"], row["norm"]) == (activation, norm)
            ]
            name = figures.NAME_OF.get(norm, norm)
            best_rate = "none" if rate is None else f"{rate:g}"
            lines.append([activation, name, best_rate, *accuracies])
    header = ["activation", "norm", "largest rate", *rates]
    return (
        "The largest learning rate that trains, and the test accuracy after the last "
        f"epoch at each rate, %\n\n{results.markdown(header, lines)}\n"
        "✗ collapsed, or no better than guessing, with at least one seed. "
        f"{results.note(settings.seeds)}\n"
    )


if __name__ == "__main__":
    command.run(run, Settings)
