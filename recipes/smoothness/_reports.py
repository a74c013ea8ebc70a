"""Results of runs: numbers over steps and seeds, tables, pictures.

`runs` is a dict from a norm to its runs, each the data frame of `lines`.
"""

import numpy as np
import pandas as pd

from recipes.engine import figures, results, training

SCORES = (*training.SCORES, "recalibrated_test_accuracy")
# Of axes, by the last word of a key. All other axes are logarithmic.
LIMITS = {"accuracy": (0, 1), "cosine": (-1.05, 1.05)}


def lines(outcome):
    """The lines of metrics.jsonl as a data frame, with NaN instead of `None`."""
    return pd.DataFrame(outcome.metrics).where(pd.notna, np.nan).infer_objects()


def runs_of(outcomes, settings):
    """The runs of every norm."""
    return {norm: list(map(lines, outcomes.of(norm=norm))) for norm in settings.norms}


def summary(outcomes):
    """How the runs of one norm trained: two counts, and their scores `over_seeds`."""
    return {
        "diverged": sum(outcome.results["diverged"] for outcome in outcomes),
        "seeds": len(outcomes),
        **over_seeds(outcomes, lambda each: pd.Series(each.results).filter(SCORES)),
    }


def over_seeds(outcomes, of_run):
    """`mean_and_std` of each number that `of_run` computes from an outcome.

    Runs that diverged are left out, unless all did.
    """
    trained = [each for each in outcomes if not each.results["diverged"]]
    found = pd.DataFrame([of_run(outcome) for outcome in trained or outcomes])
    return {key: results.mean_and_std(found[key].dropna()) for key in found}


def medians(outcomes, layer, keys):
    """The medians of `<layer>_<key>` over steps, by key, `over_seeds`."""
    names = {f"{layer}_{key}": key for key in keys}
    return over_seeds(
        outcomes, lambda each: lines(each)[[*names]].median().rename(names)
    )


def table(rows, columns, note):
    """Rows as Markdown, with a note; `columns` is a dict from a key to a title."""
    keys = [key for key in columns if any(row.get(key) for row in rows)]
    rows = [row | {"norm": figures.name_of(row["norm"])} for row in rows]
    cells = [[_cell(row.get(key)) for key in keys] for row in rows]
    return results.markdown([columns[key] for key in keys], cells) + f"\n{note}\n"


def _cell(value):
    if isinstance(value, list):
        return results.epochs(value)
    if isinstance(value, str) or value is None:
        return value or "–"
    deviation = "" if value["std"] is None else f" ± {value['std']:.2g}"
    return f"{value['mean']:.4g}{deviation}"


def training_curves(path, runs, settings, *scores):
    """Draws losses and accuracies over the steps, a curve for each run."""
    label_of = {
        "train_loss": f"training loss ({settings.unit()})",
        "train_accuracy": "training accuracy",
        "test_accuracy": "test accuracy",
    }
    columns = [(label_of[key], key) for key in scores]
    size = (4.2 + 2.8 * len(scores), 3.4)
    _draw(path, [(runs, columns)], settings.about(), size)


def bands(path, runs, columns, title):
    """Draws values of each norm over the steps, beside those without a norm.

    `columns` lists the label with the unit, and the key of a curve, or a list of the
    keys of a band's lower and upper edge.
    """
    others = [norm for norm in runs if norm != "none"] or list(runs)
    shown = [[norm for norm in ("none", other) if norm in runs] for other in others]
    rows = [({norm: runs[norm] for norm in norms}, columns) for norms in shown]
    _draw(path, rows, title)


def by_layer(path, runs, layers, columns, title):
    """Draws values of layers, a row each. See `bands`; the keys are `<layer>_<key>`."""
    rows = [
        (runs, [(label, f"{layer}_{key}") for label, key in columns])
        for layer in layers
    ]
    _draw(path, rows, title, names=layers)


def _draw(path, rows, title, size=None, names=()):
    figure, axes = figures.subplots(len(rows), len(rows[0][1]), title, sharey="col")
    if size:
        figure.set_size_inches(size)
    for of_row, (runs, columns) in zip(axes, rows):
        for axis, (label, keys) in zip(of_row, columns):
            for norm, of_norm in runs.items():
                for each in of_norm:
                    _curve(axis, each, keys, _style(norm))
            limits = LIMITS.get(str(keys).rpartition("_")[2])
            shown = {"ylim": limits} if limits else {"yscale": "log"}
            shown["title" if names else "ylabel"] = label
            axis.set(**shown)
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
    """Draws how much the gradient changes with the distance along it (Figure 10).

    There is a panel for each third of training, with the means over its lines.
    """
    figure, axes = figures.subplots(1, 3, title, sharey=True)
    for norm, of_norm in runs.items():
        for part, axis in enumerate(axes[0]):
            some = pd.concat(
                each[len(each) * part // 3 : len(each) * (part + 1) // 3]
                for each in of_norm
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


def histograms(path, runs, layers, title):
    """Draws histograms of activations during training, one above the other.

    Eight points in time of the first run of each norm are shown. `<layer>_histogram` is
    the counts in equal bins, and `<layer>_edges` the lowest and the highest bin edge.
    """
    figure, axes = figures.subplots(len(layers), len(runs), title, sharey=True)
    for column, (norm, (first, *_)) in zip(axes.T, runs.items()):
        places = np.linspace(0, len(first) - 1, min(8, len(first))).astype(int)
        for axis, layer in zip(column, layers):
            some = first[[f"{layer}_histogram", f"{layer}_edges"]].iloc[places]
            _ridges(axis, some.to_numpy(), figures.shades(range(8)))
            axis.set_yticks([])
            axis.grid(False)
        column[0].set_title(figures.name_of(norm))
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
    colour = figures.COLOUR_OF.get(norm, "#000000")
    return {"color": colour, "label": figures.name_of(norm)}
