"""Tables of results, their numbers over seeds, and the files they go to."""

import numpy as np
import pandas as pd

from recipes.engine import files


def write(directory, text, results):
    """Writes table.md and results.json."""
    files.write_json(directory / "results.json", results)
    files.write_text(directory / "table.md", text)


def markdown(header, rows):
    """A Markdown table: the first column is aligned left, the others right."""
    table = pd.DataFrame([list(map(str, row)) for row in rows], columns=list(header))
    align = ["left", *["right"] * (len(header) - 1)]
    return table.to_markdown(index=False, disable_numparse=True, colalign=align) + "\n"


def mean_and_std(values):
    """A dict of `mean` and `std` over the values that are not `None`; or `None`.

    The deviation is that of a sample (n - 1); for a single value it is `None`.
    """
    values = pd.Series([value for value in values if value is not None], dtype=float)
    if values.empty:
        return None
    std = None if len(values) == 1 else float(values.std())
    return {"mean": float(values.mean()), "std": std}


def spread(value, digits, factor=1, kind="f"):
    """A dict of `mean_and_std`, or `None`, as text; `kind` as in a format, f or e."""
    if value is None or value["mean"] is None:
        return "–"
    if abs(factor * value["mean"]) > 1e6:
        digits, kind = 1, "e"
    parts = [value["mean"]] + [value["std"]] * (value["std"] is not None)
    return " ± ".join(f"{factor * part:.{digits}{kind}}" for part in parts)


def accuracies(outcomes):
    """The test accuracy, %, of each run that did not diverge.

    Args:
        outcomes: List of `recipes.engine.training.Outcome`, one per seed.
    """
    found = [outcome.results for outcome in outcomes]
    return [100 * each["test_accuracy"] for each in found if not each["diverged"]]


def percent(outcomes):
    """Test accuracy over seeds, %, as text; see `accuracies`."""
    alive = accuracies(outcomes)
    lost = len(outcomes) - len(alive)
    if not alive:
        return "diverged"
    text = spread(mean_and_std(alive), 2)
    return f"{text} ({lost} of {len(outcomes)} diverged)" if lost else text


def note(seeds):
    """The note below a table: what its numbers are."""
    if seeds == 1:
        return "One run each."
    return (
        f"Mean ± standard deviation of {seeds} seeds (n - 1), over the runs that did "
        "not diverge."
    )


def summarise(outcomes, target_accuracy):
    """The numbers of one row of a comparison, over the runs that did not diverge.

    Args:
        outcomes: List of `recipes.engine.training.Outcome`, one per seed.
        target_accuracy: Float.

    Returns:
        Dict with `test_accuracy` and `train_loss` (of the last epoch) and
        `seconds_per_step`, as `mean_and_std`; `epochs_to_target`, a list with an epoch
        or `None` for each run; `diverged` and `seeds`, two counts; and, if trials
        trained together, `trials_at_once` and `images_per_second` of the largest
        population.
    """
    runs = [outcome.results for outcome in outcomes]
    trained = [run for run in runs if not run["diverged"]]
    keys = ("test_accuracy", "train_loss", "seconds_per_step")
    summary = {key: mean_and_std([run[key] for run in trained]) for key in keys} | {
        "epochs_to_target": [first_epoch(o.metrics, target_accuracy) for o in outcomes],
        "diverged": len(runs) - len(trained),
        "seeds": len(runs),
    }
    if together := [run for run in runs if run.get("images_per_second") is not None]:
        # The largest population had the whole machine.
        largest = max(together, key=lambda run: run["trials_at_once"])
        keys = ("trials_at_once", "images_per_second")
        summary |= {key: largest[key] for key in keys}
    return summary


def first_epoch(metrics, target_accuracy):
    """The first epoch whose test accuracy is the target or more, or `None`."""
    reached = (m["epoch"] for m in metrics if m["test_accuracy"] >= target_accuracy)
    return next(reached, None)


def epochs(values):
    """A list with an epoch or `None` for each run, as text."""
    reached = [epoch for epoch in values if epoch is not None]
    if not reached:
        return "never"
    some = f" ({len(reached)} of {len(values)} runs)"
    return f"{np.mean(reached):.1f}" + some * (len(reached) < len(values))
