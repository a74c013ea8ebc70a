"""Pictures of flows: likelihoods between two images, and over training."""

from recipes import figures


def draw(directory, panels, title):
    """Draws interpolation.png and training.png.

    Args:
        directory: Where they go.
        panels: Dict from the title of a panel to a dict from a norm to a list of what
            `recipes.blindness_flow.train` returned, one a seed.
        title: Of both.
    """
    interpolation(directory / "interpolation.png", panels, title)
    rows = [
        (f"{part}_log_likelihood", f"{name} log-likelihood\n(nats)", {})
        for part, name in (("train", "training"), ("test", "test"))
    ]
    lines = {
        panel: {norm: [m for _, m in outcomes] for norm, outcomes in of_norm.items()}
        for panel, of_norm in panels.items()
    }
    figures.curves(directory / "training.png", lines, rows, title)


def interpolation(path, panels, title):
    """Draws the log-likelihood of `alpha x1 + (1 - alpha) x2`, as the paper's Figure 1.

    A line is the mean over the images of one seed, a band around it a deviation.

    Args:
        path: Where the PNG goes.
        panels, title: See `draw`.
    """
    figure, axes = figures.subplots(1, len(panels), title, sharey=False)
    norms = list(dict.fromkeys(norm for of_norm in panels.values() for norm in of_norm))
    colour_of = figures.colours(norms)
    for axis, (name, of_norm) in zip(axes[0], panels.items()):
        for norm, outcomes in of_norm.items():
            for results, _ in outcomes:
                if not results["diverged"]:
                    _line(axis, results, colour_of[norm], norm)
        axis.set(title=name, xlabel="alpha")
    axes[0, 0].set_ylabel("log-likelihood (nats)")
    figures.legend(figure, axes)
    figures.save(figure, path)


def _line(axis, results, colour, norm):
    label = figures.NAME_OF.get(norm, norm)
    axis.plot(results["alpha"], results["mean"], color=colour, label=label, marker=".")
    low = [mean - std for mean, std in zip(results["mean"], results["std"])]
    high = [mean + std for mean, std in zip(results["mean"], results["std"])]
    axis.fill_between(results["alpha"], low, high, color=colour, alpha=0.12, lw=0)
