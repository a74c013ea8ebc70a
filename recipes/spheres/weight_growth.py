"""Norms of scale-invariant weights grow in training, and weight decay stops them.

The small run, and the paper's, for a GPU:

    python -m recipes.spheres.weight_growth
    python -m recipes.spheres.weight_growth --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet101 --epochs=200 --batch_size=128 --learning_rate=1e-3 \
        --weight_decays=0,5e-4

Claims:

* Lemma 3: if the loss does not depend on the scale of a kernel W, a step D of gradient
  descent makes |W|^2 larger by |D|^2, so that norms keep growing; with weight decay
  they stabilise or fall (Figure 3, BN, GN, LN and WN; here CBN, WS and CWN as well).
* gamma^2 and beta of a BN come near variance sigma^2 and mean mu of what it reads, and
  their distance stays small (Figure 2).

Plain gradient descent at one rate, each network with and without weight decay; shown is
the first convolution of the first residual block. "Growth" is that of |W|^2 over all
steps; the last column is its ratio to the sum of |D|^2 for each convolution, where 1 is
Lemma 3.

The small run (ResNet-8 on digits, 14 trainings) takes 4.5 minutes of one core of an
Intel Xeon:

             norm: start   end, no decay   decay    growth / squared steps
    BN           5.72          5.78         3.01       1.000 to 1.002
    GN           5.72          5.79         3.00       1.000 to 1.000
    LN           5.72          5.81         3.01       1.000 to 1.000
    WN           5.72          5.87         3.14       1.000 to 1.000
    CBN          5.72          5.82         3.02      -14.3  to 2.8
    WS+GN        5.72          5.77         2.99       1.000 to 1.000
    CWN          5.72          5.77         2.98       1.000 to 1.001

Lemma 3 holds up to rounding and the epsilon of norms, but for CBN, behind which not
every kernel is scale-invariant. Norms grow until the loss is small (at rate 1, by 22 to
39 %). The distances of Figure 2 are stable without decay, not small: 0.21 and 0.30.

Reference: Sun et al., New Interpretations of Normalization Methods in Deep Learning,
AAAI 2020, Lemma 3, Section 3.1, Figures 2 and 3.
https://doi.org/10.1609/aaai.v34i04.6046
"""

import dataclasses

import keras
import numpy as np

from keras_norms import diagnostics
from recipes.engine import classifier, command, figures, results, training
from recipes.engine.settings import setting
from recipes.models import norms as norm_names
from recipes.spheres import _growth

NORMS = ("bn", "group", "layer", "wn", "cbn", "ws+gn", "cwn")
# The first convolution of the first residual block, and the BN after it.
LAYERS = {"resnet101": ("conv2_block1_1_conv", "conv2_block1_1_bn")}
OTHERS = ("stage1_block0_conv1", "stage1_block0_conv1_norm")
DISTANCES = {"variance": "|gamma² - sigma²|", "mean": "|beta - mu|"}
STATISTICS_BATCH = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Grid):
    """Every norm, with and without weight decay."""

    model: str = setting("resnet8", "A residual network.")
    activation: str = "relu"
    epochs: int | None = 30
    batch_size: int | None = 32
    learning_rate: float = setting(0.1, "Throughout.", above=0)
    momentum: float = 0.0  # as Lemma 3 has it
    seeds: int = 1
    norms: tuple[str, ...] = setting(NORMS, "Norms.", choices=sorted(norm_names.NORMS))
    weight_decays: tuple[float, ...] = setting((0, 5e-3), "Times weights.", at_least=0)


def problem(settings):
    """The training of a classifier at one learning rate."""
    rates = [settings.learning_rate] * 2
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], rates)
    return classifier.problem(settings)._replace(schedule=schedule)


def train(settings):
    """Trains one network, and follows its kernels and the BN after the layer shown."""
    callbacks = [lambda problem, settings: _Growth()]
    if settings.norm == "bn":
        callbacks.append(_statistics)
    return training.train(settings, "weight_growth", problem, callbacks=callbacks)


class _Growth(diagnostics.WeightGrowth):
    """Sums what the steps of an epoch do to the square of each norm.

    The logs of the epoch get, for each kernel, its norm at the end, the sum of
    `|W + D|^2 - |W|^2` over the steps D, and that of `|D|^2`.
    """

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self.history = {}

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch)  # Nobody reads the logs of a step.

    def on_epoch_end(self, epoch, logs=None):
        for key, norms in self.history.items():
            name, _, what = key.rpartition("_")
            if what == "norm":
                growth = np.array(self.history[f"{name}_growth"])
                steps = np.square(self.history[f"{name}_step"])
                logs[f"{name} norm"] = float(np.sqrt(norms[-1] ** 2 + growth[-1]))
                logs[f"{name} growth"] = float(growth.sum())
                logs[f"{name} squared steps"] = float(steps.sum())


class _Statistics(diagnostics.BatchStatistics):
    """Puts the distances of all channels of one layer into the logs of an epoch."""

    def before_step(self):
        pass

    def on_epoch_end(self, epoch, logs=None):
        self.channels = {}
        self.measure()
        for key, (values,) in self.channels.items():
            distance = key.removesuffix("_distance").rpartition("_")[2]
            logs[f"{distance}_distance"] = values.tolist()


def _statistics(problem, settings):
    _, norm = LAYERS.get(settings.model, OTHERS)
    return _Statistics(problem.images.x_train[:STATISTICS_BATCH], [norm])


def run(settings):
    """Trains with every norm and weight decay; writes the table and the figures.

    Returns:
        The path of the directory with table.md, results.json, growth.png (Figure 3) and
        with BN variance.png and mean.png (Figure 2).
    """
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    layer, _ = LAYERS.get(settings.model, OTHERS)
    labels = {
        decay: f"decay {decay:g}" if decay else "no decay"
        for decay in settings.weight_decays
    }
    rows, panels, distances = [], {}, {name: {} for name in DISTANCES}
    for norm in settings.norms:
        panel = panels.setdefault(name_of(norm), {})
        for decay in settings.weight_decays:
            found = outcomes.of(norm=norm, weight_decay=decay)
            curves = [outcome.metrics for outcome in found]
            summary = _growth.summary(found, layer)
            rows.append({"norm": norm, "weight_decay": decay, **summary})
            label = labels[decay]
            panel[label] = [_growth.measured(curve, layer, decay) for curve in curves]
            if not decay:
                panel["Lemma 3"] = [_growth.predicted(curve, layer) for curve in curves]
            if norm == "bn":
                for name in DISTANCES:
                    distances[name][label] = _growth.pooled(curves, f"{name}_distance")
    directory = settings.directory("weight_growth")
    found = {
        "layer": layer,
        "rows": rows,
        "distances": _growth.distance_rows(distances),
    }
    results.write(directory, table(found, settings.seeds), found)
    title = settings.about()
    figures.curves(
        directory / "growth.png",
        panels,
        [
            ("norm", f"norm of\n{layer}", {}),
            ("gain", "less that of epoch 0", {}),
            ("test_accuracy", "test accuracy", {}),
        ],
        title,
        figures.colours(list(labels.values())) | {"Lemma 3": "#000000"},
    )
    for name, columns in distances.items():
        values = [v for epochs in columns.values() for epoch in epochs for v in epoch]
        if columns:
            figures.distributions(
                directory / f"{name}.png",
                {"all channels": columns},
                (),
                DISTANCES[name],
                f"BN after {layer}\n{title}",
                (0, 1.05 * max(values, default=1)),
            )
    return directory


def name_of(norm):
    """A norm as tables call it."""
    return figures.NAME_OF.get(norm, norm.upper())


def table(found, seeds):
    """What is in results.json, as Markdown."""
    header = ["norm", "weight decay", "test accuracy, %", "norm at the start"]
    header += ["at the end", "growth / squared steps", "of all convolutions"]
    lines = []
    for row in found["rows"]:
        identity = ["–", "–"]
        if not row["weight_decay"] and row["ratio"]:  # decay is not part of Lemma 3
            identity = [
                results.spread(row["ratio"], 4),
                f"{row['lowest']:.4f} to {row['highest']:.4f}",
            ]
        lost = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        lines.append(
            [
                name_of(row["norm"]),
                f"{row['weight_decay']:g}",
                results.spread(row["test_accuracy"], 2, 100) + lost,
                results.spread(row["start"], 3),
                results.spread(row["end"], 3),
                *identity,
            ]
        )
    text = (
        f"The kernel of {found['layer']}\n\n{results.markdown(header, lines)}\n"
        f"{results.note(seeds)} The last two columns are the growth of |W|² over all "
        "steps, divided by the sum of their squared lengths: 1 if Lemma 3 holds.\n"
    )
    if not found["distances"]:
        return text
    header = ["distance", "weight decay", "epoch 1", "middle", "last epoch"]
    header.append("its largest channel")
    lines = [
        [
            DISTANCES[row["distance"]].replace("|", ""),
            row["decay"],
            *(f"{row[k]:.4f}" for k in ("first", "middle", "last", "last_largest")),
        ]
        for row in found["distances"]
    ]
    return (
        f"{text}\nThe BN after it, median over channels and seeds\n\n"
        f"{results.markdown(header, lines)}"
    )


if __name__ == "__main__":
    command.run(run, Settings)
