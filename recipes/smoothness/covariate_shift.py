r"""Internal covariate shift as a change of gradients, with and without BN.

The small runs, and the paper's for a GPU:

    python -m recipes.covariate_shift
    KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m recipes.covariate_shift --network=dln
    python -m recipes.covariate_shift --dataset=cifar10 --data_dir=<where it is> \
        --width=1 --steps=15000 --every=100

Claim (Section 2.2, Figures 3 and 6): measured as the change of a layer's gradient that
the step of the layers before it makes (Definition 2.1), internal covariate shift is not
lower with BN, often higher; in the deep linear network there is almost none without BN,
and with BN G and G' are almost uncorrelated. The paper has curves only. It does not
name the layers; here they are the fifth, the tenth and the last convolution, and linear
layers 9, 17 and 25.

The deep linear network, full batch, 10,000 steps, took 4 minutes on 2 cores of an Intel
Xeon that much other work shared. Medians over steps:

                     |G - G'|    |G - G'| / |G|    cosine
    layer9   none       167           0.48          0.92
             bn         299           0.69          0.90
    layer17  none       288           0.75          0.74
             bn         562           1.22         -0.69
    layer25  none       570           1.80         -0.71
             bn         326           1.83         -0.69

BN does not lower it in layers 9 and 17, as claimed. There is almost none without BN, as
claimed, in steps 5,000 to 7,500 alone, when that network stands still. In VGG-16 of an
eighth of the width on digits (400 steps, 8 minutes) BN's is higher in the first 40
steps, and lower from then on, for it has fitted the images: median cosines of the three
layers 0.99, 0.99, 0.99, and without BN 0.93, 0.87, 0.89.

Reference: Santurkar, Tsipras, Ilyas and Madry, How Does Batch Normalization Help
Optimization?, NeurIPS 2018. https://arxiv.org/abs/1805.11604
"""

import numpy as np
from absl import app, flags

from keras_norms import diagnostics
from recipes import grid, landscape_figures, probed

NORMS = ("none", "bn")
# The fifth, tenth and last convolution, and every eighth linear layer.
LAYERS = {
    "vgg": ("stage3_conv1", "stage4_conv3", "stage5_conv3"),
    "dln": ("layer9", "layer17", "layer25"),
}


def measurement(layers):
    """The function `measure` of `recipes.probed.train` for these layers."""

    def measure(model, batch, step, config):
        # The step of plain gradient descent on this batch is the one training takes.
        found = diagnostics.covariate_shift(
            model,
            *batch(step),
            layers=list(layers),
            learning_rate=config["learning_rate"],
        )
        values = {}
        for i, layer in enumerate(found.layers):
            distance, norm = float(found.distances[i]), float(found.norms[i])
            values[f"{layer}_distance"] = distance
            values[f"{layer}_relative"] = distance / norm if norm else np.nan
            values[f"{layer}_cosine"] = float(found.cosines[i])
        return values

    return measure


def covariate_shift(settings, norm_names=NORMS, layers=None, runs_dir="runs", **places):
    """Trains with every norm; writes the table and the figures.

    Args:
        settings: Dict of settings, see `recipes.probed.complete`.
        norm_names: List of names of `recipes.models.norms`.
        layers: List of the names of layers; `LAYERS` of the network if `None`.
        runs_dir: Where the runs, and the outcome, are recorded.
        **places: Other arguments of `recipes.probed.train`.

    Returns:
        The path of the directory with table.md, results.json, shift.png (Figures 3 and
        6) and training.png.
    """
    network = probed.complete(settings)["network"]
    layers = tuple(layers or LAYERS[network])
    kind = "covariate_shift"
    if layers != LAYERS[network]:
        kind += f"-{'+'.join(layers)}"
    results, metrics = probed.train_all(
        kind, settings, norm_names, measurement(layers), runs_dir=runs_dir, **places
    )
    rows = summary(results, metrics, layers)
    directory = probed.directory(kind, runs_dir, settings, norm_names)
    grid.write(directory, table(rows), {"rows": rows})
    about = probed.about(settings)
    columns = [
        ("distance", "|G - G'|", {"yscale": "log"}),
        ("relative", "|G - G'| / |G|", {"yscale": "log"}),
        ("cosine", "cosine of G and G'", {"ylim": (-1.05, 1.05)}),
    ]
    path = directory / "shift.png"
    landscape_figures.by_layer(path, metrics, layers, columns, about)
    loss = "sum of squares" if network == "dln" else "nats"
    panels = [("train_loss", f"training loss ({loss})", {"yscale": "log"})]
    landscape_figures.training(directory / "training.png", metrics, panels, about)
    return directory


def summary(results, metrics, layers):
    """A dict for each layer and norm: medians over the measured steps.

    Args:
        results, metrics: See `recipes.probed.train_all`.
        layers: List of names.

    Returns:
        List of dicts with `layer`, `norm`, the results of the run and the medians
        `distance`, `relative` and `cosine`; `None` where no step had any.
    """
    return [
        {
            "layer": layer,
            "norm": norm,
            **results[norm],
            **{
                key: landscape_figures.median(lines, f"{layer}_{key}")
                for key in ("distance", "relative", "cosine")
            },
        }
        for layer in layers
        for norm, lines in metrics.items()
    ]


def table(rows):
    """Returns the rows of `covariate_shift` as Markdown, a line a layer and norm."""
    keys = ("distance", "relative", "cosine", "train_loss")
    lines = [
        [
            row["layer"],
            row["norm"],
            *("–" if row[key] is None else f"{row[key]:.4g}" for key in keys),
        ]
        for row in rows
    ]
    header = ["layer", "norm", "distance", "distance / norm of G", "cosine"]
    return (
        grid.markdown([*header, "training loss"], lines)
        + "\nMedians over the measured steps; the training loss of the last interval.\n"
    )


def main(_):
    layers = flags.FLAGS.layers or None
    grid.report(covariate_shift(layers=layers, **probed.arguments_of_flags()))


if __name__ == "__main__":
    probed.define_flags(NORMS)
    flags.DEFINE_list("layers", [], "Names of layers; three of the network if empty.")
    app.run(main)
