"""The pictures of Santurkar et al.: bands, curves and histograms over the steps.

`runs` is a dict from a norm to its runs, each a list of the lines of metrics.jsonl.
"""

import matplotlib
import numpy as np

from recipes.engine import figures
from recipes.smoothness._numbers import floats

REFERENCE = "none"
COLOUR_OF = figures.COLOUR_OF | {"none": "#999999"}  # the others' background
LOG = {"yscale": "log"}


def training(path, runs, panels, title):
    """Draws values over the steps of training, each in a panel, a curve for each run.

    Args:
        path: Where the PNG goes.
        runs: See above.
        panels: List of a key in the lines, its label with the unit, and a dict of
            settings of the axes.
        title: Of the picture.
    """
    figure, axes = figures.subplots(1, len(panels), title, sharey=False)
    figure.set_size_inches(4.2 + 2.8 * len(panels), 3.4)
    for axis, (key, label, settings) in zip(axes[0], panels):
        for norm, lines in _each(runs):
            if any(line.get(key) is not None for line in lines):
                axis.plot(*_series(lines, key), **_style(norm))
        axis.set(xlabel="step", ylabel=label, **settings)
    figures.legend(figure, axes)
    figures.save(figure, path)


def bands(path, runs, columns, title):
    """Draws the band or curve of each norm over the steps, beside that of no norm.

    Args:
        path, runs, title: See `training`.
        columns: List of the key of a curve, or the keys of a band's lower and upper
            edge, the label with the unit, and a dict of settings of the axes.
    """
    others = [norm for norm in runs if norm != REFERENCE] or list(runs)
    figure, axes = figures.subplots(len(others), len(columns), title, sharey="col")
    for row, other in zip(axes, others):
        shown = {norm: runs[norm] for norm in (REFERENCE, other) if norm in runs}
        for axis, (keys, label, settings) in zip(row, columns):
            for norm, lines in _each(shown):
                _band(axis, lines, keys, norm)
            axis.set(ylabel=label, **settings)
    _finish(path, figure, axes)


def _band(axis, lines, keys, norm):
    if isinstance(keys, str):
        axis.plot(*_series(lines, keys), **_style(norm))
        return
    (steps, low), (_, high) = (_series(lines, key) for key in keys)
    style = _style(norm)
    axis.fill_between(steps, low, high, alpha=0.45, lw=0, **style)
    for edge in (low, high):
        axis.plot(steps, edge, color=style["color"], lw=0.6)


def predictiveness(path, runs, title, thirds=3):
    """Draws how far the gradient has changed a distance along it (Figure 10).

    Args:
        path, runs, title: See `training`; the lines have `step_lengths` and
            `gradient_distances`.
        thirds: Integer, training is cut in so many parts, with a panel of means each.
    """
    figure, axes = figures.subplots(1, thirds, title, sharey=True)
    for norm, of_norm in runs.items():
        for part, axis in enumerate(axes[0]):
            some = []
            for lines in of_norm:
                low, high = (len(lines) * i // thirds for i in (part, part + 1))
                some += lines[low:high]
            if not some:
                continue
            distances = _mean([floats(line["gradient_distances"]) for line in some])
            axis.plot(some[0]["step_lengths"], distances, marker=".", **_style(norm))
            first, last = some[0]["step"], some[-1]["step"]
            axis.set(title=f"steps {first} to {last}", xlabel="step length s")
    axes[0, 0].set(ylabel="|grad L(W - s g) - g|", yscale="log")
    figures.legend(figure, axes)
    figures.save(figure, path)


def by_layer(path, runs, layers, columns, title):
    """Draws values of layers: a row a layer, a column a value, a curve for each run.

    Args:
        path, runs, title: See `training`. The lines have `<layer>_<key>`.
        layers: List of names.
        columns: List of a key, its label with the unit, and a dict of settings.
    """
    figure, axes = figures.subplots(len(layers), len(columns), title, sharey="col")
    for row, layer in zip(axes, layers):
        for axis, (key, label, settings) in zip(row, columns):
            for norm, lines in _each(runs):
                axis.plot(*_series(lines, f"{layer}_{key}"), **_style(norm), lw=1)
            axis.set(**settings)
            axis.set_title(label)
        row[0].set_ylabel(layer)
    _finish(path, figure, axes)


def histograms(path, runs, layers, title, shown=8):
    """Draws the histograms of activations through training, one above the other.

    Args:
        path, title: See `training`.
        runs: As there, of which the first of each norm is drawn. The lines have
            `<layer>_histogram`, counts in equal bins, and `<layer>_edges`, the lowest
            and the highest edge.
        layers: List of names.
        shown: Integer, so many moments of training.
    """
    figure, axes = figures.subplots(len(layers), len(runs), title, sharey=True)
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, shown))
    for column, (norm, (lines, *_)) in enumerate(runs.items()):
        places = np.linspace(0, len(lines) - 1, min(shown, len(lines))).astype(int)
        for row, layer in enumerate(layers):
            axis = axes[row, column]
            _ridges(axis, [lines[i] for i in places], layer, colours)
            axis.set_yticks([])
            axis.grid(False)
        axes[0, column].set_title(figures.NAME_OF.get(norm, norm))
        axes[-1, column].set_xlabel("activation")
    for row, layer in enumerate(layers):
        axes[row, 0].set_ylabel(f"{layer}\nlater steps below")
    figures.save(figure, path)


def _ridges(axis, lines, layer, colours):
    for place, (line, colour) in enumerate(zip(lines, colours)):
        if line[f"{layer}_histogram"] is None:
            continue
        counts = np.array(line[f"{layer}_histogram"], "float64")
        edges = np.linspace(*line[f"{layer}_edges"], len(counts) + 1)
        base = len(lines) - place
        height = base + 1.6 * counts / max(counts.max(), 1)
        axis.stairs(height, edges, baseline=base, color=colour, fill=True, alpha=0.75)


def _finish(path, figure, axes):
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figures.legend(figure, axes)
    figures.save(figure, path)


def _each(runs):
    return [(norm, lines) for norm, of_norm in runs.items() for lines in of_norm]


def _style(norm):
    return {
        "color": COLOUR_OF.get(norm, "#000000"),
        "label": figures.NAME_OF.get(norm, norm),
    }


def _series(lines, key):
    return [line["step"] for line in lines], floats(line[key] for line in lines)


def _mean(rows):
    rows = np.array(rows)
    found = ~np.isnan(rows)
    return np.where(found, rows, 0).sum(0) / np.maximum(found.sum(0), 1)
