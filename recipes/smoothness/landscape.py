r"""The optimization landscape through training, with and without normalisation.

The small runs, and the paper's for a GPU:

    python -m recipes.smoothness.landscape
    KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m recipes.smoothness.landscape \
        --network=dln
    python -m recipes.smoothness.landscape --dataset=cifar10 \
        --data_dir=<where it is> --width=1 --steps=15000 --every=200

Claim (Section 3, Figures 4 and 9 to 13 of the later version): with BN, and as much with
the l1, l2 or l-infinity norm in its place, the loss varies less along the gradient, the
gradient changes less, and the effective beta is smaller. All of them train better than
no norm; the deep linear network does so best with l1. The paper has curves only.

Small runs: VGG-16 of an eighth of the width on digits, 400 steps, took 8 minutes; the
deep linear network is the paper's, 10,000 steps, and took 4.6 minutes; on 2 cores of an
Intel Xeon that much other work shared. Medians over steps, and the largest of all:

                    VGG                                deep linear network
            gradient   effective  accuracy       step of        highest    largest
            distance   beta       of steps 0-19  loss <= 14,500  loss      beta
    none    0.63       9.1        17 %           7,800          8.7e6      6.5e7
    bn      0.026      2.8        75 %           3,300          2.2e5      1.0e7
    lp1     0.015      2.6        70 %           1,600          2.2e5      1.5e7
    lp2     0.022      2.6        71 %           3,200          2.2e5      1.0e7
    lpinf   0.33       17.6       60 %           5,500          1.7e5      3.6e7

The claims hold but for the smoothness of l-infinity in VGG, and for the median beta of
the deep linear network: all but l1 train where beta is 2 / learning rate.

Reference: Santurkar, Tsipras, Ilyas and Madry, How Does Batch Normalization Help
Optimization?, NeurIPS 2018. https://arxiv.org/abs/1805.11604
"""

import dataclasses

import numpy as np
import pandas as pd

from keras_norms import diagnostics
from recipes.engine import command, results, training
from recipes.smoothness import _figures as figures
from recipes.smoothness import _numbers as numbers
from recipes.smoothness import _training as descent

# In units of the learning rate (Appendix A.2.2).
STEP_RANGES = {"vgg": (1 / 2, 4.0), "dln": (1 / 100, 30.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(descent.Descents):
    """Every norm, measured along its gradients."""

    norms: tuple[str, ...] = ("none", "bn", "lp1", "lp2", "lpinf")


def train(settings):
    """Trains and measures a network; see `recipes.smoothness._training.train`."""
    return descent.train(settings, "landscape", measure)


def measure(model, batches, settings):
    """The landscape along the gradient, a dict for a line of metrics."""
    found = diagnostics.landscape(
        model,
        *batches[0],
        learning_rate=settings.learning_rate,
        step_range=STEP_RANGES[settings.network],
        points=8,
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
    """Trains with every norm and returns the directory of what came out.

    training.png is Figures 11 a, 12 a and 13, landscape.png Figures 4, 9, 11 and 12.
    """
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows = []
    for norm in settings.norms:
        found = outcomes.of(norm=norm)
        measured = numbers.over_seeds(found, of_run)
        rows.append({"norm": norm} | numbers.summary(found) | measured)
    directory = settings.directory("landscape")
    note = (
        "Loss and accuracies of the last interval; medians over the measured steps; "
        "the highest loss and beta of all steps. "
    )
    text = numbers.table(rows, COLUMNS, note + results.note(settings.seeds))
    results.write(directory, text, {"rows": rows})
    runs, title = numbers.runs_of(outcomes, settings), settings.about()
    scores = ["train_loss"]
    if settings.network == "vgg":
        scores += ["train_accuracy", "test_accuracy"]
    figures.training(directory / "training.png", runs, settings, *scores)
    distances = ["gradient_distance_min", "gradient_distance_max"]
    columns = [
        (["loss_min", "loss_max"], f"loss ({settings.unit()})", figures.LOG),
        (distances, "|grad L(W - s g) - g|", figures.LOG),
        ("effective_beta", "effective beta", figures.LOG),
    ]
    figures.bands(directory / "landscape.png", runs, columns, title)
    figures.predictiveness(directory / "predictiveness.png", runs, title)
    return directory


def of_run(outcome):
    """What a run was like: medians over its steps, the highest of all, and a count."""
    lines = numbers.lines(outcome)
    farthest = lines["gradient_distance_max"]
    medians = {
        "loss_range": lines["loss_max"] - lines["loss_min"],
        "gradient_distance": farthest,
        "relative_distance": farthest / lines["gradient_norm"].replace(0, np.nan),
        "effective_beta": lines["effective_beta"],
    }
    return {
        **pd.DataFrame(medians).median(),
        "largest_loss_max": lines["loss_max"].max(),
        "largest_effective_beta": lines["effective_beta"].max(),
        "not_finite": lines["not_finite"].sum(),
    }


COLUMNS = {
    "norm": "norm",
    "train_loss": "training loss",
    "train_accuracy": "training accuracy",
    "test_accuracy": "test accuracy",
    "loss_range": "loss range",
    "gradient_distance": "gradient distance",
    "relative_distance": "the same / norm of g",
    "effective_beta": "effective beta",
    "largest_loss_max": "highest loss",
    "largest_effective_beta": "largest beta",
    "not_finite": "points not finite",
}


if __name__ == "__main__":
    command.run(run, Settings)
