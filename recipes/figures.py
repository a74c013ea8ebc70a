"""Pictures, drawn without a display."""

import numpy as np
from matplotlib.figure import Figure

from recipes import experiment

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def training_curves(path, panels, title):
    """Draws the training loss above the test accuracy, one column a panel.

    Each curve is the mean over the runs that reached the epoch, in a band from the
    lowest to the highest of them.

    Args:
        path: Where the PNG goes.
        panels: Dict from the title of a panel to a dict from a label to its runs, each
            a list of the dicts in metrics.jsonl. A label has one colour everywhere.
        title: Of the picture.
    """
    figure = Figure(figsize=(1 + 2.6 * len(panels), 5.2), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False)
    labels = list(dict.fromkeys(label for runs in panels.values() for label in runs))
    for column, (name, curves) in enumerate(panels.items()):
        for label, runs in curves.items():
            colour = COLOURS[labels.index(label) % len(COLOURS)]
            _curve(axes[0, column], runs, "train_loss", label, colour)
            _curve(axes[1, column], runs, "test_accuracy", label, colour)
        axes[0, column].set(title=name, yscale="log")
        axes[1, column].set(xlabel="epoch", ylim=(0, 1))
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("test accuracy")
    axes[0, 0].legend()
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    experiment.write(path, lambda temporary: figure.savefig(temporary, dpi=120))


def _curve(axis, runs, key, label, colour):
    epochs = max((len(run) for run in runs), default=0)
    values = np.full((len(runs), epochs), np.nan)
    for row, run in zip(values, runs, strict=True):
        row[: len(run)] = [np.nan if line[key] is None else line[key] for line in run]
    values = values[:, ~np.isnan(values).all(0)]  # a diverged run ends with NaN
    x = np.arange(1, values.shape[1] + 1)
    axis.plot(x, np.nanmean(values, 0), color=colour, label=label)
    axis.fill_between(
        x, np.nanmin(values, 0), np.nanmax(values, 0), color=colour, alpha=0.2, lw=0
    )
