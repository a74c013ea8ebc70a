"""Norms of scale-invariant weights grow in training, and weight decay stops them.

The small run, and the paper's, for a GPU:

    python -m recipes.weight_growth
    python -m recipes.weight_growth --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet101 --epochs=200 --batch_size=128 --learning_rate=1e-3 \
        --weight_decay=5e-4

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

import numpy as np
from absl import app, flags

from keras_norms import diagnostics
from recipes import figures, grid, optimizers
from recipes.models import norms as norm_names

NORMS = ("bn", "group", "layer", "wn", "cbn", "ws+gn", "cwn")
SETTINGS = {
    "model": "resnet8",
    "activation": "relu",
    "epochs": 30,
    "batch_size": 32,
    "learning_rate": 0.1,
    "momentum": 0.0,
}
WEIGHT_DECAY = 5e-3
# The first convolution of the first residual block, and the BN after it.
LAYERS = {"resnet101": ("conv2_block1_1_conv", "conv2_block1_1_bn")}
OTHERS = ("stage1_block0_conv1", "stage1_block0_conv1_norm")
DISTANCES = ("variance_distance", "mean_distance")
STATISTICS_BATCH = 128
COLOURS = {"no decay": "#D55E00", "decay": "#0072B2", "Lemma 3": "#000000"}


def gradient_descent(schedule, momentum, weight_decay):
    """`optimizers.SGD` with the first rate of a schedule, throughout."""
    return optimizers.SGD(float(schedule(0)), momentum, weight_decay)


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
            distance = next(name for name in DISTANCES if key.endswith(name))
            logs[distance] = values.tolist()


def callbacks(images, config):
    """What measures a training; see `recipes.grid.train`."""
    found = [_Growth()]
    if config["norm"] == "bn":
        _, norm = LAYERS.get(config["model"], OTHERS)
        found.append(_Statistics(images.x_train[:STATISTICS_BATCH], [norm]))
    return found


def weight_growth(
    settings,
    norms=NORMS,
    weight_decay=WEIGHT_DECAY,
    seeds=1,
    runs_dir="runs",
    **places,
):
    """Trains with every norm, with and without weight decay.

    Args:
        settings: Dict of the settings of `recipes.train.train` that all runs share, in
            place of those in `SETTINGS`. The model must be a residual network.
        norms: List of names of `recipes.models.norms`.
        weight_decay: Positive float.
        seeds: Integer, each is trained with the seeds 0 to `seeds - 1`.
        runs_dir: Where the runs, and the outcome, are recorded.
        **places: Other arguments of `recipes.grid.train_all`.

    Returns:
        The path of the directory with table.md, results.json, growth.png (Figure 3) and
        with BN variance.png and mean.png (Figure 2).
    """
    if not weight_decay > 0:
        raise ValueError(
            "Argument `weight_decay` must be positive. "
            f"Received: weight_decay={weight_decay}"
        )
    settings = SETTINGS | settings
    cells = [(norm, decay) for norm in norms for decay in (0.0, weight_decay)]
    outcomes = grid.train_all(
        [
            {**settings, "norm": norm, "weight_decay": decay, "seed": seed}
            for norm, decay in cells
            for seed in range(seeds)
        ],
        kind="weight_growth",
        optimizer=gradient_descent,
        callbacks=callbacks,
        runs_dir=runs_dir,
        **places,
    )
    layer, _ = LAYERS.get(settings["model"], OTHERS)
    rows, panels, distances = [], {}, {}
    for i, (norm, decay) in enumerate(cells):
        runs, curves = zip(*outcomes[i * seeds : (i + 1) * seeds], strict=True)
        measured = [norms_of(curve, layer, decay) for curve in curves]
        rows.append(
            {
                "norm": norm,
                "weight_decay": decay,
                "diverged": sum(run["diverged"] for run in runs),
                **summary(runs, curves, layer),
            }
        )
        panel = panels.setdefault(figures.NAME_OF.get(norm, norm.upper()), {})
        panel["decay" if decay else "no decay"] = measured
        if not decay:
            panel["Lemma 3"] = [predicted(curve, layer) for curve in curves]
        if norm == "bn":
            label = "decay" if decay else "no decay"
            for key in DISTANCES:
                distances.setdefault(key, {})[label] = pooled(curves, key)
    lists = [norms, [f"decay{weight_decay:g}"], [f"seeds{seeds}"]]
    directory = grid.directory("weight_growth", runs_dir, settings, *lists)
    results = {"layer": layer, "rows": rows, "distances": distance_rows(distances)}
    grid.write(directory, table(results), results)
    title = grid.about(settings, seeds)
    scores = [("norm", f"norm of\n{layer}", {}), ("gain", "less that of epoch 0", {})]
    scores.append(("test_accuracy", "test accuracy", {}))
    figures.curves(directory / "growth.png", panels, scores, title, COLOURS)
    for key, symbol in zip(DISTANCES, ("|gamma² - sigma²|", "|beta - mu|")):
        if distances:
            columns = distances[key]
            top = max(
                (max(v) for values in columns.values() for v in values), default=1
            )
            figures.distributions(
                directory / f"{key.removesuffix('_distance')}.png",
                {"all channels": columns},
                (),
                symbol,
                f"BN after {layer}\n{title}",
                (0, 1.05 * top),
            )
    return directory


def norms_of(curve, layer, decay):
    """The lines of a run for the figure.

    Returns:
        List of dicts of `test_accuracy`, the `norm` of a layer and, without decay, its
        `gain` since the start.
    """
    lines = [
        {"norm": line.get(f"{layer} norm"), "test_accuracy": line["test_accuracy"]}
        for line in curve
    ]
    if decay or lines[0]["norm"] is None:
        return lines
    first = start(curve, layer)
    return [{**x, "gain": x["norm"] - first} for x in lines if x["norm"] is not None]


def predicted(curve, layer):
    """The same by Lemma 3, whose norm is the root of `|W_0|^2 + sum |D|^2`."""
    lines = [line for line in curve if f"{layer} norm" in line]
    if not lines:
        return []
    first = start(lines, layer)
    steps = np.cumsum([line[f"{layer} squared steps"] for line in lines])
    norms = [float(np.sqrt(first**2 + step)) for step in steps]
    return [{"norm": norm, "gain": norm - first} for norm in norms]


def start(curve, layer):
    """The norm before the first step."""
    square = curve[0][f"{layer} norm"] ** 2 - curve[0][f"{layer} growth"]
    return float(np.sqrt(square))


def ratio(curve, layer):
    """The growth of `|W|^2` over all steps, divided by the sum of `|D|^2`."""
    grown = sum(line[f"{layer} growth"] for line in curve)
    return grown / sum(line[f"{layer} squared steps"] for line in curve)


def convolutions(line):
    """The names of the kernels in a line of metrics, without that of the logits."""
    names = [key.removesuffix(" growth") for key in line if key.endswith(" growth")]
    return [name for name in names if name not in ("logits", "predictions")]


def summary(runs, curves, layer):
    """The numbers of a row, over the runs that did not diverge.

    Returns:
        Dict of `test_accuracy`, `start` and `end`, the norms of the layer, and `ratio`,
        each a dict of mean and deviation over seeds; and `lowest` and `highest`, the
        extremes of that ratio over all convolutions. `None` where there are none.
    """
    alive = [
        curve for run, curve in zip(runs, curves, strict=True) if not run["diverged"]
    ]
    keys = ("test_accuracy", "start", "end", "ratio", "lowest", "highest")
    if not alive:
        return dict.fromkeys(keys)
    ratios = [ratio(curve, n) for curve in alive for n in convolutions(curve[0])]
    return {
        "test_accuracy": _spread([curve[-1]["test_accuracy"] for curve in alive]),
        "start": _spread([start(curve, layer) for curve in alive]),
        "end": _spread([curve[-1][f"{layer} norm"] for curve in alive]),
        "ratio": _spread([ratio(curve, layer) for curve in alive]),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def pooled(curves, key):
    """The values of all seeds and channels: a list an epoch."""
    epochs = max(len(curve) for curve in curves)
    values = [
        [v for curve in curves for line in curve[i : i + 1] for v in line.get(key, [])]
        for i in range(epochs)
    ]
    return [epoch for epoch in values if epoch]


def distance_rows(distances):
    """Median over channels and seeds after the first, the middle and the last epoch."""
    return [
        {
            "distance": key,
            "decay": label,
            **{
                name: float(np.median(values[place]))
                for name, place in (("first", 0), ("middle", len(values) // 2))
            },
            "last": float(np.median(values[-1])),
            "last_largest": float(np.max(values[-1])),
        }
        for key, columns in distances.items()
        for label, values in columns.items()
        if values
    ]


def _spread(values):
    return {"mean": float(np.mean(values)), "std": float(np.std(values))}


def table(results):
    """Returns the results as Markdown."""
    header = ["norm", "weight decay", "test accuracy, %", "norm at the start"]
    header += ["at the end", "growth / squared steps", "of all convolutions"]
    lines = []
    for row in results["rows"]:
        name = figures.NAME_OF.get(row["norm"], row["norm"].upper())
        cells = [name, f"{row['weight_decay']:g}"]
        if row["ratio"] is None:
            lines.append([*cells, "diverged", *["–"] * 4])
            continue
        accuracy = {k: 100 * v for k, v in row["test_accuracy"].items()}
        note = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        identity = [
            grid.spread(row["ratio"], 4),
            f"{row['lowest']:.4f} to {row['highest']:.4f}",
        ]
        lines.append(
            [
                *cells,
                grid.spread(accuracy, 2) + note,
                grid.spread(row["start"], 3),
                grid.spread(row["end"], 3),
                # Weight decay is not part of Lemma 3.
                *(["–"] * 2 if row["weight_decay"] else identity),
            ]
        )
    text = (
        f"The kernel of {results['layer']}\n\n{grid.markdown(header, lines)}\n"
        "Mean ± standard deviation over seeds. The last two columns are the growth of "
        "|W|² over all steps, divided by the sum of their squared lengths: 1 if Lemma "
        "3 holds.\n"
    )
    if not results["distances"]:
        return text
    header = ["distance", "weight decay", "epoch 1", "middle", "last epoch"]
    lines = [
        [
            {"variance_distance": "of gamma² and sigma²"}.get(
                row["distance"], "of beta and mu"
            ),
            row["decay"],
            *(f"{row[k]:.4f}" for k in ("first", "middle", "last", "last_largest")),
        ]
        for row in results["distances"]
    ]
    return (
        f"{text}\nThe BN after it, median over channels and seeds\n\n"
        f"{grid.markdown([*header, 'its largest channel'], lines)}"
    )


def main(_):
    values = flags.FLAGS
    arguments = grid.arguments_of_flags()
    arguments.pop("activations")
    arguments["settings"] |= {
        key: values[key].value
        for key in ("learning_rate", "momentum")
        if values[key].value is not None
    }
    grid.report(
        weight_growth(norms=values.norms, weight_decay=values.weight_decay, **arguments)
    )


def define_flags():
    """Defines the flags."""
    grid.define_flags(SETTINGS["model"], seeds=1, activations=())
    flags.DEFINE_list("norms", list(NORMS), ", ".join(sorted(norm_names.NORMS)))
    flags.DEFINE_float("weight_decay", WEIGHT_DECAY, "Of the runs with it.", 0)
    flags.DEFINE_float("learning_rate", None, "0.1, throughout.", lower_bound=0)
    flags.DEFINE_float("momentum", None, "0, as Lemma 3 has it.", 0, 1)


if __name__ == "__main__":
    define_flags()
    app.run(main)
