"""The pictures of Santurkar et al.: bands, curves and histograms over the steps."""

import matplotlib
import numpy as np

from recipes import figures

REFERENCE = "none"
COLOUR_OF = figures.COLOUR_OF | {"none": "#999999"}  # the others' background


def training(path, metrics, rows, title):
    """Draws values over the steps of training, each in a panel, a curve for each norm.

    Args:
        path: Where the PNG goes.
        metrics: Dict from a norm to the lines of its metrics.jsonl.
        rows: List of a key in the lines, its label with the unit, and a dict of
            settings of the axes.
        title: Of the picture.
    """
    figure, axes = figures.subplots(1, len(rows), title, sharey=False)
    figure.set_size_inches(4.2 + 2.8 * len(rows), 3.4)
    for axis, (key, label, settings) in zip(axes[0], rows):
        for norm, lines in metrics.items():
            if any(line.get(key) is not None for line in lines):
                axis.plot(*_series(lines, key), **_style(norm))
        axis.set(xlabel="step", ylabel=label, **settings)
    figures.legend(figure, axes)
    figures.save(figure, path)


def bands(path, metrics, columns, title):
    """Draws the band or curve of each norm over the steps, beside that of no norm.

    Args:
        path, metrics, title: See `training`.
        columns: List of the key of a curve, or the keys of a band's lower and upper
            edge, the label with the unit, and a dict of settings of the axes.
    """
    others = [norm for norm in metrics if norm != REFERENCE] or list(metrics)
    figure, axes = figures.subplots(len(others), len(columns), title, sharey="col")
    for row, other in zip(axes, others):
        shown = [norm for norm in (REFERENCE, other) if norm in metrics]
        for axis, (keys, label, settings) in zip(row, columns):
            for norm in dict.fromkeys(shown):
                _band(axis, metrics[norm], keys, norm)
            axis.set(ylabel=label, **settings)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figures.legend(figure, axes)
    figures.save(figure, path)


def _band(axis, lines, keys, norm):
    if isinstance(keys, str):
        axis.plot(*_series(lines, keys), **_style(norm))
        return
    (steps, low), (_, high) = (_series(lines, key) for key in keys)
    style = _style(norm)
    axis.fill_between(steps, low, high, alpha=0.45, lw=0, **style)
    edge = {"color": style["color"], "lw": 0.6}
    axis.plot(steps, low, **edge)
    axis.plot(steps, high, **edge)


def predictiveness(path, metrics, title, thirds=3):
    """Draws how far the gradient has changed a distance along it (Figure 10).

    Args:
        path, metrics, title: See `training`; the lines have `step_lengths` and
            `gradient_distances`.
        thirds: Integer, training is cut in so many parts, with a panel of means each.
    """
    figure, axes = figures.subplots(1, thirds, title, sharey=True)
    for norm, lines in metrics.items():
        for part, axis in enumerate(axes[0]):
            low, high = (len(lines) * i // thirds for i in (part, part + 1))
            some = lines[low:high]
            if not some:
                continue
            distances = [floats(line["gradient_distances"]) for line in some]
            axis.plot(
                some[0]["step_lengths"], _mean(distances), marker=".", **_style(norm)
            )
            first, last = some[0]["step"], some[-1]["step"]
            axis.set(title=f"steps {first} to {last}", xlabel="step length s")
    axes[0, 0].set(ylabel="|grad L(W - s g) - g|", yscale="log")
    figures.legend(figure, axes)
    figures.save(figure, path)


def by_layer(path, metrics, layers, columns, title):
    """Draws values of layers: a row a layer, a column a value, a curve for each norm.

    Args:
        path, metrics, title: See `training`. The lines have `<layer>_<key>`.
        layers: List of names.
        columns: List of a key, its label with the unit, and a dict of settings.
    """
    figure, axes = figures.subplots(len(layers), len(columns), title, sharey="col")
    for row, layer in zip(axes, layers):
        for axis, (key, label, settings) in zip(row, columns):
            for norm, lines in metrics.items():
                axis.plot(*_series(lines, f"{layer}_{key}"), **_style(norm), lw=1)
            axis.set(**settings)
            axis.set_title(label)
        row[0].set_ylabel(layer)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figures.legend(figure, axes)
    figures.save(figure, path)


def histograms(path, metrics, layers, title, shown=8):
    """Draws the histograms of activations through training, one above the other.

    Args:
        path, metrics, title: See `training`. The lines have `<layer>_histogram`, counts
            in equal bins, and `<layer>_edges`, the lowest and the highest edge.
        layers: List of names.
        shown: Integer, so many moments of training.
    """
    figure, axes = figures.subplots(len(layers), len(metrics), title, sharey=True)
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, shown))
    for column, (norm, lines) in enumerate(metrics.items()):
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
        height = 1.6 * counts / max(counts.max(), 1)
        base = len(lines) - place
        axis.stairs(
            base + height, edges, baseline=base, color=colour, fill=True, alpha=0.75
        )


def _style(norm):
    return {
        "color": COLOUR_OF.get(norm, "#000000"),
        "label": figures.NAME_OF.get(norm, norm),
    }


def _series(lines, key):
    return [line["step"] for line in lines], floats(line[key] for line in lines)


def median(lines, key):
    """The median of a value over the lines that have it; `None` if none has."""
    return middle(floats(line.get(key) for line in lines))


def middle(values):
    """The median of what is finite in an array; `None` if nothing is."""
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else None


def largest(values):
    """The largest of what is finite in an array; `None` if nothing is."""
    values = values[np.isfinite(values)]
    return float(values.max()) if values.size else None


def floats(values):
    """An array of numbers, `nan` in place of `None`."""
    return np.array([np.nan if value is None else value for value in values], "float64")


def _mean(rows):
    rows = np.array(rows)
    found = ~np.isnan(rows)
    return np.where(found, rows, 0).sum(0) / np.maximum(found.sum(0), 1)
