"""The pictures of Santurkar et al.: bands, curves and histograms over the steps.

`runs` is a dict from a norm to its runs, each the data frame of `_numbers.lines`.
"""

import numpy as np
import pandas as pd

from recipes.engine import figures

LOG = {"yscale": "log"}


def training(path, runs, settings, *scores):
    """Draws losses and accuracies over the steps, a curve for each run."""
    label_of = {
        "train_loss": (f"training loss ({settings.unit()})", LOG),
        "train_accuracy": ("training accuracy", {"ylim": (0, 1)}),
        "test_accuracy": ("test accuracy", {"ylim": (0, 1)}),
    }
    columns = [(key, *label_of[key]) for key in scores]
    size = (4.2 + 2.8 * len(scores), 3.4)
    _draw(path, [(runs, columns)], settings.about(), size)


def bands(path, runs, columns, title):
    """Draws values of each norm over the steps, beside those of no norm.

    `columns` is a list of the key of a curve, or a list of those of a band's lower and
    upper edge, with the label with the unit, and a dict of settings of the axes.
    """
    others = [norm for norm in runs if norm != "none"] or list(runs)
    rows = []
    for other in others:
        shown = {norm: runs[norm] for norm in ("none", other) if norm in runs}
        rows.append((shown, columns))
    _draw(path, rows, title)


def by_layer(path, runs, layers, columns, title):
    """Draws values of layers, a row each: see `bands`, the keys are `<layer>_<key>`."""
    rows = []
    for layer in layers:
        own = [
            (f"{layer}_{key}", "", {"title": label} | of) for key, label, of in columns
        ]
        rows.append((runs, own))
    _draw(path, rows, title, names=layers)


def _draw(path, rows, title, size=None, names=()):
    figure, axes = figures.subplots(len(rows), len(rows[0][1]), title, sharey="col")
    if size:
        figure.set_size_inches(size)
    for of_row, (runs, columns) in zip(axes, rows):
        for axis, (keys, label, settings) in zip(of_row, columns):
            for norm, of_norm in runs.items():
                for lines in of_norm:
                    _curve(axis, lines, keys, _style(norm))
            axis.set(ylabel=label, **settings)
    for axis, name in zip(axes[:, 0], names):
        axis.set_ylabel(name)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figures.legend(figure, axes)
    figures.save(figure, path)


def _curve(axis, lines, keys, style):
    steps, values = lines["step"], lines[keys]
    if np.isnan(values).all(axis=None):
        return
    if isinstance(keys, str):
        axis.plot(steps, values, **style, lw=1)
    else:
        axis.fill_between(steps, *values.T.to_numpy(), alpha=0.45, lw=0, **style)
        axis.plot(steps, values, color=style["color"], lw=0.6)


def predictiveness(path, runs, title):
    """Draws how far the gradient has changed a distance along it (Figure 10).

    There is a panel for each third of training, with the means over its lines.
    """
    figure, axes = figures.subplots(1, 3, title, sharey=True)
    for norm, of_norm in runs.items():
        for part, axis in enumerate(axes[0]):
            some = pd.concat(
                lines[len(lines) * part // 3 : len(lines) * (part + 1) // 3]
                for lines in of_norm
            )
            if some.empty:
                continue
            distances = pd.DataFrame([*some["gradient_distances"]], dtype=float)
            lengths = some["step_lengths"].iloc[0]
            axis.plot(lengths, distances.mean(), marker=".", **_style(norm))
            first, last = some["step"].iloc[[0, -1]]
            axis.set(title=f"steps {first} to {last}", xlabel="step length s")
    axes[0, 0].set(ylabel="|grad L(W - s g) - g|", yscale="log")
    figures.legend(figure, axes)
    figures.save(figure, path)


def histograms(path, runs, layers, title, shown=8):
    """Draws the histograms of activations through training, one above the other.

    Of the first run of each norm, so many moments are `shown`. `<layer>_histogram` are
    counts in equal bins, and `<layer>_edges` the lowest and the highest edge of these.
    """
    figure, axes = figures.subplots(len(layers), len(runs), title, sharey=True)
    for column, (norm, (lines, *_)) in zip(axes.T, runs.items()):
        places = np.linspace(0, len(lines) - 1, min(shown, len(lines))).astype(int)
        for axis, layer in zip(column, layers):
            some = lines[[f"{layer}_histogram", f"{layer}_edges"]].iloc[places]
            _ridges(axis, some.to_numpy(), figures.shades(range(shown)))
            axis.set_yticks([])
            axis.grid(False)
        column[0].set_title(figures.NAME_OF.get(norm, norm))
        column[-1].set_xlabel("activation")
    for axis, layer in zip(axes[:, 0], layers):
        axis.set_ylabel(f"{layer}\nlater steps below")
    figures.save(figure, path)


def _ridges(axis, rows, colour_of):
    for place, (counts, ends) in enumerate(rows):
        if not isinstance(counts, list):
            continue  # the activations were not finite
        base, edges = len(rows) - place, np.linspace(*ends, len(counts) + 1)
        height = base + 1.6 * np.array(counts) / max(counts)
        style = {"color": colour_of[place], "fill": True, "alpha": 0.75}
        axis.stairs(height, edges, baseline=base, **style)


def _style(norm):
    # The curve of no norm is the others' background.
    colour = "#999999" if norm == "none" else figures.COLOUR_OF.get(norm, "#000000")
    return {"color": colour, "label": figures.NAME_OF.get(norm, norm)}
