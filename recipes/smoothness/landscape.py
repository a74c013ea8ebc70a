r"""The optimization landscape during training, with and without normalisation.

The small runs, and the paper's for a GPU:

    python -m recipes.smoothness.landscape
    KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m recipes.smoothness.landscape \
        --network=dln
    python -m recipes.smoothness.landscape --dataset=cifar10 \
        --data_dir=<where it is> --width=1 --steps=15000 --every=200 \
        --initializer=glorot_uniform

Claim (Section 3, Figures 4 and 9 to 13 of the later version): with BN, and equally with
an l1, l2 or l-infinity norm instead, the loss varies less along the gradient, the
gradient changes less, and the effective beta is smaller. All of them train better than
no norm; the deep linear network trains best with l1. The paper has curves only.

Small runs: VGG-16 at an eighth of the width on digits, 400 steps, takes 3 minutes on
two cores of an AMD EPYC. The deep linear network is the paper's, 10,000 steps, and took
5 minutes on one core. VGG's median beta is 2.8 with BN, 2.7 with l1 and 8.5 without a
norm. The largest beta of the deep linear network is 1.0e7 with BN and 6.5e7 without;
its loss reaches 14,500 in step 3,300 with BN, in step 1,600 with l1, and in step 7,800
without.

With steps of up to 30 learning rates (--longest=30) VGG's largest beta is 25 with BN,
as with steps of up to 4, and 38,690 without a norm. Along a random direction the median
beta is 0.4 with BN and 1.2 without; at the start it is 13.8 and 2.0.

The claims hold except for the smoothness of l-infinity in VGG and the median beta of
the deep linear network, which is 2 / learning rate nearly always with BN and l2. So it
is in the paper's VGG on CIFAR-10 (11,000 steps, 6 minutes on an H200), with and without
BN. At the same training loss, BN's loss range is 0.3 and its gradient distance 0.5 of
those without a norm. The tables are in docs/results/landscape.md.

Reference: Santurkar et al., NeurIPS 2018. https://arxiv.org/abs/1805.11604
"""

import dataclasses

import numpy as np
import pandas as pd

from keras_norms import diagnostics
from recipes.engine import command, results, training
from recipes.engine.settings import setting
from recipes.smoothness import _reports as reports
from recipes.smoothness import _training as descent

# In units of the learning rate (Appendix A.2.2).
STEP_RANGES = {"vgg": (1 / 2, 4.0), "dln": (1 / 100, 30.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(descent.Descent):
    """The settings of one training."""

    VARIABLE = (*descent.Descent.VARIABLE, "direction", "longest")

    direction: str | None = setting(
        None,
        "Direction to measure along; the gradient if not given.",
        choices=("gradient", "random"),
    )
    longest: float | None = setting(
        None,
        "Longest step to measure, in learning rates; 4 if not given, 30 for the dln.",
        above=0,
    )

    def __post_init__(self):
        super().__post_init__()
        shortest, _ = STEP_RANGES[self.network]
        if self.longest is not None and self.longest <= shortest:
            raise ValueError(
                f"Argument `longest` must be above {shortest:g}, the shortest step. "
                f"Received: longest={self.longest}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Run, descent.Descents):
    """Every norm, measured along its gradients."""

    RUN = Run

    norms: tuple[str, ...] = ("none", "bn", "lp1", "lp2", "lpinf")


def train(settings):
    """Trains and measures a network; see `recipes.smoothness._training.train`."""
    return descent.train(settings, "landscape", measure)


def measure(model, batches, settings):
    """The landscape along the gradient, a dict for a line of metrics."""
    shortest, longest = STEP_RANGES[settings.network]
    found = diagnostics.landscape(
        model,
        *batches[0],
        learning_rate=settings.learning_rate,
        step_range=(shortest, settings.longest or longest),
        points=8,
        direction=settings.direction or "gradient",
    )
    nearest, farthest = found.gradient_distance
    return {
        "loss": found.loss,
        "gradient_norm": found.gradient_norm,
        "loss_min": found.loss_range[0],
        "loss_max": found.loss_range[1],
        "gradient_distance_min": nearest,
        "gradient_distance_max": farthest,
        "effective_beta": found.effective_beta,
        "not_finite": len(found.not_finite),
        "step_lengths": found.steps.tolist(),
        "gradient_distances": found.distances.tolist(),
    }


def run(settings):
    """Trains with every norm and returns the directory with the results.

    training.png is Figures 11 a, 12 a and 13, landscape.png Figures 4, 9, 11 and 12.
    """
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows = []
    for norm in settings.norms:
        found = outcomes.of(norm=norm)
        measured = reports.over_seeds(found, of_run)
        rows.append({"norm": norm} | reports.summary(found) | measured)
    directory = settings.directory("landscape")
    note = (
        "Loss and accuracies of the last interval; medians over the measured steps; "
        "the highest loss and beta of all steps. "
    )
    text = reports.table(rows, COLUMNS, note + results.note(settings.seeds))
    others = [norm for norm in settings.norms if norm != "none"]
    relative = []
    if "none" in settings.norms and others:
        for norm in others:
            found = reports.over_seeds(
                outcomes.of(norm=norm), lambda each: relative_to_none(each, outcomes)
            )
            relative.append({"norm": norm} | found)
        text += "\nRelative to no normalization at the same training loss\n\n"
        text += reports.table(relative, RELATIVE, RELATIVE_NOTE)
    results.write(directory, text, {"rows": rows, "relative": relative})
    runs, title = reports.runs_of(outcomes, settings), settings.about()
    scores = ["train_loss", "train_accuracy", "test_accuracy"]
    if settings.network == "dln":
        scores = scores[:1]
    reports.training_curves(directory / "training.png", runs, settings, *scores)
    distances = ["gradient_distance_min", "gradient_distance_max"]
    columns = [
        (f"loss ({settings.unit()})", ["loss_min", "loss_max"]),
        ("|grad L(W - s g) - g|", distances),
        ("effective beta", "effective_beta"),
    ]
    reports.bands(directory / "landscape.png", runs, columns, title)
    reports.predictiveness(directory / "predictiveness.png", runs, title)
    return directory


MEDIANS = [
    "loss_range",
    "gradient_norm",
    "gradient_distance",
    "relative_distance",
    "effective_beta",
]


def of_run(outcome):
    """Summary of a run: medians over its steps, the highest of all, and a count."""
    lines = measures(outcome)
    return {
        **lines[MEDIANS].median(),
        **lines[["loss_max", "effective_beta"]].max().add_prefix("largest_"),
        "not_finite": lines["not_finite"].sum(),
    }


def relative_to_none(outcome, outcomes):
    """Medians of a run's measures divided by those of the run without a norm.

    Each measured step of the latter is compared with the step of nearest training loss,
    if there is one within 15 %.
    """
    (none,) = outcomes.of(norm="none", seed=outcome.settings.seed)
    both = (measures(each).dropna(subset="train_loss") for each in (none, outcome))
    both = (each.assign(place=np.log(each["train_loss"])) for each in both)
    pairs = pd.merge_asof(
        *(each.sort_values("place")[["place", *MEDIANS]] for each in both),
        on="place",
        direction="nearest",
        tolerance=np.log(1.15),
        suffixes=("_of_none", ""),
    ).dropna()
    ratios = {key: (pairs[key] / pairs[f"{key}_of_none"]).median() for key in MEDIANS}
    return ratios | {"points": len(pairs)}


def measures(outcome):
    """What was measured along a run, a data frame."""
    lines = reports.lines(outcome)
    lines["loss_range"] = lines["loss_max"] - lines["loss_min"]
    lines["gradient_distance"] = lines["gradient_distance_max"]
    norm = lines["gradient_norm"].replace(0, np.nan)
    lines["relative_distance"] = lines["gradient_distance"] / norm
    return lines


COLUMNS = {
    "norm": "norm",
    "train_loss": "training loss",
    "train_accuracy": "training accuracy",
    "test_accuracy": "test accuracy",
    "loss_range": "loss range",
    "gradient_norm": "norm of g",
    "gradient_distance": "gradient distance",
    "relative_distance": "the same / norm of g",
    "effective_beta": "effective beta",
    "largest_loss_max": "highest loss",
    "largest_effective_beta": "largest beta",
    "not_finite": "points not finite",
}
RELATIVE = {key: COLUMNS[key] for key in ("norm", *MEDIANS)}
RELATIVE["points"] = "measured steps compared"
RELATIVE_NOTE = (
    "Medians of ratios. Each measured step of the network without a norm is compared "
    "with the one of the nearest training loss, where there is one within 15 %."
)


if __name__ == "__main__":
    command.run(run, Settings)
