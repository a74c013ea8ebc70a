"""What came out of runs: over the steps of one, and over seeds."""

import numpy as np

from recipes.engine import results, training

SCORES = (*training.SCORES, "recalibrated_test_accuracy")


def summary(outcomes):
    """How the runs of one norm trained.

    Args:
        outcomes: List of `recipes.engine.training.Outcome`, one a seed.

    Returns:
        Dict of the counts `diverged` and `seeds`, and of the losses and accuracies
        `over_seeds`.
    """

    def scores(outcome):
        found = outcome.results
        return {key: found[key] for key in SCORES if key in found}

    return {
        "diverged": sum(outcome.results["diverged"] for outcome in outcomes),
        "seeds": len(outcomes),
        **over_seeds(outcomes, scores),
    }


def over_seeds(outcomes, of_run):
    """A dict of `results.mean_and_std` over the runs that did not diverge, if any.

    Args:
        outcomes: See `summary`.
        of_run: Function of one of them, returns a dict of numbers.
    """
    trained = [each for each in outcomes if not each.results["diverged"]]
    found = [of_run(outcome) for outcome in trained or outcomes]
    return {
        key: results.mean_and_std([numbers[key] for numbers in found])
        for key in found[0]
    }


def medians(layer, keys):
    """A function of an outcome: medians of `<layer>_<key>` over steps, by key."""

    def of_run(outcome):
        return {key: median(over_steps(outcome, f"{layer}_{key}")) for key in keys}

    return of_run


def over_steps(outcome, key):
    """An array of a value at each measured step, `nan` where there is none."""
    return floats(line[key] for line in outcome.metrics)


def median(values):
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


def cells(row, keys):
    """Numbers of a row, as text."""
    return [_cell(row.get(key)) for key in keys]


def _cell(value):
    if value is None:
        return "–"
    deviation = "" if value["std"] is None else f" ± {value['std']:.2g}"
    return f"{value['mean']:.4g}{deviation}"


def runs_of(outcomes, settings):
    """For figures: a dict from a norm to the lines of metrics of each of its runs."""
    return {
        norm: [outcome.metrics for outcome in outcomes.of(norm=norm)]
        for norm in settings.norms
    }
