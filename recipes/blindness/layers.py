"""How much of each term of the loss every normalisation passes: one table.

    python -m recipes.blindness.layers

Batch normalization is blind to the first order and to the diagonal of the second (Zhou
et al., Theorems 1 and 2). Here the same terms are put on the output of each norm, in a
network Dense(32, relu) - norm - Dense(10), for a batch of 128 digits of all labels, and
for those in it that have one label. The numbers are shares: how much of the term
reaches the norm's input, relative to how much of the loss itself does; 0 is blind.
Layers are in training mode, except "BN, inference".

Mean of 3 seeds, mixed labels, float32 (a minute on an AMD EPYC, TensorFlow). CBN with
beta 0 is like BN; docs/results/blindness.md has all norms:

                         first    diagonal   off-diagonal   third
    BN                  1.8e-7      2.3e-7        0.99       0.66
    CBN, beta 0.5         0.43        0.46        1.0        0.63
    LpNorm ∞            1.8e-7        2.2         1.1        1.8
    LN                    0.98        1.0         1.0        0.98

Reference: Zhou et al., 2022, https://arxiv.org/abs/2205.15146
"""

import dataclasses
import itertools

import keras
import numpy as np
import pandas as pd
from keras import layers
from matplotlib.figure import Figure

from keras_norms import CBN, CWN, WN, WS, LpNorm, NoisyBN
from keras_norms.diagnostics.blindness import TERMS, blindness
from recipes.engine import command, data, figures, results, settings
from recipes.engine.precision import available, precision
from recipes.engine.settings import setting

WIDTH, CLASSES = 32, 10
EPSILON = 1e-20  # as small as the paper's: with a larger one some diagonal passes


def _cbn(beta=0.0, moving=False):
    layer = CBN(epsilon=EPSILON, beta_initializer=keras.initializers.Constant(beta))
    if moving:
        # A statistic of earlier batches, different from this batch's own.
        layer.build((None, WIDTH))
        layer.moving_mean.assign(np.full(WIDTH, 0.3))
        layer.average_weight.assign(1.0)
        layer.set_learning_rate(0.05)  # eta = 0.5
    return layer


# Name -> what makes the layer.
LAYERS = {
    figures.name_of("none"): lambda: layers.Activation("linear"),
    "BN": lambda: layers.BatchNormalization(epsilon=EPSILON),
    "BN, epsilon 1e-3": lambda: layers.BatchNormalization(),
    "BN, inference": lambda: layers.BatchNormalization(epsilon=EPSILON),
    "CBN": _cbn,
    "CBN, beta 0.5": lambda: _cbn(beta=0.5),
    "CBN, AMAT (eta 0.5)": lambda: _cbn(moving=True),
    "NoisyBN": lambda: NoisyBN(epsilon=EPSILON, seed=0),
    "LpNorm 1": lambda: LpNorm(1, epsilon=EPSILON),
    "LpNorm 2": lambda: LpNorm(2, epsilon=EPSILON),
    "LpNorm ∞": lambda: LpNorm("inf", epsilon=EPSILON),
    "LpNorm 2, centered": lambda: LpNorm(2, norm_of="centered", epsilon=EPSILON),
    "LN": lambda: layers.LayerNormalization(epsilon=EPSILON),
    "GN, 4 groups": lambda: layers.GroupNormalization(4, epsilon=EPSILON),
    "RMS": lambda: layers.RMSNormalization(epsilon=EPSILON),
    "WS": lambda: WS(layers.Dense(WIDTH)),
    "CWN": lambda: CWN(layers.Dense(WIDTH)),
    "WN": lambda: WN(layers.Dense(WIDTH)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    """What is probed, with how many samples and networks."""

    norms: tuple[str, ...] = tuple(LAYERS)  # no flag: there are commas in the names
    samples: int = setting(128, "Images in the batch.", at_least=16, at_most=1437)
    seeds: int = setting(3, "Seeds of weights and of terms.", at_least=1)


def network(norm, image_shape, seed):
    """The network above; the same seed gives the same weights."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([layers.Input(image_shape), layers.Flatten()])
    model.add(layers.Dense(WIDTH, "relu", kernel_initializer="he_normal"))
    model.add(norm)
    model.add(layers.Dense(CLASSES))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Compiling would take longer than the few gradients.
    model.compile("sgd", loss, run_eagerly=True)
    return model


def probe(name, x, y, seeds):
    """The `Blindness` of one norm for each seed."""
    found = []
    for seed in range(seeds):
        norm = LAYERS[name]()
        model = network(norm, x.shape[1:], seed)
        how = {"layers": [norm], "seed": seed, "training": "inference" not in name}
        found.append(blindness(model, x, y, **how))
    return found


def run(settings):
    """Probes every norm; returns the directory with the results."""
    images = data.load("digits")
    x, y = (part[: settings.samples] for part in (images.x_train, images.y_train))
    rows = []
    for dtype, name in itertools.product(available(), settings.norms):
        with precision(dtype):
            found = probe(name, x.astype(dtype), y, settings.seeds)
        keras.backend.clear_session()
        for batch, label in enumerate(found[0].batches):
            shares = np.mean([each.shares[0, batch] for each in found], 0)
            shared = float(np.mean([each.shared[0, batch] for each in found]))
            row = {"norm": name, "dtype": dtype, "batch": label, "shared": shared}
            rows.append(row | {"shares": dict(zip(TERMS, shares.tolist()))})
    directory = settings.directory("blindness_layers")
    results.write(directory, table(rows), {"rows": rows})
    draw(directory / "shares.png", rows)
    return directory


def table(rows):
    """The rows as Markdown, a line for each norm."""
    frame = pd.DataFrame([row | row["shares"] for row in rows])
    frame[[*TERMS]] = frame[[*TERMS]].map("{:.1e}".format)
    frame["shared"] = frame["shared"].map("{:.2f}".format)
    header, text = ["norm", *TERMS, "shared"], ""
    for (dtype, batch), part in frame.groupby(["dtype", "batch"], sort=False):
        lines = results.markdown(header, part[header].values)
        text += f"{dtype}, {batch}\n\n{lines}\n"
    return text


def draw(path, rows):
    """Draws the shares in float32, for mixed labels."""
    rows = [r for r in rows if r["dtype"] == "float32" and r["batch"] == "mixed"]
    shares = pd.DataFrame([r["shares"] for r in rows], [r["norm"] for r in rows])
    figure = Figure(figsize=(6, 0.3 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    colours = np.log10(shares.clip(lower=1e-9))
    picture = axes.imshow(colours, vmin=-8, vmax=0.5, aspect="auto")
    for (row, column), share in np.ndenumerate(shares.to_numpy()):
        text = f"{share:.2f}" if share > 0.005 else f"{share:.0e}"
        style = {"ha": "center", "va": "center", "fontsize": 8}
        style["color"] = "black" if share > 1e-3 else "white"
        axes.text(column, row, text, **style)
    axes.set_xticks(range(len(TERMS)), [term.replace("_", "-") for term in TERMS])
    axes.set_yticks(range(len(shares)), shares.index)
    axes.set_title("Share of a term that arrives at the input (float32)")
    figure.colorbar(picture, label="log10")
    figures.save(figure, path)


if __name__ == "__main__":
    command.run(run, Settings)
