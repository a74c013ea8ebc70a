"""Pictures, drawn without a display."""

import itertools

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    StrMethodFormatter,
)

from recipes.engine import files

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# A norm has one colour and one name in all pictures. Norms often drawn together have
# colours of Okabe and Ito, or of Paul Tol's "muted".
_STYLE_OF = {
    "none": ("#999999", "no normalization"),
    "bn": ("#D55E00", "BN"),
    "cbn": ("#0072B2", "CBN"),
    "cbn_no_se": ("#EE3377", "CBN, not in SE"),
    "cbn_batch": ("#E69F00", "CBN without AMAT"),
    "cbn_fixed": ("#88CCEE", "CBN, eta = 0.9"),
    "mean_removal": ("#44AA99", "mean removal alone"),
    "l2_norm": ("#EE6677", "l2 norm alone"),
    "bn_before": ("#CC6677", "BN before the layer"),
    "bn_rho": ("#994F00", "BN with rho"),
    "bn_rho_amat": ("#661100", "BN with rho and AMAT"),
    "noisy_bn": ("#CC79A7", "NoisyBN"),
    "noise": ("#DDCC77", "noise alone"),
    "lp1": ("#332288", "LpNorm 1"),
    "lp2": ("#33BBEE", "LpNorm 2"),
    "lpinf": ("#999933", "LpNorm ∞"),
    "layer": ("#009E73", "LN"),
    "group": ("#56B4E9", "GN"),
    "instance": ("#6A3D9A", "IN"),
    "rms": ("#B2DF8A", "RMS"),
    "renorm": ("#AA4499", "batch renorm"),
    "dyt": ("#BBBB00", "DyT"),
    "derf": ("#7F5F00", "Derf"),
    "ws": ("#E5C494", "WS"),
    "cwn": ("#000000", "CWN"),
    "wn": ("#882255", "WN"),
    "sn": ("#555555", "SN"),
    "ws+gn": ("#F0C000", "WS+GN"),
    "cwn+bn": ("#117733", "CWN+BN"),
}
COLOUR_OF = {norm: colour for norm, (colour, _) in _STYLE_OF.items()}


def name_of(label):
    """A norm as tables and pictures call it; any other label as it is."""
    return _STYLE_OF[label][1] if label in _STYLE_OF else label


def colours(labels):
    """A dict from each label to its colour: a norm's own, or the next free one."""
    own = {name: COLOUR_OF[name] for name in labels if name in COLOUR_OF}
    free = itertools.cycle([c for c in COLOURS if c not in own.values()] or COLOURS)
    return {name: own.get(name) or next(free) for name in labels}


def shades(labels):
    """A dict from each label to its colour, for labels that have an order."""
    colourmap = matplotlib.colormaps["viridis"]
    places = np.linspace(0, 0.92, len(labels))
    return {label: colourmap(place) for label, place in zip(labels, places)}


def training_curves(path, panels, title):
    """Draws the training loss above the test error: see `curves`."""
    panels = {
        name: {label: list(map(_with_error, runs)) for label, runs in of.items()}
        for name, of in panels.items()
    }
    loss = "train_loss", "training loss (nats)", {"yscale": "log"}
    # Accuracies near 1 are easier to tell apart by their errors.
    error = "test_error", "test error (%)", {"yscale": "log"}
    curves(path, panels, [loss, error], title)


def _with_error(run):
    lines = ((line, line.get("test_accuracy")) for line in run)
    return [
        line | {"test_error": None if found is None else 100 * (1 - found)}
        for line, found in lines
    ]


def curves(path, panels, rows, title, colour_of=None, dashed=()):
    """Draws values of each epoch: a column for each panel, a row for each value.

    Each curve is the mean over the runs that reached the epoch; a band shows their
    range.

    Args:
        path: Where the PNG goes.
        panels: Dict from the title of a panel to a dict from a label to its runs, each
            a list of the dicts in metrics.jsonl.
        rows: List of tuples: the key in metrics.jsonl, its label with the unit, and
            settings of the axes, such as `{"yscale": "log"}`.
        title: Title of the picture.
        colour_of: Dict from a label to its colour; `colours` of the labels if `None`.
        dashed: Labels whose curves are drawn last, and do not cover the others.
    """
    colour_of = colour_of or _colours(panels.values())

    def draw(axis, row, name):
        key, _, settings = row
        for label, runs in panels[name].items():
            style = {"ls": (0, (2, 3)), "zorder": 3} if label in dashed else {}
            _curve(axis, runs, key, label, colour_of[label], **style)
        axis.set(**settings)

    _by_epoch(path, rows, panels, draw, [label for _, label, _ in rows], title)


def gradient_norms(path, panels, title):
    """Draws the norm of the gradient like `curves`; `panels` has them for each rate."""
    colour_of = _colours(panel for row in panels.values() for panel in row.values())

    def draw(axis, rate, name):
        for norm, runs in panels[rate][name].items():
            _curve(axis, runs, "gradient_norm", norm, colour_of[norm])
        axis.set_yscale("log")

    ylabels = [f"rate {rate:g}\ngradient norm" for rate in panels]
    _by_epoch(path, panels, next(iter(panels.values())), draw, ylabels, title)


def distributions(path, panels, interval, ylabel, title, ylim):
    """Draws the spread of values over channels at each epoch: quantiles as bands.

    Args:
        path, title: See `curves`.
        panels: Dict from the title of a row to a dict from the title of a column to a
            list with the values of all channels at each epoch.
        interval: Two numbers between which the values are expected.
        ylabel, ylim: Label and limits of the axis of the values.
    """
    colour = COLOUR_OF["cbn"]

    def draw(axis, row, column):
        axis.set_ylim(ylim)
        if not (values := panels[row][column]):
            return
        x = np.arange(1, len(values) + 1)
        for low, high, alpha in ((0, 100, 0.15), (10, 90, 0.25), (25, 75, 0.4)):
            edges = np.transpose([np.percentile(v, (low, high)) for v in values])
            label = "all channels" if low == 0 else f"{low} to {high} %"
            style = {"color": colour, "alpha": alpha, "lw": 0, "label": label}
            axis.fill_between(x, *edges, **style)
        axis.plot(x, [np.median(v) for v in values], color=colour, label="median")
        for bound in interval:
            axis.axhline(bound, color="black", ls="--", lw=1, label="assumption")

    ylabels = [f"{name}\n{ylabel}" for name in panels]
    _by_epoch(path, panels, next(iter(panels.values())), draw, ylabels, title, True)


def against(path, panels, xlabel, ylabel, title, base, **settings):
    """Draws outcomes, mean and range, against a setting on a logarithmic axis.

    Args:
        path, title: See `curves`.
        panels: Dict from the title of a panel to a dict from a label to a dict from
            the setting, a number, to the outcomes, a list of numbers.
        xlabel, ylabel, base: Labels of the axes, and the base of the logarithm.
        **settings: Of all axes, such as `ylim`.
    """
    figure, axes = subplots(1, len(panels), title, sharey=True)
    colour_of = _colours(panels.values())
    for axis, (name, outcomes_of) in zip(axes[0], panels.items(), strict=True):
        for label, outcomes in outcomes_of.items():
            found = pd.Series(outcomes, dtype=object).explode().dropna().astype(float)
            found = found.groupby(level=0).agg(["mean", "min", "max"])
            low = (found["mean"] - found["min"]).clip(lower=0)  # negative by rounding
            high = (found["max"] - found["mean"]).clip(lower=0)
            style = {"marker": "o", "ms": 4, "capsize": 2, "color": colour_of[label]}
            style["label"] = name_of(label)
            axis.errorbar(found.index, found["mean"], (low, high), **style)
        axis.set_xscale("log", base=base)
        ticks = sorted({x for outcomes in outcomes_of.values() for x in outcomes})
        axis.xaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
        if base != 10:
            axis.set_xticklabels([f"{value:.3g}" for value in ticks])
        axis.set(title=name, xlabel=xlabel, **settings)
    axes[0, 0].set_ylabel(ylabel)
    legend(figure, axes)
    save(figure, path)


def heat_map(path, panels, xlabel, label, title):
    """Draws numbers as colours, with the numbers written in, in panels side by side.

    Args:
        path, title: See `curves`.
        panels: Dict from the title of a panel to a dict from the label of a row to a
            dict from the label of a column to a number, or `None`.
        xlabel, label: What the columns are, and what the numbers are.
    """
    frames = {name: pd.DataFrame(of).T.astype(float) for name, of in panels.items()}
    rows, columns = next(iter(frames.values())).shape
    size = 2 + len(frames) * (0.6 + 0.6 * columns), 1.6 + 0.3 * rows
    figure, axes = subplots(1, len(frames), title, sharey=True, size=size)
    limits = np.nanpercentile([frame.to_numpy() for frame in frames.values()], (0, 100))
    for axis, (name, frame) in zip(axes[0], frames.items(), strict=True):
        image = axis.imshow(frame, aspect="auto", vmin=limits[0], vmax=limits[1])
        for (row, column), value in np.ndenumerate(frame.to_numpy()):
            shown = "–" if np.isnan(value) else f"{value:.1f}"
            colour = "white" if value < limits.mean() else "black"
            style = {"ha": "center", "va": "center", "fontsize": 7, "color": colour}
            axis.text(column, row, shown, **style)
        axis.set_xticks(range(columns), frame.columns)
        axis.set_yticks(range(rows), frame.index)
        axis.set(title=name, xlabel=xlabel)
        axis.grid(visible=False)
    figure.colorbar(image, ax=axes[0, -1], label=label)
    save(figure, path)


def steps(path, panels, names, title):
    """Draws outcomes of a list of variants, with those of a paper below.

    Args:
        path, title: See `curves`.
        panels: Dict from the title of a panel to a dict from a label, which has an axis
            of its own, to a list with `results.mean_and_std` or `None` per variant.
        names: Names of the variants, from top to bottom.
    """
    labels = list(next(iter(panels.values())))
    size = 3 + 2.2 * len(panels), 1 + len(labels) * (0.8 + 0.25 * len(names))
    shape = len(labels), len(panels)
    figure, axes = subplots(*shape, title, sharey=True, size=size, sharex=False)
    for column, (name, values_of) in zip(axes.T, panels.items(), strict=True):
        for axis, label in zip(column, labels):
            found = {i: v for i, v in enumerate(values_of[label]) if v is not None}
            means = [value["mean"] for value in found.values()]
            deviations = [value["std"] or 0.0 for value in found.values()]
            colour = COLOUR_OF["cbn"] if label == labels[0] else "gray"
            style = {"fmt": "o", "capsize": 3, "color": colour}
            axis.errorbar(means, [*found], xerr=deviations, **style)
            axis.set_xlabel(label)
        column[0].set_title(name)
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    save(figure, path)


def _colours(panels):
    """The colours of the labels of all panels, which are dicts."""
    return colours(list(dict.fromkeys(itertools.chain(*panels))))


def _by_epoch(path, rows, columns, draw, ylabels, title, sharey="row"):
    """Draws `draw(axis, row, column)` for each row and column, against the epoch."""
    figure, axes = subplots(len(rows), len(columns), title, sharey)
    for of_row, row, ylabel in zip(axes, rows, ylabels, strict=True):
        for axis, column in zip(of_row, columns, strict=True):
            draw(axis, row, column)
        of_row[0].set_ylabel(ylabel)
    for top, bottom, column in zip(axes[0], axes[-1], columns, strict=True):
        top.set_title(column)
        bottom.set_xlabel("epoch")
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, axes)
    save(figure, path)


def subplots(rows, columns, title, sharey, size=None, sharex=True):
    """A figure of fitting size, and its axes, an array `(rows, columns)`."""
    size = size or (1.4 + 2.5 * columns, 1.2 + 2.1 * rows)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def legend(figure, axes):
    """Puts one legend, of the labels of all axes, beside them."""
    found = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside right upper")


def save(figure, path):
    """Writes the figure, whole or not at all."""
    for axis in figure.axes:
        low, high = axis.get_ylim()
        if axis.get_yscale() == "log" and high / low < 1000:  # few powers of ten
            subs = (1, 2, 3, 5, 7) if high / low < 10 else (1, 2, 5)
            axis.yaxis.set_major_locator(LogLocator(subs=subs))
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
    files.write(path, lambda temporary: figure.savefig(temporary, dpi=120))


def _curve(axis, runs, key, label, colour, **style):
    lines = [{epoch: line.get(key) for epoch, line in enumerate(run)} for run in runs]
    # A diverged run ends with NaN.
    values = pd.DataFrame(lines, dtype=float).dropna(axis=1, how="all")
    if values.empty:
        return
    x, name = np.arange(1, values.shape[1] + 1), name_of(label)
    axis.plot(x, values.mean(), color=colour, label=name, **style)
    axis.fill_between(x, values.min(), values.max(), color=colour, alpha=0.2, lw=0)
