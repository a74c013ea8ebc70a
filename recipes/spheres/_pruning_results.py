"""The results of `recipes.spheres.pruning`: a table and a figure."""

import numpy as np
import pandas as pd

from recipes.engine import data, figures, results

METHODS = {"gamma": "smallest gamma", "mean": "small gamma, mean kept"}
METHODS |= {"merge": "and merging"}
LOSS = 0.01  # of accuracy
GONE = {"channels": "channels", "parameters": "weights", "macs": "multiply-accumulates"}
KEYS = {"accuracy": "as pruned", "recalibrated": "statistics recalibrated"}


def by_method(lines):
    """A DataFrame for each method, from the whole network on, by what is removed."""
    lines = pd.DataFrame(lines).sort_values("channels", kind="stable")
    return {name: lines[lines["method"].isin(["whole", name])] for name in METHODS}


def limits(points):
    """One point less than the whole network has, for each of `KEYS`."""
    return {key: points["merge"][key].iloc[0] - LOSS for key in KEYS}


def shares(points):
    """What is removed when a point of accuracy is lost, by method: see `share_at`."""
    return {
        method: {
            key: {gone: share_at(lines, limit, key, gone) for gone in GONE}
            for key, limit in limits(points).items()
        }
        for method, lines in points.items()
    }


def share_at(lines, limit, key, gone):
    """The share, of `GONE`, at which accuracy, of `KEYS`, first falls below a limit.

    Interpolated linearly; that of the last line if no line is below.
    """
    below = np.flatnonzero(lines[key] < limit)
    if not below.size:
        return float(lines[gone].iloc[-1])
    pair = lines.iloc[[below[0], max(below[0] - 1, 0)]]
    return float(np.interp(limit, pair[key], pair[gone]))


def draw(path, points, settings):
    """Draws test accuracy over what is removed: a row for each of `KEYS`."""
    title = f"{data.stem(settings.dataset)}, {settings.model}, {settings.norm}"
    size, columns = (7.2, 5.6), ("channels", "macs")
    figure, axes = figures.subplots(2, 2, title, sharey=True, size=size, sharex="col")
    colour_of = figures.colours(list(METHODS.values()))
    for row, (key, limit) in zip(axes, limits(points).items()):
        for axis, gone in zip(row, columns):
            for method, label in METHODS.items():
                style = {"ms": 3, "color": colour_of[label], "label": label}
                lines = 100 * points[method][[gone, key]]
                axis.plot(lines[gone], lines[key], "o-", **style)
            style = {"color": "black", "ls": "--", "lw": 1, "label": "one point lost"}
            axis.axhline(100 * limit, **style)
            axis.set_ylim(bottom=0)
        row[0].set_ylabel(f"test accuracy (%),\n{KEYS[key]}")
    for axis, gone in zip(axes[-1], columns):
        axis.set_xlabel(f"{GONE[gone]} removed (%)")
    found = axes[0, 0].get_legend_handles_labels()
    figure.legend(*found, loc="outside lower center", ncols=4, fontsize="small")
    figures.save(figure, path)


def table(outcome):
    """What pruning.py writes to results.json, as Markdown."""
    header = ["removed at one point of accuracy lost"]
    header += [f"{text}, {name}" for name in KEYS.values() for text in GONE.values()]
    rows = []
    for method, label in METHODS.items():
        shares = outcome["shares"][method]
        rows.append([label, *(f"{shares[k][gone]:.1%}" for k in KEYS for gone in GONE)])
    names = {"whole": "the whole network", **METHODS}
    points = pd.DataFrame(outcome["points"]).sort_values("level")
    points = pd.concat([points[points["method"] == name] for name in names])
    points["method"] = points["method"].map(names)
    removed = {f"{text} removed": (key, ".1%") for key, text in GONE.items()}
    after = {"recalibrated": ("recalibrated", ".2%")}
    columns = {"method": ("method", ""), "level": ("level", "g"), **removed}
    columns["change of outputs"] = "error", ".1e"
    columns |= {"test accuracy": ("accuracy", ".2%"), **after}
    fast = pd.DataFrame(outcome["speeds"])
    fast["times"] = fast["images_per_second"] / fast["of_whole"]
    speed = {"merging at tolerance": ("level", "g"), **removed, **after}
    speed["images a second"] = "images_per_second", ",.0f"
    speed["times the whole network's"] = "times", ".2f"
    premise = outcome["premise"]
    parts = [
        results.markdown(header, rows),
        formatted(points, columns),
        formatted(fast, speed),
        "Absolute correlation of the outputs of a unit with those of the unit of the "
        f"nearest gamma and beta: {premise['nearest']:.3f}, mean over all units of its "
        f"layer: {premise['all']:.3f}, largest: {premise['most']:.3f}.\n",
    ]
    return "\n".join(parts)


def formatted(lines, columns):
    """A DataFrame as Markdown; `columns` is a dict from a heading to key and format."""
    cells = [lines[key].map(f"{{:{form}}}".format) for key, form in columns.values()]
    return results.markdown(columns, zip(*cells))
