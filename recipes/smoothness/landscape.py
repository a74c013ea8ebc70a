r"""The optimization landscape through training, with and without normalisation.

The small runs, and the paper's for a GPU:

    python -m recipes.landscape
    KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m recipes.landscape --network=dln
    python -m recipes.landscape --dataset=cifar10 --data_dir=<where it is> --width=1 \
        --steps=15000 --every=200

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

from absl import app

from keras_norms import diagnostics
from recipes import grid, landscape_figures, probed

NORMS = ("none", "bn", "lp1", "lp2", "lpinf")
# In units of the learning rate (Appendix A.2.2).
STEP_RANGES = {"vgg": (1 / 2, 4.0), "dln": (1 / 100, 30.0)}
POINTS = 8


def measure(model, batch, step, config, points=POINTS):
    """The landscape along the gradient, a dict for a line of metrics."""
    found = diagnostics.landscape(
        model,
        *batch(step),
        learning_rate=config["learning_rate"],
        step_range=STEP_RANGES[config["network"]],
        points=points,
    )
    low, high = found.loss_range
    nearest, farthest = found.gradient_distance
    return {
        "loss": found.loss,
        "gradient_norm": found.gradient_norm,
        "loss_min": low,
        "loss_max": high,
        "gradient_distance_min": nearest,
        "gradient_distance_max": farthest,
        "effective_beta": found.effective_beta,
        "not_finite": len(found.not_finite),
        "step_lengths": found.steps.tolist(),
        "gradient_distances": found.distances.tolist(),
    }


def landscape(settings, norm_names=NORMS, runs_dir="runs", **places):
    """Trains with every norm; writes the table and the figures.

    Args:
        settings: Dict of settings, see `recipes.probed.complete`.
        norm_names: List of names of `recipes.models.norms`.
        runs_dir: Where the runs, and the outcome, are recorded.
        **places: Other arguments of `recipes.probed.train`.

    Returns:
        The path of the directory with table.md, results.json, training.png (Figures 11
        a, 12 a and 13), landscape.png (Figures 4, 9, 11 and 12) and predictiveness.png
        (Figure 10).
    """
    places["runs_dir"] = runs_dir
    results, metrics = probed.train_all(
        "landscape", settings, norm_names, measure, **places
    )
    rows = summary(results, metrics)
    directory = probed.directory("landscape", runs_dir, settings, norm_names)
    grid.write(directory, table(rows), {"rows": rows})
    draw(directory, metrics, settings)
    return directory


def draw(directory, metrics, settings):
    """Draws the three figures."""
    about = probed.about(settings)
    vgg = probed.complete(settings)["network"] == "vgg"
    unit = "nats" if vgg else "sum of squares"
    rows = [("train_loss", f"training loss ({unit})", {"yscale": "log"})]
    if vgg:
        rows.append(("train_accuracy", "training accuracy", {"ylim": (0, 1)}))
        rows.append(("test_accuracy", "test accuracy", {"ylim": (0, 1)}))
    landscape_figures.training(directory / "training.png", metrics, rows, about)
    log = {"yscale": "log"}
    columns = [
        (("loss_min", "loss_max"), f"loss ({unit})", log),
        (
            ("gradient_distance_min", "gradient_distance_max"),
            "|grad L(W - s g) - g|",
            log,
        ),
        ("effective_beta", "effective beta", log),
    ]
    landscape_figures.bands(directory / "landscape.png", metrics, columns, about)
    landscape_figures.predictiveness(directory / "predictiveness.png", metrics, about)


def summary(results, metrics):
    """A dict for each norm: how it trained, and medians over the measured steps.

    Args:
        results, metrics: See `recipes.probed.train_all`.

    Returns:
        List of dicts with `norm`, the results of its run, the medians `loss_range`
        (highest less lowest loss), `gradient_distance` (the largest along the scan),
        `relative_distance` (the same over the norm of the gradient) and
        `effective_beta`; over all steps, the highest loss `largest_loss_max` and the
        `largest_effective_beta`; and the number of points that were `not_finite`.
    """
    return [
        {
            "norm": norm,
            **results[norm],
            **_over_steps(metrics[norm]),
            "not_finite": sum(line["not_finite"] for line in metrics[norm]),
        }
        for norm in metrics
    ]


def _over_steps(lines):
    def values(key):
        return landscape_figures.floats(line[key] for line in lines)

    farthest = values("gradient_distance_max")
    found = {
        "loss_range": values("loss_max") - values("loss_min"),
        "gradient_distance": farthest,
        "relative_distance": farthest / values("gradient_norm"),
        "effective_beta": values("effective_beta"),
    }
    medians = {key: landscape_figures.middle(value) for key, value in found.items()}
    return medians | {
        f"largest_{key}": landscape_figures.largest(values(key))
        for key in ("loss_max", "effective_beta")
    }


COLUMNS = {
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


def table(rows):
    """Returns the rows of `landscape` as Markdown, a line a norm."""
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    lines = [
        [row["norm"], *("–" if row[k] is None else f"{row[k]:.4g}" for k in keys)]
        for row in rows
    ]
    return (
        grid.markdown(["norm", *(COLUMNS[key] for key in keys)], lines)
        + "\nLoss and accuracies of the last interval; medians over the measured "
        "steps; the highest loss and beta of all steps.\n"
    )


def main(_):
    grid.report(landscape(**probed.arguments_of_flags()))


if __name__ == "__main__":
    probed.define_flags(NORMS)
    app.run(main)
