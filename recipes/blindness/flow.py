r"""RealNVP with BN and with LN: real digits and what is between two of them.

The small run, on scikit-learn's 8x8 digits; MNIST averaged to 14x14; and MNIST of full
size with deeper networks, for a GPU:

    python -m recipes.blindness.flow
    python -m recipes.blindness.flow --dataset=mnist --data_dir=<where it is> \
        --train_size=4000 --seeds=2
    python -m recipes.blindness.flow --dataset=mnist --data_dir=<where it is> \
        --size=28 --scales=3 --width=32 --blocks=8 --epochs=100 \
        --architectures=full,shallow,narrow

Claim (Zhou et al., Figures 1 and 3): trained on two digits, RealNVP with LN gives real
images a much higher likelihood than `alpha x1 + (1 - alpha) x2` of an x1 of one digit
and an x2 of the other; with BN it does not tell them apart, for -log p is one formula
for all samples. The paper has curves only, and its text names neither the digits nor
the settings; BN and LN here stand in the networks and between couplings, see
`recipes.models.flow_steps` for what LN between couplings is.

The second command, digits 0 and 1, took 12 minutes of one core of an Intel Xeon that
other work shared (TensorFlow; the last has not been run). Log-likelihoods of test
images in nats, mean and deviation of 2 seeds:

            real     halfway             gap            AUROC     bits/dim
    BN    -289.3      -485.2      195.9 ± 3.3    0.964 ± 0.003       2.083
    LN    -390.5      -672.9     282.4 ± 17.5    0.975 ± 0.008       2.822

BN does tell them apart, so that the claim does not hold as it stands. Its gap is the
smaller one, and its likelihood is flat between the digits, where that of LN falls to
the middle; but BN is the better flow after these 992 steps. With `--nobetween`, norms
in the networks alone, both have the same gap (205.8 and 205.9, seed 0).

Reference: Zhou, Shen, Chen, Tang and Zhang, Batch Normalization Is Blind to the First
and Second Derivatives of the Loss, 2022, Figures 1 and 3.
https://arxiv.org/abs/2205.15146
"""

import dataclasses
import itertools

from recipes.blindness import _flow_training as flow_training
from recipes.blindness._flow_training import ARCHITECTURES, Training
from recipes.engine import command, data, figures, results, training
from recipes.engine.settings import Sweep, setting

NATS = ("real", "between", "gap", "batch_gap")
OTHERS = ("auroc", "batch_auroc", "bits_per_dim", "train_bits_per_dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Training, Sweep):
    """A flow for each norm, pair of classes and architecture."""

    RUN = Training

    norms: tuple[str, ...] = setting(("bn", "layer"), "Names in recipes.models.norms.")
    classes: tuple[str, ...] = setting(("0+1",), "Pairs of labels, such as 0+1,3+8.")
    architectures: tuple[str, ...] = setting(
        ("full",), "Of the flow.", choices=tuple(ARCHITECTURES)
    )

    def runs(self):
        """The settings of all runs."""
        runs = super().runs
        return [run for classes in self.classes for run in runs(classes=classes)]


def run(settings):
    """Trains and measures every flow.

    Returns:
        The path of the directory with table.md, results.json, interpolation.png
        (Figures 1 and 3) and training.png.
    """
    outcomes = training.train_all(
        flow_training.train, settings.runs(), settings.workers
    )
    rows, panels = [], {}
    for classes, architecture, norm in itertools.product(
        settings.classes, settings.architectures, settings.norms
    ):
        case = {"classes": classes, "architecture": architecture, "norm": norm}
        found = outcomes.of(**case)
        rows.append(case | summary(found))
        title = classes.replace("+", " and ")
        title += "" if len(settings.architectures) == 1 else f", {architecture}"
        panels.setdefault(title, {})[norm] = found
    directory = settings.directory("blindness_flow")
    results.write(directory, table(rows, settings), {"rows": rows})
    title = f"{data.stem(settings.dataset)}, RealNVP"
    interpolation(directory / "interpolation.png", panels, title)
    lines = {
        panel: {norm: [each.metrics for each in found] for norm, found in part.items()}
        for panel, part in panels.items()
    }
    curves = [
        (f"{part}_log_likelihood", f"{name} log-likelihood\n(nats)", {})
        for part, name in (("train", "training"), ("test", "test"))
    ]
    figures.curves(directory / "training.png", lines, curves, title)
    return directory


def summary(outcomes):
    """What several seeds have in common.

    Args:
        outcomes: List of `recipes.engine.training.Outcome`.

    Returns:
        Dict of `seeds`, `diverged` (how many), `round_trip` (the largest) and, for each
        of `NATS` and `OTHERS`, the `results.mean_and_std`.
    """
    alive = [each.results for each in outcomes if not each.results["diverged"]]
    return {
        "seeds": len(outcomes),
        "diverged": len(outcomes) - len(alive),
        "round_trip": max((each["round_trip"] for each in alive), default=None),
        **{
            key: results.mean_and_std([each[key] for each in alive])
            for key in (*NATS, *OTHERS)
        },
    }


def table(rows, settings):
    """The rows as Markdown."""
    header = ["digits", "architecture", "norm", "real (nats)", "halfway", "gap"]
    header += ["gap, batch statistics", "AUROC", "AUROC, batch statistics"]
    header += ["test bits/dim", "training bits/dim", "round trip", "diverged"]
    lines = [
        [
            row["classes"].replace("+", " and "),
            row["architecture"],
            figures.NAME_OF.get(row["norm"], row["norm"]),
            *(results.spread(row[key], 1) for key in NATS),
            *(results.spread(row[key], 3) for key in OTHERS),
            "–" if row["round_trip"] is None else f"{row['round_trip']:.0e}",
            f"{row['diverged']} of {row['seeds']}",
        ]
        for row in rows
    ]
    return f"{results.markdown(header, lines)}\n{results.note(settings.seeds)}\n"


def interpolation(path, panels, title):
    """Draws the log-likelihood of `alpha x1 + (1 - alpha) x2`, as the paper's Figure 1.

    A line is the mean over the images of one seed, a band around it a deviation.

    Args:
        path: Where the PNG goes.
        panels: Dict from the title of a panel to a dict from a norm to a list of
            `recipes.engine.training.Outcome`, one a seed.
        title: Of the picture.
    """
    figure, axes = figures.subplots(1, len(panels), title, sharey=False)
    norms = list(dict.fromkeys(norm for part in panels.values() for norm in part))
    colour_of = figures.colours(norms)
    for axis, (name, part) in zip(axes[0], panels.items()):
        for norm, outcomes in part.items():
            for outcome in outcomes:
                if not outcome.results["diverged"]:
                    _line(axis, outcome.results, colour_of[norm], norm)
        axis.set(title=name, xlabel="alpha")
    axes[0, 0].set_ylabel("log-likelihood (nats)")
    figures.legend(figure, axes)
    figures.save(figure, path)


def _line(axis, found, colour, norm):
    label = figures.NAME_OF.get(norm, norm)
    axis.plot(found["alpha"], found["mean"], color=colour, label=label, marker=".")
    low, high = (
        [mean + side * (std or 0) for mean, std in zip(found["mean"], found["std"])]
        for side in (-1, 1)
    )
    axis.fill_between(found["alpha"], low, high, color=colour, alpha=0.12, lw=0)


if __name__ == "__main__":
    command.run(run, Settings)
