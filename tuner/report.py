"""What a search found: tuner_results.json, a table, and pictures."""

import dataclasses
import shlex

import numpy as np
import pandas as pd
from matplotlib.ticker import NullLocator

from recipes.engine import classifier, figures, files
from recipes.engine import results as tables
from recipes.engine.data import stem
from tuner import ranges, trials

COLOUR = figures.COLOUR_OF["cbn"]


def results(oracle, settings, seeds):
    """The outcome of a search so far.

    Returns:
        Dict of `trials`, a list in the order of their start, each a dict of `trial`,
        its `status`, its `values`, the `accuracies` of its seeds, their `accuracy` as
        `recipes.engine.results.mean_and_std` or `None`, and `epochs`; the counts
        `finished` and `failed`; and `best`, one of the trials or `None`.
    """
    rows = [_row(oracle.trials[key], seeds) for key in oracle.start_order]
    finished = [row for row in rows if row["accuracy"] is not None]
    return {
        "measured_on": "validation" if settings.validation_size else "test",
        "finished": len(finished),
        "failed": sum(row["status"] == "FAILED" for row in rows),
        "best": max(finished, key=_order, default=None),
        "trials": rows,
    }


def _order(row):
    """By accuracy, of those that trained longest: halving ends the others early."""
    return (row["epochs"], row["accuracy"]["mean"]) if row["accuracy"] else (0, 0)


def _row(trial, seeds):
    values = trial.hyperparameters.values
    row = {
        "trial": trial.trial_id,
        "status": trial.status,
        "values": {key: value for key, value in values.items() if "/" not in key},
    }
    if trial.status != "COMPLETED":
        return row | dict.fromkeys(("accuracies", "accuracy", "epochs"))
    last = trial.metrics.get_last_value
    accuracies = [float(last(f"accuracy_{seed}")) for seed in range(seeds)]
    row |= {"accuracies": accuracies, "accuracy": tables.mean_and_std(accuracies)}
    return row | {"epochs": int(last("epochs"))}


def command(settings, values):
    """The command that trains the network of these hyperparameters on all images."""
    changes = trials.changes(values) | {"validation_size": None}
    settings = dataclasses.replace(settings, **changes)
    usual = classifier.Training(dataset=settings.dataset)
    given = settings.config() | {"data_dir": settings.data_dir}
    flags = [
        f"--{key}={trials.exact(value)}"
        for key, value in given.items()
        if (key in settings.NAMED or value != getattr(usual, key))
        and key not in ("backend", "seed")
        and value is not None
    ]
    backend = settings.backend
    prefix = "" if backend == "tensorflow" else f"KERAS_BACKEND={backend} "
    return f"{prefix}python -m recipes.train {shlex.join(flags)}"


def table(found, names):
    """What `results` returned as Markdown, the best trials first."""
    lines = []
    for row in sorted(found["trials"], key=_order, reverse=True):
        values = [f"{row['values'][name]:.4g}" for name in names]
        lines.append([row["trial"], *values, _percent(row), row["epochs"] or ""])
    header = ["trial", *names, f"{found['measured_on']} accuracy, %", "epochs"]
    return tables.markdown(header, lines)


def _percent(row):
    if row["accuracy"] is None:
        return "diverged" if row["status"] == "FAILED" else "not finished"
    return tables.spread(row["accuracy"], 2, 100)


def progress(row, done, total, best):
    """A line for a trial that ended."""
    values = " ".join(f"{key}={value:.4g}" for key, value in row["values"].items())
    so_far = f", best {100 * best:.2f} %" if best is not None else ""
    of = f"{done}/{total}" if total else f"{done}"
    unit = " %" if row["accuracy"] else ""
    return f"trial {of}: {values}: {_percent(row)}{unit}{so_far}"


def write(directory, found, settings, names):
    """Writes what `results` returned: tuner_results.json, table.md and the pictures.

    Returns:
        The text of the end: the table, and the best setting as a command.
    """
    best = found["best"]
    line = command(settings, best["values"]) if best else None
    shared = {key: value for key, value in settings.config().items() if key != "seed"}
    outcome = {"settings": shared, "hyperparameters": names, "command": line, **found}
    files.write_json(directory / "tuner_results.json", outcome)
    text = table(found, names)
    files.write_text(directory / "table.md", text)
    if best:
        named = stem(settings.dataset), settings.model, settings.norm
        title = ", ".join([*named, settings.activation])
        ylabel = f"{found['measured_on']} accuracy (%)"
        rows = _frame(found)
        _over(directory / "accuracy.png", rows, names, ylabel, title)
        _parallel(directory / "parallel.png", rows, names, ylabel, title)
        _best_so_far(directory / "best_so_far.png", rows, ylabel, title)
        text += f"\nBest setting:\n\n    {line}\n"
    text += f"\nEverything is in {directory}\n"
    files.write_text(directory / "report.txt", text)
    return text


def _frame(found):
    """The trials, numbered from 1, with columns of their values and scores in %."""
    rows = pd.DataFrame([row | row["values"] for row in found["trials"]])
    rows.index += 1
    scores = rows["accuracies"].dropna()
    scores = 100 * pd.DataFrame(scores.tolist(), index=scores.index)
    return rows.join(scores.agg(["mean", "min", "max"], axis=1))


def _figure(columns, width, title):
    size = columns * width, 3.8
    figure, axes = figures.subplots(1, columns, title, False, size, sharex=False)
    return figure, axes[0]


def _log(name):
    return ranges.RANGES["rho" if name.startswith("rho_") else name].log


def _over(path, rows, names, ylabel, title):
    """Accuracy over each hyperparameter, and over the first two of them at once."""
    rows = rows.dropna(subset="mean")
    pair = names[:2] if len(names) > 1 else []
    figure, axes = _figure(len(names) + bool(pair), 3.4, title)
    spans = [rows["mean"] - rows["min"], rows["max"] - rows["mean"]]
    whole = rows["epochs"] == rows["epochs"].max()
    kinds = [(rows[whole], COLOUR, "all epochs")]
    kinds += [(rows[~whole], "white", "ended early")] * (not whole.all())
    for axis, name in zip(axes, names):
        style = {"fmt": "none", "ecolor": COLOUR, "capsize": 2, "alpha": 0.5}
        axis.errorbar(rows[name], rows["mean"], spans, **style)
        for some, inside, label in kinds:
            style = {"ms": 5, "color": COLOUR, "mfc": inside, "label": label}
            axis.plot(some[name], some["mean"], "o", **style)
        axis.set(xlabel=name, ylabel=ylabel)
        _scale(axis, name)
    if len(kinds) > 1:
        axes[0].legend()
    if pair:
        style = {"cmap": "viridis", "s": 60, "edgecolors": "black"}
        points = axes[-1].scatter(*pair, c="mean", data=rows, **style)
        figure.colorbar(points, ax=axes[-1], label=ylabel)
        axes[-1].set(xlabel=pair[0], ylabel=pair[1])
        _scale(axes[-1], pair[0])
        if _log(pair[1]):
            axes[-1].set_yscale("log")
    figures.save(figure, path)


def _scale(axis, name):
    if name.startswith("rho"):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranges.POWERS, [f"{tick:g}" for tick in ranges.POWERS])
        axis.xaxis.set_minor_locator(NullLocator())
    elif _log(name):
        axis.set_xscale("log")


def _parallel(path, rows, names, ylabel, title):
    """A line for each trial, the best one thick, across an axis for each column."""
    figure, (axis,) = _figure(1, 2.5 + 1.8 * len(names), title)
    rows = rows.dropna(subset="mean").sort_values("mean", kind="stable")
    rows = rows[[*names, "mean"]]
    heights = rows.assign(**{name: np.log(rows[name]) for name in names if _log(name)})
    heights -= heights.min()
    heights = (heights / heights.max()).fillna(0.5)  # where all are the same
    axis.set_prop_cycle(color=list(figures.shades(rows.index).values()))
    axis.plot(heights.to_numpy().T, lw=1)[-1].set_linewidth(2.5)
    for place, name in enumerate(rows):
        axis.axvline(place, color="black", lw=0.8)
        axis.text(place, -0.07, f"{rows[name].min():.3g}", ha="center")
        axis.text(place, 1.03, f"{rows[name].max():.3g}", ha="center")
    axis.set_xticks(range(len(names) + 1), [*names, ylabel])
    axis.set(ylim=(-0.12, 1.12), yticks=[])
    figures.save(figure, path)


def _best_so_far(path, rows, ylabel, title):
    """Each trial in the order of the search, and the best of those before."""
    figure, (axis,) = _figure(1, 6, title)
    means = rows["mean"].dropna()
    axis.plot(means, "o", color="gray", ms=4, label="trial")
    axis.step(means.index, means.cummax(), where="post", color=COLOUR, label="best")
    failed = rows.index[rows["status"] == "FAILED"]
    if len(failed):
        low = [means.min()] * len(failed)
        axis.plot(failed, low, "x", color=figures.COLOURS[0], label="diverged")
    axis.set(xlabel="trial", ylabel=ylabel)
    axis.legend()
    figures.save(figure, path)
