"""What came out of runs: over the steps of one, and over seeds."""

import numpy as np
import pandas as pd

from recipes.engine import results, training

SCORES = (*training.SCORES, "recalibrated_test_accuracy")


def lines(outcome):
    """The lines of metrics.jsonl as a data frame, NaN in place of `None`."""
    return pd.DataFrame(outcome.metrics).where(pd.notna, np.nan).infer_objects()


def summary(outcomes):
    """How the runs of one norm trained: two counts, and their scores `over_seeds`."""

    def scores(outcome):
        found = outcome.results
        return {key: found[key] for key in SCORES if key in found}

    return {
        "diverged": sum(outcome.results["diverged"] for outcome in outcomes),
        "seeds": len(outcomes),
        **over_seeds(outcomes, scores),
    }


def over_seeds(outcomes, of_run):
    """Of each number in the dicts that `of_run` makes of outcomes: `mean_and_std`.

    Runs that diverged are left out, where not all did.
    """
    trained = [each for each in outcomes if not each.results["diverged"]]
    found = pd.DataFrame([of_run(outcome) for outcome in trained or outcomes])
    return {key: results.mean_and_std(found[key].dropna()) for key in found}


def medians(outcomes, layer, keys):
    """The medians of `<layer>_<key>` over steps, by key, `over_seeds`."""

    def of_run(outcome):
        values = lines(outcome)
        return {key: values[f"{layer}_{key}"].median() for key in keys}

    return over_seeds(outcomes, of_run)


def table(rows, columns, note):
    """Rows as Markdown, and a note; the columns are a dict from a key to a title."""
    keys = [key for key in columns if any(row.get(key) for row in rows)]
    cells = [[_cell(row.get(key)) for key in keys] for row in rows]
    return results.markdown([columns[key] for key in keys], cells) + f"\n{note}\n"


def _cell(value):
    if isinstance(value, list):
        return results.epochs(value)
    if isinstance(value, str) or value is None:
        return value or "–"
    deviation = "" if value["std"] is None else f" ± {value['std']:.2g}"
    return f"{value['mean']:.4g}{deviation}"


def runs_of(outcomes, settings):
    """For figures: a dict from a norm to the `lines` of each of its runs."""
    return {norm: list(map(lines, outcomes.of(norm=norm))) for norm in settings.norms}
