"""What came out of `recipes.spheres.pruning`: a table and a figure."""

from recipes.engine import data, figures, results

METHODS = {
    "gamma": "smallest gamma",
    "mean": "small gamma, mean kept",
    "merge": "and merging",
}
LOSS = 0.01  # of accuracy
GONE = {
    "channels": "channels",
    "parameters": "weights",
    "macs": "multiply-accumulates",
}
KEYS = {"accuracy": "as pruned", "recalibrated": "statistics recalibrated"}


def by_method(lines):
    """The lines of each method after that of the whole network, by what is gone.

    Args:
        lines: Of metrics.jsonl, see `point` in pruning.py.

    Returns:
        Dict of lists.
    """
    (whole,) = [line for line in lines if line["method"] == "whole"]
    found = {}
    for method in METHODS:
        own = [line for line in lines if line["method"] == method]
        found[method] = [whole, *sorted(own, key=lambda line: line["level"])]
    return found


def limits(points):
    """One point less than the whole network has, of each of `KEYS`."""
    whole = next(iter(points.values()))[0]
    return {key: whole[key] - LOSS for key in KEYS}


def shares(points):
    """What is gone where a point of accuracy is lost, of each method, as `share_at`."""
    limit = limits(points)
    return {
        method: {
            key: {gone: share_at(lines, limit[key], key, gone) for gone in GONE}
            for key in KEYS
        }
        for method, lines in points.items()
    }


def share_at(lines, limit, key, gone):
    """The share that is gone where the accuracy first falls below a limit.

    Args:
        lines: The lines of one method, with that of the whole network.
        limit: Accuracy.
        key: One of `KEYS`.
        gone: One of `GONE`; between two lines it is interpolated linearly.

    Returns:
        The share; 0 where the whole network is below the limit, and that of the last
        line where none is.
    """
    lines = sorted(lines, key=lambda line: line["channels"])
    last = lines[0]
    if last[key] < limit:
        return 0.0
    for line in lines[1:]:
        if line[key] < limit:
            part = (last[key] - limit) / (last[key] - line[key])
            return last[gone] + part * (line[gone] - last[gone])
        last = line
    return last[gone]


def draw(path, points, settings):
    """Draws test accuracy over what is gone: a row for each of `KEYS`."""
    title = f"{data.stem(settings.dataset)}, {settings.model}, {settings.norm}"
    figure, axes = figures.subplots(len(KEYS), 2, "", sharey=True)
    figure.suptitle(title, x=0.02, ha="left")  # the legend is on the right
    limit = limits(points)
    colour_of = figures.colours(list(METHODS.values()))
    for row, (key, name) in zip(axes, KEYS.items()):
        for axis, gone in zip(row, ("channels", "macs")):
            for method, label in METHODS.items():
                lines = sorted(points[method], key=lambda line: line["channels"])
                x, y = ([line[k] for line in lines] for k in (gone, key))
                axis.plot(x, y, "o-", ms=3, color=colour_of[label], label=label)
            style = {"color": "black", "ls": "--", "lw": 1}
            axis.axhline(limit[key], **style, label="one point lost")
            axis.set(ylim=(0, 1))
        row[0].set_ylabel(f"test accuracy,\n{name}")
    for axis, gone in zip(axes[-1], ("channels", "macs")):
        axis.set_xlabel(f"{GONE[gone]}\nremoved")
    figures.legend(figure, axes)
    figures.save(figure, path)


def table(outcome):
    """Returns the results as Markdown.

    Args:
        outcome: Dict, what pruning.py writes to results.json.
    """
    header = ["removed at one point of accuracy lost"]
    header += [f"{text}, {name}" for name in KEYS.values() for text in GONE.values()]
    rows = [
        [label]
        + [f"{outcome['shares'][method][k][gone]:.1%}" for k in KEYS for gone in GONE]
        for method, label in METHODS.items()
    ]
    parts = [results.markdown(header, rows)]
    header = ["method", "level", *(f"{text} removed" for text in GONE.values())]
    header += ["change of outputs", "test accuracy", "recalibrated"]
    rows = [
        [
            METHODS.get(line["method"], "the whole network"),
            f"{line['level']:g}",
            *(f"{line[key]:.1%}" for key in GONE),
            f"{line['error']:.1e}",
            *(f"{line[key]:.2%}" for key in KEYS),
        ]
        for line in sorted(outcome["points"], key=_order)
    ]
    parts.append(results.markdown(header, rows))
    premise = outcome["premise"]
    header = ["merging at tolerance", *(f"{text} removed" for text in GONE.values())]
    header += ["recalibrated", "images a second", "times the whole network's"]
    rows = [
        [
            f"{line['level']:g}",
            *(f"{line[key]:.1%}" for key in GONE),
            f"{line['recalibrated']:.2%}",
            f"{line['images_per_second']:,.0f}",
            f"{line['images_per_second'] / line['of_whole']:.2f}",
        ]
        for line in outcome["speeds"]
    ]
    parts.append(results.markdown(header, rows))
    parts.append(
        "|correlation| of the outputs of a unit with those of the unit of the nearest "
        f"gamma and beta: {premise['nearest']:.3f}, mean over all units of its layer: "
        f"{premise['all']:.3f}, largest: {premise['most']:.3f}.\n"
    )
    return "\n".join(parts)


def _order(line):
    return (["whole", *METHODS].index(line["method"]), line["level"])
