r"""Internal covariate shift as a change of gradients, with and without BN.

The small runs, and the paper's for a GPU:

    python -m recipes.smoothness.covariate_shift
    KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m recipes.smoothness.covariate_shift \
        --network=dln
    python -m recipes.smoothness.covariate_shift --dataset=cifar10 \
        --data_dir=<where it is> --width=1 --steps=15000 --every=100 \
        --initializer=glorot_uniform

Claim (Section 2.2, Figures 3 and 6): let internal covariate shift be the change in a
layer's gradient caused by the step of the layers before it (Definition 2.1). It is not
lower with BN, and often higher. In the deep linear network there is almost none without
BN, and with BN G and G' are almost uncorrelated. The paper has curves only. It does not
name the layers; here they are the fifth, the tenth and the last convolution, and linear
layers 9, 17 and 25.

The deep linear network, full batch, 10,000 steps, five seeds (--seeds=5), took 10
minutes of a core of an AMD EPYC. At the paper's rate, 1e-6, the median |G - G'| / |G|
is 0.72 with BN and 0.54 without in layer 9, 1.25 and 1.08 in layer 17: not lower, as
claimed, but not small without BN. At 1e-7 it is, in four seeds of five, 0.00 to 0.06,
and with BN 0.5 to 1.2. In VGG-16 at an eighth of the width on digits (400 steps, 2
minutes on two cores of an AMD EPYC) BN's median is lower, 0.13 in the last layer and
0.57 without, because it has soon fitted the images. On CIFAR-10 (a quarter of the
width, 5,000 steps) it is much the same, as claimed: 0.6 to 1.0 with BN, 0.8 to 1.1
without. The tables are in docs/results/covariate_shift.md.

Reference: Santurkar et al., NeurIPS 2018. https://arxiv.org/abs/1805.11604
"""

import dataclasses
import itertools

import numpy as np

from keras_norms import diagnostics
from recipes.engine import command, results, training
from recipes.smoothness import _reports as reports
from recipes.smoothness import _training as descent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(descent.Layered):
    """The settings of one training."""

    LAYERS = descent.Layered.LAYERS | {"dln": ("layer9", "layer17", "layer25")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Run, descent.Descents):
    """Every norm, with the gradients of some layers measured."""

    RUN = Run


def train(settings):
    """Trains and measures a network; see `recipes.smoothness._training.train`."""
    return descent.train(settings, "covariate_shift", measure)


def measure(model, batches, settings):
    """The shift of each layer, a dict for a line of metrics."""
    # Training takes this very step of plain gradient descent on this batch.
    found = diagnostics.covariate_shift(
        model,
        *batches[0],
        layers=[descent.layer(model, name) for name in settings.layers],
        learning_rate=settings.learning_rate,
    )
    values = {}
    for layer, (distance, cosine, norm) in zip(settings.layers, zip(*found[1:4])):
        values[f"{layer}_distance"] = distance
        values[f"{layer}_relative"] = distance / norm if norm else np.nan
        values[f"{layer}_cosine"] = cosine
    return values


def run(settings):
    """Trains with every norm and returns the directory with the results.

    shift.png is Figures 3 and 6.
    """
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows = []
    for layer, norm in itertools.product(settings.layers, settings.norms):
        found = outcomes.of(norm=norm)
        measured = reports.medians(found, layer, ("distance", "relative", "cosine"))
        row = {"layer": layer, "norm": norm}
        rows.append(row | reports.summary(found) | measured)
    directory = settings.directory("covariate_shift")
    note = "Medians over the measured steps; the training loss of the last interval. "
    text = reports.table(rows, COLUMNS, note + results.note(settings.seeds))
    results.write(directory, text, {"rows": rows})
    runs = reports.runs_of(outcomes, settings)
    columns = [
        ("|G - G'|", "distance"),
        ("|G - G'| / |G|", "relative"),
        ("cosine of G and G'", "cosine"),
    ]
    path = directory / "shift.png"
    reports.by_layer(path, runs, settings.layers, columns, settings.about())
    reports.training_curves(directory / "training.png", runs, settings, "train_loss")
    return directory


COLUMNS = {
    "layer": "layer",
    "norm": "norm",
    "distance": "distance",
    "relative": "distance / norm of G",
    "cosine": "cosine",
    "train_loss": "training loss",
}


if __name__ == "__main__":
    command.run(run, Settings)
