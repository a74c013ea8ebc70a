"""What came out of the runs of a comparison: one row for its seeds, and a table."""

import numpy as np


def summarise(runs, curves, target_accuracy):
    """The numbers of one row: mean and deviation over the runs that did not diverge.

    Args:
        runs: List of the results of `train`, one a seed.
        curves: List of their metrics, each a list with a dict an epoch.
        target_accuracy: Float.

    Returns:
        Dict with `test_accuracy` and `train_loss` (of the last epoch) and
        `seconds_per_step`, each a dict of `mean` and `std` (over n, not n - 1) or
        `None`; `epochs_to_target`, a list with an epoch or `None` a run; `diverged`
        and `seeds`, two counts; and `trials_at_once` and `images_per_second` of the
        largest population, if there was one.
    """
    trained = [run for run in runs if not run["diverged"]]
    return {
        **{
            key: _mean_and_std([run[key] for run in trained])
            for key in ("test_accuracy", "train_loss", "seconds_per_step")
        },
        "epochs_to_target": [
            next((m["epoch"] for m in c if m["test_accuracy"] >= target_accuracy), None)
            for c in curves
        ],
        "diverged": len(runs) - len(trained),
        "seeds": len(runs),
        **_together(runs),
    }


def _together(runs):
    """How many trials trained at once, at most, and how fast they all did; or nothing.

    The numbers are those of the largest population, which was the whole machine's load.
    """
    runs = [run for run in runs if run.get("images_per_second") is not None]
    if not runs:
        return {}
    largest = max(runs, key=lambda run: run["trials_at_once"])
    return {key: largest[key] for key in ("trials_at_once", "images_per_second")}


def _mean_and_std(values):
    values = [value for value in values if value is not None]
    if not values:
        return None
    return {"mean": float(np.mean(values)), "std": float(np.std(values))}


def table(rows, target_accuracy):
    """Returns the rows of `compare` as Markdown."""
    lines = [
        "| model | activation | norm | test accuracy, % | training loss | "
        f"epochs to {target_accuracy:.0%} | ms per step | diverged |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [
            row["model"],
            row["activation"],
            row["norm"],
            _format(row["test_accuracy"], "{:.2f}", 100),
            _format(row["train_loss"], "{:.4f}", 1),
            _format_epochs(row["epochs_to_target"]),
            _format(row["seconds_per_step"], "{:.1f}", 1000),
            f"{row['diverged']} of {row['seeds']}" if row["diverged"] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Mean ± standard deviation over the runs that did not diverge, test accuracy "
        "and training loss (cross-entropy) of the last epoch. A step is one batch of "
        "training, without compilation.",
    ]
    if speeds := [row for row in rows if "trials_at_once" in row]:
        lines += [
            "",
            "Trained together in one program, where a step is that of all trials "
            "divided by their number:",
            "",
            *(
                f"- {row['model']}, {row['activation']}, {row['norm']}: "
                f"{row['trials_at_once']} trials at once, "
                f"{row['images_per_second']:,.0f} images per second"
                for row in speeds
            ),
        ]
    return "\n".join(lines) + "\n"


def _format(value, form, factor):
    if value is None:
        return "–"
    mean, std = (form.format(factor * value[key]) for key in ("mean", "std"))
    return f"{mean} ± {std}"


def _format_epochs(epochs):
    reached = [epoch for epoch in epochs if epoch is not None]
    if not reached:
        return "never"
    mean = f"{np.mean(reached):.1f}"
    if len(reached) == len(epochs):
        return mean
    return f"{mean} ({len(reached)} of {len(epochs)} runs)"
