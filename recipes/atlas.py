r"""Which norm, with which activation and batch size, each at its own learning rate.

The small run takes less than five minutes on two cores. The run on 10,000 images of
CIFAR-10 is for a GPU; it trains the rates of a cell together in one program, and then
its seeds:

    python -m recipes.atlas
    KERAS_BACKEND=jax python -m recipes.atlas --dataset=cifar10 \
        --data_dir=<where it is> --train_size=10000 --validation_size=2000 \
        --activations=sigmoid,tanh,relu --batch_sizes=4,32,128 --epochs=20 \
        --learning_rates=0.01,0.03,0.1,0.3,1 --seeds=5 --population=5 \
        --norms=none,bn,cbn,cbn_batch,group,layer,instance,rms,renorm,dyt,derf,lp1,noisy_bn,ws+gn

A cell is a norm with an activation and a batch size. Its learning rate is the one with
the highest accuracy on held-out training images after the last epoch, with one seed.
Networks trained at this rate on all training images are then tested once. Several
processes, with different norms, activations or batch sizes, can share `--runs_dir`. One
command for all of them then trains nothing more and writes the whole table.

Small run on digits, test accuracy in % and the rate (* at the end of the grid):

                    sigmoid, 16   sigmoid, 128  ReLU, 16      ReLU, 128
    no norm         10.3  0.01*   10.1  0.03    97.2  0.1     93.6  0.1
    BN              97.8  0.3*    96.0  0.3*    97.6  0.03    98.9  0.3*
    CBN             97.4  0.1     97.5  0.1     98.2  0.3*    96.9  0.01*
    GN              90.6  0.3*    16.1  0.03    98.2  0.1     96.2  0.1

(TensorFlow 2.21; deviations over two seeds are 0 to 4.7 points.) With each norm at its
own rate, BN and CBN are equal within their deviations at 16 images. At 128, CBN wins by
1.5 points with sigmoid and BN by 2 with ReLU, where one seed chose the smallest rate
for CBN. docs/results/atlas.md has CIFAR-10: 4, 32 and 128 images a batch, and all of
these norms with 128.

References: `recipes.models.norms` says what the norms are.
"""

import dataclasses
import itertools

from recipes.engine import classifier, command, figures, joint_training, results
from recipes.engine.settings import setting

USUAL_BATCH = 128  # the learning rates are for this size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Populations):
    """Every norm with every activation and batch size."""

    model: str = "resnet8"
    norms: tuple[str, ...] = ("none", "bn", "cbn", "group")
    activations: tuple[str, ...] = ("sigmoid", "relu")
    batch_sizes: tuple[int, ...] = setting(
        (16, 128), "Images in a batch; each has two columns of the table."
    )
    learning_rates: tuple[float, ...] = setting(
        (0.01, 0.03, 0.1, 0.3),
        f"Learning rates at {USUAL_BATCH} images in a batch; else in proportion.",
    )
    validation_size: int | None = setting(
        300, "Training images held out to choose the learning rate.", at_least=1
    )
    epochs: int | None = 8
    seeds: int = 2

    def cells(self):
        """A list of the settings, a dict, of each cell."""
        swept = itertools.product(self.activations, self.batch_sizes, self.norms)
        names = "activation", "batch_size", "norm"
        return [dict(zip(names, values, strict=True)) for values in swept]


def run(settings):
    """Trains everything; returns the directory with the tables and the figure."""
    cells, searched, trained = settings.cells(), [], []
    for cell in cells:
        rates = [_scaled(rate, cell) for rate in settings.learning_rates]
        searched += [settings.one(**cell, learning_rate=rate) for rate in rates]
    found = joint_training.train_all(settings, searched, classifier.train)
    rows = [cell | choose(found.of(**cell), cell, settings) for cell in cells]
    for cell, row in zip(cells, rows, strict=True):
        rate = _scaled(row["rate"], cell)
        trained += settings.runs(**cell, learning_rate=rate, validation_size=None)
    found = joint_training.train_all(settings, trained, classifier.train)
    for cell, row in zip(cells, rows, strict=True):
        outcomes = found.of(**cell)
        row["accuracy"] = results.percent(outcomes)
        row["test_accuracy"] = results.mean_and_std(results.accuracies(outcomes))
        row["runs"] = [each.results for each in outcomes]
    directory = settings.directory("atlas")
    results.write(directory, table(rows, settings), {"rows": rows})
    _draw(directory / "accuracy.png", rows, settings)
    return directory


def _scaled(rate, cell):
    return rate * cell["batch_size"] / USUAL_BATCH


def choose(outcomes, cell, settings):
    """The rate of a cell with the highest accuracy on held-out images.

    Args:
        outcomes: List of `recipes.engine.training.Outcome`, one per rate, in any order.
        cell: Dict with the `batch_size`.
        settings: A `Settings`.

    Returns:
        Dict of `rate`, for batches of `USUAL_BATCH` images (the smallest if several are
        the best, or none trains); `at_end`, whether that is the smallest or the largest
        rate tried; and `validation`, a dict from each rate to its accuracy, `None`
        where training diverged.
    """
    accuracy = {
        outcome.settings.learning_rate: outcome.results["test_accuracy"]
        for outcome in outcomes
        if not outcome.results["diverged"]
    }
    rates = sorted(settings.learning_rates)
    found = {rate: accuracy.get(_scaled(rate, cell)) for rate in rates}
    best = max(rates, key=lambda rate: -1 if found[rate] is None else found[rate])
    at_end = best in (rates[0], rates[-1])
    return {"rate": best, "at_end": at_end, "validation": found}


def table(rows, settings):
    """The rows as Markdown: a table for each activation, a line for each norm."""
    sizes = [(f"batch {size}", "rate") for size in settings.batch_sizes]
    cell = {(row["activation"], row["norm"], row["batch_size"]): row for row in rows}
    text = "Test accuracy after the last epoch, %, and the learning rate\n\n"
    for activation in settings.activations:
        lines = []
        for norm in settings.norms:
            line = [figures.name_of(norm)]
            for size in settings.batch_sizes:
                row = cell[activation, norm, size]
                line += [row["accuracy"], f"{row['rate']:g}" + "*" * row["at_end"]]
            lines.append(line)
        text += results.markdown([activation, *sum(sizes, ())], lines) + "\n"
    return (
        f"{text}The rate is that with {USUAL_BATCH} images a batch, of "
        f"{', '.join(f'{rate:g}' for rate in settings.learning_rates)}; with others it "
        "is in proportion. Those with * are the smallest or the largest: the best one "
        f"may be beyond. {results.note(settings.seeds)}\n"
    )


def _draw(path, rows, settings):
    panels = {activation: {} for activation in settings.activations}
    for row in rows:
        mean = (row["test_accuracy"] or {}).get("mean")
        name = figures.name_of(row["norm"])
        panels[row["activation"]].setdefault(name, {})[row["batch_size"]] = mean
    figures.heat_map(path, panels, "batch size", "test accuracy (%)", settings.about())


if __name__ == "__main__":
    command.run(run, Settings)
