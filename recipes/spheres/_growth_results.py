"""The table and the figures of `weight_growth`, from the metrics of its runs."""

import numpy as np
import pandas as pd

from recipes.engine import figures, results

DISTANCES = {"variance_distance": "|gamma² - sigma²|", "mean_distance": "|beta - mu|"}
CHANGES = {"sigma_change": "Sigma", "gamma_change": "gamma", "effective_change": "W'"}
SPHERE = "on the sphere"


def write(settings, outcomes, layer):
    """Writes them for a kernel; returns their directory.

    `outcomes` are tuples of a norm, a weight decay (`None`: on the sphere) and the
    outcomes of the seeds.
    """
    rows, panels, of_bn = [], {}, {}
    for norm, decay, found in outcomes:
        case = {"norm": norm, "weight_decay": decay or 0.0, "sphere": decay is None}
        rows.append(case | summary(found, layer))
        curves = [outcome.metrics for outcome in found]
        panel = panels.setdefault(figures.name_of(norm), {})
        for curve in curves:
            for label, lines in drawn(curve, layer, decay).items():
                panel.setdefault(label, []).append(lines)
        if norm == "bn":
            of_bn[label_of(decay)] = curves
    distances, changes = followed(of_bn, DISTANCES), followed(of_bn, CHANGES)
    directory = settings.directory("weight_growth")
    found = {"layer": layer, "rows": rows, "distances": distance_rows(distances)}
    found["changes"] = distance_rows(changes)
    results.write(directory, table(found, settings.seeds), found)
    shown = [("norm", f"norm of\n{layer}", {}), ("gain", "less that of epoch 0", {})]
    shown.append(("test_accuracy", "test accuracy", {}))
    colour_of = figures.colours([*map(label_of, settings.weight_decays), SPHERE])
    colour_of["Lemma 3"] = "#000000"
    title = settings.about()
    of_all = panels, shown, title, colour_of
    figures.curves(directory / "growth.png", *of_all, dashed=["Lemma 3"])
    for name, columns in distances.items():
        if columns:
            largest = [max(epoch) for values in columns.values() for epoch in values]
            ylim = (0, 1.05 * max(largest, default=1))
            picture = f"{name.removesuffix('_distance')}.png"
            path, panel = directory / picture, {"all channels": columns}
            about, label = f"BN after {layer}\n{title}", DISTANCES[name]
            figures.distributions(path, panel, (), label, about, ylim)
    if found["changes"]:
        shown = [("change", "what an epoch changes,\nrelative", {"yscale": "log"})]
        path, title = directory / "ellipsoid.png", f"BN after {layer}\n{title}"
        figures.curves(path, changes_drawn(of_bn), shown, title, colour_of)
    return directory


def epochs(curve, layer):
    """What the lines of a run say about a kernel, until it diverged: a DataFrame.

    Every line has the norm at the `start`, the `ratio` of the growth of |W|^2 to the
    squared steps since then, and the lowest test accuracy of the last half.
    """
    keys = ("norm", "growth", "squared steps")
    names = {f"{layer} {key}": key for key in keys}
    lines = pd.DataFrame(curve, columns=["test_accuracy", *names], dtype=float)
    lines = lines.rename(columns=names).dropna(subset="norm")
    before = np.sqrt(lines["norm"] ** 2 - lines["growth"])
    lines["start"] = next(iter(before), np.nan)
    lines["ratio"] = lines["growth"].cumsum() / lines["squared steps"].cumsum()
    lines["lowest_accuracy"] = lines["test_accuracy"][len(lines) // 2 :].min()
    return lines


def drawn(curve, layer, decay):
    """A dict from a label to the lines of a run for the figure.

    Without decay they have the `gain` of the norm, and the same by Lemma 3, which makes
    the norm the root of `|W_0|^2 + sum |D|^2`.
    """
    lines = epochs(curve, layer)
    found = {label_of(decay): lines}
    if decay == 0:
        norm = np.sqrt(lines["start"] ** 2 + lines["squared steps"].cumsum())
        found["Lemma 3"] = pd.DataFrame({"norm": norm})
        for each in found.values():
            each["gain"] = each["norm"] - lines["start"]
    return {label: each.to_dict("records") for label, each in found.items()}


def summary(outcomes, layer):
    """For the runs that did not diverge; `lowest` and `highest` of all convolutions."""
    curves = [each.metrics for each in outcomes if not each.results["diverged"]]
    last = [epochs(curve, layer).iloc[-1].rename({"norm": "end"}) for curve in curves]
    columns = ["test_accuracy", "lowest_accuracy", "start", "end", "ratio"]
    last = pd.DataFrame(last, columns=columns)
    numbers = {key: results.mean_and_std(last[key]) for key in last}
    ratios = [
        float(epochs(curve, name)["ratio"].iloc[-1])
        for curve in curves
        for name, _, what in (key.rpartition(" ") for key in curve[0])
        if what == "growth" and name not in ("logits", "predictions")
    ]
    numbers["lowest"] = min(ratios, default=None)
    numbers["highest"] = max(ratios, default=None)
    return {"diverged": len(outcomes) - len(curves), **numbers}


def followed(of_bn, names):
    """Dict from each name to a dict from each decay to its runs' `pooled` values."""
    return {
        name: {label: pooled(curves, name) for label, curves in of_bn.items()}
        for name in names
    }


def changes_drawn(of_bn):
    """The panels of the figure of `CHANGES`."""
    return {
        name: {
            label: [[{"change": line.get(key)} for line in curve] for curve in curves]
            for label, curves in of_bn.items()
        }
        for key, name in CHANGES.items()
    }


def pooled(curves, key):
    """The values of all seeds and channels: one list per epoch."""
    lines = [line for curve in curves for line in curve]
    values = pd.DataFrame(lines, columns=["epoch", key]).explode(key).dropna()
    return values.groupby("epoch")[key].apply(list).tolist()


def distance_rows(distances):
    """Median over channels and seeds after the first, the middle and the last epoch."""
    rows = []
    for name, columns in distances.items():
        for label, values in columns.items():
            if values:
                shown = values[0], values[len(values) // 2], values[-1]
                row = dict(zip(("first", "middle", "last"), map(np.median, shown)))
                row |= {"last_largest": max(values[-1])}
                rows.append({"distance": name, "decay": label, **row})
    return rows


def label_of(decay):
    """The name of a weight decay in figures; `None` is on the sphere."""
    if decay is None:
        return SPHERE
    return f"decay {decay:g}" if decay else "no decay"


def table(found, seeds):
    """What is in results.json, as Markdown."""
    header = ["norm", "weight decay", "test accuracy, %", "lowest of the last half"]
    header += ["norm at the start", "at the end", "growth / squared steps"]
    header += ["of all convolutions"]
    lines = []
    for row in found["rows"]:
        ratios = ["–", "–"]
        # Decay is not part of Lemma 3, and on the sphere nothing grows.
        if not row["weight_decay"] and not row["sphere"] and row["ratio"]:
            extremes = f"{row['lowest']:.4f} to {row['highest']:.4f}"
            ratios = [results.spread(row["ratio"], 4), extremes]
        lost = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        accuracy = results.spread(row["test_accuracy"], 2, 100) + lost
        lowest = results.spread(row["lowest_accuracy"], 2, 100)
        norms = [results.spread(row[key], 3) for key in ("start", "end")]
        decay = f"0, {SPHERE}" if row["sphere"] else f"{row['weight_decay']:g}"
        norm = figures.name_of(row["norm"])
        lines.append([norm, decay, accuracy, lowest, *norms, *ratios])
    text = (
        f"The kernel of {found['layer']}\n\n{results.markdown(header, lines)}\n"
        f"{results.note(seeds)} The last two columns are the growth of |W|² over all "
        "steps, divided by the sum of their squared lengths: 1 if Lemma 3 holds.\n"
    )
    if not found["distances"]:
        return text
    text += "\nThe BN after it, median over channels and seeds\n\n"
    text += _by_epoch(found["distances"], DISTANCES, "its largest channel")
    if not found["changes"]:  # from runs that did not measure them
        return text
    text += "\nWhat an epoch changes, the norm of the difference over the norm\n\n"
    return text + _by_epoch(found["changes"], CHANGES, "its largest seed")


def _by_epoch(rows, names, last):
    """What `distance_rows` returns, as Markdown."""
    header, lines = ["", "weight decay", "epoch 1", "middle", "last epoch", last], []
    for row in rows:
        name, decay, *numbers = row.values()
        numbers = [f"{number:.4f}" for number in numbers]
        lines.append([names[name].replace("|", ""), decay, *numbers])
    return results.markdown(header, lines)
