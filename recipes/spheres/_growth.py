"""Numbers of `recipes.spheres.weight_growth`, from the lines of its runs."""

import numpy as np

from recipes.engine import results


def measured(curve, layer, decay):
    """The lines of a run for the figure.

    Returns:
        List of dicts of `test_accuracy`, the `norm` of a layer and, without decay, its
        `gain` since the start.
    """
    lines = [line for line in curve if line.get(f"{layer} norm") is not None]
    found = []
    for line in lines:
        norm = line[f"{layer} norm"]
        gain = {} if decay else {"gain": norm - start(lines, layer)}
        found.append({"norm": norm, "test_accuracy": line["test_accuracy"], **gain})
    return found


def predicted(curve, layer):
    """The same by Lemma 3, whose norm is the root of `|W_0|^2 + sum |D|^2`."""
    lines = [line for line in curve if line.get(f"{layer} norm") is not None]
    if not lines:
        return []
    first = start(lines, layer)
    steps = np.cumsum([line[f"{layer} squared steps"] for line in lines])
    norms = np.sqrt(first**2 + steps).tolist()
    return [{"norm": norm, "gain": norm - first} for norm in norms]


def start(curve, layer):
    """The norm before the first step."""
    square = curve[0][f"{layer} norm"] ** 2 - curve[0][f"{layer} growth"]
    return float(np.sqrt(square))


def ratio(curve, layer):
    """The growth of `|W|^2` over all steps, divided by the sum of `|D|^2`."""
    grown = sum(line[f"{layer} growth"] for line in curve)
    return grown / sum(line[f"{layer} squared steps"] for line in curve)


def convolutions(line):
    """The names of the kernels in a line of metrics, without that of the logits."""
    names = [key.removesuffix(" growth") for key in line if key.endswith(" growth")]
    return [name for name in names if name not in ("logits", "predictions")]


def summary(outcomes, layer):
    """The numbers of a row, over the runs that did not diverge.

    Returns:
        Dict of `diverged`, a count; `test_accuracy`, `start` and `end`, the norms of
        the layer, and `ratio`, each a `mean_and_std`; and `lowest` and `highest`, the
        extremes of that ratio over all convolutions. `None` where there are none.
    """
    curves = [each.metrics for each in outcomes if not each.results["diverged"]]
    ratios = [ratio(curve, n) for curve in curves for n in convolutions(curve[0])]
    values = {
        "test_accuracy": [curve[-1]["test_accuracy"] for curve in curves],
        "start": [start(curve, layer) for curve in curves],
        "end": [curve[-1][f"{layer} norm"] for curve in curves],
        "ratio": [ratio(curve, layer) for curve in curves],
    }
    return {
        "diverged": len(outcomes) - len(curves),
        **{key: results.mean_and_std(value) for key, value in values.items()},
        "lowest": min(ratios, default=None),
        "highest": max(ratios, default=None),
    }


def pooled(curves, key):
    """The values of all seeds and channels: a list an epoch."""
    epochs = max(len(curve) for curve in curves)
    values = [
        [
            v
            for curve in curves
            for line in curve[i : i + 1]
            for v in line.get(key, [])
            if v is not None
        ]
        for i in range(epochs)
    ]
    return [epoch for epoch in values if epoch]


def distance_rows(distances):
    """Median over channels and seeds after the first, the middle and the last epoch."""
    return [
        {
            "distance": name,
            "decay": label,
            "first": float(np.median(values[0])),
            "middle": float(np.median(values[len(values) // 2])),
            "last": float(np.median(values[-1])),
            "last_largest": float(np.max(values[-1])),
        }
        for name, columns in distances.items()
        for label, values in columns.items()
        if values
    ]
