"""What a search found: tuner_results.json, a table, and pictures."""

import dataclasses

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from recipes.engine import classifier, figures, files
from recipes.engine import results as tables
from recipes.engine.data import stem
from tuner import spaces, trials

COLOUR = figures.COLOUR_OF["cbn"]


def results(oracle, settings, seeds):
    """The outcome of a search so far.

    Args:
        oracle: One of `tuner.oracles`.
        settings: The `recipes.engine.classifier.Saved` that all trials share.
        seeds: Integer, of each trial.

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
        # Of those that trained longest: halving ends the others early.
        "best": max(
            finished, key=lambda r: (r["epochs"], r["accuracy"]["mean"]), default=None
        ),
        "trials": rows,
    }


def _row(trial, seeds):
    values = trial.hyperparameters.values
    accuracies, epochs = None, None
    if trial.status == "COMPLETED":
        keys = [f"accuracy_{seed}" for seed in range(seeds)]
        accuracies = [trial.metrics.get_last_value(key) for key in keys]
        accuracies = [float(value) for value in accuracies]
        epochs = int(trial.metrics.get_last_value("epochs"))
    return {
        "trial": trial.trial_id,
        "status": trial.status,
        "values": {key: value for key, value in values.items() if "/" not in key},
        "accuracies": accuracies,
        "accuracy": accuracies and tables.mean_and_std(accuracies),
        "epochs": epochs,
    }


def command(settings, values):
    """The command that trains the network of these hyperparameters on all images."""
    changes = trials.changes(values) | {"validation_size": None}
    settings = dataclasses.replace(settings, **changes)
    usual = classifier.Training(dataset=settings.dataset)
    given = [
        (key, value)
        for key, value in settings.config().items()
        if key in settings.NAMED or value != getattr(usual, key)
    ] + [("data_dir", settings.data_dir)]
    flags = [
        f"--{key}={value:g}" if isinstance(value, float) else f"--{key}={value}"
        for key, value in given
        if key not in ("backend", "seed") and value is not None
    ]
    prefix = f"KERAS_BACKEND={settings.backend} "
    prefix = "" if settings.backend == "tensorflow" else prefix
    return f"{prefix}python -m recipes.train {' '.join(flags)}"


def table(found, names):
    """Returns the trials as Markdown, the best ones first.

    Args:
        found: What `results` returned.
        names: List of the hyperparameters.
    """

    def order(row):
        score = row["accuracy"]
        return (-row["epochs"], -score["mean"]) if score else (0, 0)

    lines = [
        [
            row["trial"],
            *(f"{row['values'][name]:.4g}" for name in names),
            _percent(row),
            row["epochs"] or "",
        ]
        for row in sorted(found["trials"], key=order)
    ]
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
    """Writes tuner_results.json, table.md and the pictures.

    Args:
        directory: `pathlib.Path` of the search.
        found: What `results` returned.
        settings: The `recipes.engine.classifier.Saved` that all trials share.
        names: List of the hyperparameters.

    Returns:
        The text of the end: the table, and the best setting as a command.
    """
    best = found["best"]
    line = command(settings, best["values"]) if best else None
    shared = {key: value for key, value in settings.config().items() if key != "seed"}
    files.write_json(
        directory / "tuner_results.json",
        {"settings": shared, "hyperparameters": names, "command": line, **found},
    )
    text = table(found, names)
    files.write(directory / "table.md", lambda path: path.write_text(text))
    if best:
        title = f"{stem(settings.dataset)}, {settings.model}, "
        title += f"{settings.norm}, {settings.activation}"
        ylabel = f"{found['measured_on']} accuracy (%)"
        rows = [row for row in found["trials"] if row["accuracy"]]
        _over(directory / "accuracy.png", rows, names, ylabel, title)
        _parallel(directory / "parallel.png", rows, names, ylabel, title)
        _best_so_far(directory / "best_so_far.png", found["trials"], ylabel, title)
        text += f"\nBest setting:\n\n    {line}\n"
    text += f"\nEverything is in {directory}\n"
    files.write(directory / "report.txt", lambda path: path.write_text(text))
    return text


def _figure(columns, width, title):
    figure = Figure(figsize=(columns * width, 3.8), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def _mean(row):
    return 100 * row["accuracy"]["mean"]


def _log(name):
    return spaces.RANGES["rho" if name.startswith("rho_") else name].log


def _over(path, rows, names, ylabel, title):
    """Accuracy over each hyperparameter, and over the first two of them at once."""
    pair = names[:2] if len(names) > 1 else []
    figure, axes = _figure(len(names) + bool(pair), 3.4, title)
    means = [_mean(row) for row in rows]
    spans = [
        [mean - 100 * min(row["accuracies"]) for mean, row in zip(means, rows)],
        [100 * max(row["accuracies"]) - mean for mean, row in zip(means, rows)],
    ]
    epochs = max(row["epochs"] for row in rows)
    for axis, name in zip(axes, names):
        x = [row["values"][name] for row in rows]
        axis.errorbar(x, means, spans, fmt="none", ecolor=COLOUR, capsize=2, alpha=0.5)
        for whole in (True, False):
            chosen = [
                i for i, row in enumerate(rows) if (row["epochs"] == epochs) == whole
            ]
            axis.plot(
                [x[i] for i in chosen],
                [means[i] for i in chosen],
                "o",
                ms=5,
                color=COLOUR,
                mfc=COLOUR if whole else "white",
                label="all epochs" if whole else "ended early",
            )
        axis.set(xlabel=name, ylabel=ylabel)
        _scale(axis, name)
    if min(row["epochs"] for row in rows) < epochs:
        axes[0].legend()
    if pair:
        axis = axes[-1]
        x, y = ([row["values"][name] for row in rows] for name in pair)
        points = axis.scatter(x, y, c=means, cmap="viridis", s=60, edgecolors="black")
        figure.colorbar(points, ax=axis, label=ylabel)
        axis.set(xlabel=pair[0], ylabel=pair[1])
        _scale(axis, pair[0])
        if _log(pair[1]):
            axis.set_yscale("log")
    figures.save(figure, path)


def _scale(axis, name):
    if not _log(name):
        return
    if name.startswith("rho"):
        axis.set_xscale("log", base=2)
        ticks = spaces.POWERS
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
    else:
        axis.set_xscale("log")


def _parallel(path, rows, names, ylabel, title):
    """A line for each trial, across an axis for each hyperparameter."""
    figure, (axis,) = _figure(1, 2.5 + 1.8 * len(names), title)
    columns = [
        ([row["values"][name] for row in rows], name, _log(name)) for name in names
    ]
    columns.append(([_mean(row) for row in rows], ylabel, False))
    heights = np.transpose([_heights(values, log) for values, _, log in columns])
    shade = figures.shades(range(len(rows)))
    order = sorted(range(len(rows)), key=lambda i: _mean(rows[i]))
    for rank, i in enumerate(order):
        width = 2.5 if rank == len(rows) - 1 else 1
        axis.plot(heights[i], color=shade[rank], lw=width)
    for place, (values, _, _) in enumerate(columns):
        axis.axvline(place, color="black", lw=0.8)
        for value, y in ((min(values), -0.07), (max(values), 1.03)):
            axis.text(place, y, f"{value:.3g}", ha="center")
    axis.set_xticks(range(len(columns)), [name for _, name, _ in columns])
    axis.set(ylim=(-0.12, 1.12), yticks=[])
    figures.save(figure, path)


def _heights(values, log):
    values = np.log(values) if log else np.array(values)
    span = values.max() - values.min()
    return (values - values.min()) / span if span else np.full(len(values), 0.5)


def _best_so_far(path, rows, ylabel, title):
    """Each trial in the order of the search, and the best of those before."""
    figure, (axis,) = _figure(1, 6, title)
    done = [(i, _mean(row)) for i, row in enumerate(rows, 1) if row["accuracy"]]
    x, means = zip(*done)
    axis.plot(x, means, "o", color="gray", ms=4, label="trial")
    axis.step(x, np.maximum.accumulate(means), where="post", color=COLOUR, label="best")
    failed = [i for i, row in enumerate(rows, 1) if row["status"] == "FAILED"]
    if failed:
        low = [min(means)] * len(failed)
        axis.plot(failed, low, "x", color=figures.COLOURS[0], label="diverged")
    axis.set(xlabel="trial", ylabel=ylabel)
    axis.legend()
    figures.save(figure, path)
