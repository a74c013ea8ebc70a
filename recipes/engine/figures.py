"""Pictures, drawn without a display."""

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from recipes.engine import files

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# A norm has one colour in all pictures. Where two of one colour meet, the first here
# has it.
COLOUR_OF = {
    "bn": "#D55E00",
    "cbn": "#0072B2",
    "mean_removal": "#009E73",
    "l2_norm": "#CC79A7",
    "cbn_batch": "#E69F00",
    "cbn_fixed": "#56B4E9",
    "none": "#000000",
    "noisy_bn": "#CC79A7",
    "lp1": "#0072B2",
    "lp2": "#009E73",
    "lpinf": "#E69F00",
    "layer": "#009E73",
    "group": "#56B4E9",
    "rms": "#E69F00",
}
NAME_OF = {
    "bn": "BN",
    "cbn": "CBN",
    "mean_removal": "mean removal alone",
    "l2_norm": "l2 norm alone",
    "cbn_batch": "CBN without AMAT",
    "cbn_fixed": "CBN, eta = 0.9",
    "none": "no normalization",
    "noisy_bn": "NoisyBN",
    "lp1": "l1 norm",
    "lp2": "l2 norm",
    "lpinf": "l∞ norm",
    "layer": "LN",
    "group": "GN",
    "rms": "RMS",
}


def colours(labels):
    """A dict from each label to its colour: a norm's own, or the next free one."""
    owner_of = {}
    for name, colour in COLOUR_OF.items():
        if name in labels:
            owner_of.setdefault(colour, name)
    free = [colour for colour in COLOURS if colour not in owner_of] or list(COLOURS)
    free = iter(free * len(labels))
    own = {name: colour for colour, name in owner_of.items()}
    return {name: own.get(name) or next(free) for name in labels}


def shades(labels):
    """A dict from each label to its colour, for labels that have an order."""
    colourmap = matplotlib.colormaps["viridis"]
    places = np.linspace(0, 0.92, len(labels))
    return {label: colourmap(place) for label, place in zip(labels, places)}


def training_curves(path, panels, title):
    """Draws the training loss above the test accuracy, one column a panel.

    Each curve is the mean over the runs that reached the epoch, in a band from the
    lowest to the highest of them.

    Args:
        path: Where the PNG goes.
        panels: Dict from the title of a panel to a dict from a label to its runs, each
            a list of the dicts in metrics.jsonl. A label has one colour everywhere.
        title: Of the picture.
    """
    rows = [
        ("train_loss", "training loss (nats)", {"yscale": "log"}),
        ("test_accuracy", "test accuracy", {"ylim": (0, 1)}),
    ]
    curves(path, panels, rows, title)


def curves(path, panels, rows, title, colour_of=None):
    """Draws values of each epoch: one column a panel, one row a value.

    Args:
        path, panels, title: See `training_curves`.
        rows: List of the key in metrics.jsonl, its label with the unit, and settings of
            the axes, such as `{"yscale": "log"}`.
        colour_of: Dict from a label to its colour; `colours` of the labels if `None`.
    """
    figure, axes = subplots(len(rows), len(panels), title, sharey="row")
    labels = list(dict.fromkeys(label for runs in panels.values() for label in runs))
    colour_of = colour_of or colours(labels)
    for column, (name, runs_of) in enumerate(panels.items()):
        for row, (key, _, settings) in enumerate(rows):
            for label, runs in runs_of.items():
                _curve(axes[row, column], runs, key, label, colour_of[label])
            axes[row, column].set(**settings)
        axes[0, column].set_title(name)
        _epochs(axes[-1, column])
    for row, (_, label, _) in enumerate(rows):
        axes[row, 0].set_ylabel(label)
    legend(figure, axes)
    save(figure, path)


def against(path, panels, xlabel, ylabel, title, base, **settings):
    """Draws the outcome of runs against a setting on a logarithmic axis.

    Mean over the runs, and a bar from the lowest to the highest of them.

    Args:
        path, title: See `training_curves`.
        panels: Dict from the title of a panel to a dict from a label to a dict from
            the setting, a number, to the outcomes, a list of numbers.
        xlabel, ylabel: Of the axes.
        base: Of the logarithm.
        **settings: Of all axes, such as `ylim`.
    """
    figure, axes = subplots(1, len(panels), title, sharey=True)
    labels = list(
        dict.fromkeys(label for values in panels.values() for label in values)
    )
    colour_of = colours(labels)
    for axis, (name, outcomes_of) in zip(axes[0], panels.items()):
        for label, outcomes in outcomes_of.items():
            x = [value for value in outcomes if outcomes[value]]
            means = [np.mean(outcomes[value]) for value in x]
            low = [mean - min(outcomes[value]) for mean, value in zip(means, x)]
            high = [max(outcomes[value]) - mean for mean, value in zip(means, x)]
            style = {"marker": "o", "ms": 4, "capsize": 2, "color": colour_of[label]}
            axis.errorbar(x, means, (low, high), **style, label=_name(label))
        axis.set_xscale("log", base=base)
        ticks = sorted(
            {value for outcomes in outcomes_of.values() for value in outcomes}
        )
        axis.xaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
        if base != 10:
            axis.set_xticklabels([f"{value:g}" for value in ticks])
        axis.set(title=name, xlabel=xlabel, **settings)
    axes[0, 0].set_ylabel(ylabel)
    legend(figure, axes)
    save(figure, path)


def gradient_norms(path, panels, title):
    """Draws the norm of the gradient at each epoch, one row a learning rate.

    Args:
        path, title: See `training_curves`.
        panels: Dict from a learning rate to what `training_curves` takes.
    """
    columns = list(next(iter(panels.values())))
    figure, axes = subplots(len(panels), len(columns), title, sharey="row")
    norms = [
        norm for panel in panels.values() for runs in panel.values() for norm in runs
    ]
    colour_of = colours(list(dict.fromkeys(norms)))
    for row, (rate, panel) in zip(axes, panels.items()):
        for axis, runs_of in zip(row, panel.values()):
            for norm, runs in runs_of.items():
                _curve(axis, runs, "gradient_norm", norm, colour_of[norm])
            axis.set(yscale="log")
        row[0].set_ylabel(f"rate {rate:g}\ngradient norm")
    for column, name in enumerate(columns):
        axes[0, column].set_title(name)
        _epochs(axes[-1, column])
    legend(figure, axes)
    save(figure, path)


def distributions(path, panels, interval, ylabel, title, ylim):
    """Draws how values spread over channels at each epoch: quantiles as bands.

    Args:
        path, title: See `training_curves`.
        panels: Dict from the title of a row to a dict from the title of a column to a
            list with the values of all channels at each epoch.
        interval: Two numbers between which the values are expected.
        ylabel: Of the values.
        ylim: Two numbers, what is drawn of the axis of the values.
    """
    columns = list(next(iter(panels.values())))
    figure, axes = subplots(len(panels), len(columns), title, sharey=True)
    bands = ((0, 100, 0.15), (10, 90, 0.25), (25, 75, 0.4))
    for row, (name, panel) in zip(axes, panels.items()):
        for axis, values in zip(row, panel.values()):
            if not values:
                continue
            x = np.arange(1, len(values) + 1)
            for low, high, alpha in bands:
                edges = [np.percentile(v, (low, high)) for v in values]
                style = {"color": COLOUR_OF["cbn"], "alpha": alpha, "lw": 0}
                label = "all channels" if low == 0 else f"{low} to {high} %"
                axis.fill_between(x, *np.transpose(edges), **style, label=label)
            medians = [np.median(v) for v in values]
            axis.plot(x, medians, color=COLOUR_OF["cbn"], label="median")
            for bound in interval:
                axis.axhline(bound, color="black", ls="--", lw=1, label="assumption")
        row[0].set_ylabel(f"{name}\n{ylabel}")
    for column, name in enumerate(columns):
        axes[0, column].set(title=name, ylim=ylim)
        _epochs(axes[-1, column])
    legend(figure, axes)
    save(figure, path)


def steps(path, panels, ticks, title):
    """Draws outcomes of a list of variants, side by side with those of a paper.

    Args:
        path, title: See `training_curves`.
        panels: Dict from the title of a panel to a dict from a label to a list of the
            mean and the deviation for each variant, or `None` where there is none.
            Each label has an axis of its own, for the numbers are of other data.
        ticks: The names of the variants.
    """
    labels = list(next(iter(panels.values())))
    figure, axes = subplots(len(labels), len(panels), title, sharey=False)
    for column, (name, values_of) in enumerate(panels.items()):
        for row, label in enumerate(labels):
            axis = axes[row, column]
            pairs = [(i, v) for i, v in enumerate(values_of[label]) if v is not None]
            axis.errorbar(
                [i for i, _ in pairs],
                [value["mean"] for _, value in pairs],
                [value["std"] for _, value in pairs],
                fmt="o",
                capsize=3,
                color=COLOUR_OF["cbn"] if row == 0 else "gray",
            )
            axis.set_xticks(range(len(ticks)), ticks)
        axes[0, column].set_title(name)
        axes[-1, column].set_xlabel("row")
    for row, label in enumerate(labels):
        axes[row, 0].set_ylabel(label)
    save(figure, path)


def subplots(rows, columns, title, sharey):
    """A figure and its axes, an array `(rows, columns)`, of a size that fits them."""
    size = (1.4 + 2.5 * columns, 1.2 + 2.1 * rows)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def _epochs(axis):
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend(figure, axes):
    """Puts one legend, of the labels of all axes, beside them."""
    found = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside right upper")


def save(figure, path):
    """Writes the figure, whole or not at all."""
    files.write(path, lambda temporary: figure.savefig(temporary, dpi=120))


def _name(label):
    return NAME_OF.get(label, label)


def _curve(axis, runs, key, label, colour):
    epochs = max((len(run) for run in runs), default=0)
    values = np.full((len(runs), epochs), np.nan)
    for row, run in zip(values, runs, strict=True):
        found = [line.get(key) for line in run]
        row[: len(run)] = [np.nan if value is None else value for value in found]
    values = values[:, ~np.isnan(values).all(0)]  # a diverged run ends with NaN
    if not values.size:
        return
    x = np.arange(1, values.shape[1] + 1)
    axis.plot(x, np.nanmean(values, 0), color=colour, label=_name(label))
    axis.fill_between(
        x, np.nanmin(values, 0), np.nanmax(values, 0), color=colour, alpha=0.2, lw=0
    )
