"""What every normalisation passes of a term of the loss: one table.

    python -m recipes.blindness.layers

Batch normalization is blind to the first order and to the diagonal of the second (Zhou
et al., Theorems 1 and 2). Here the same terms are put on the output of each
normalisation, in a network

    Dense(32, relu) - norm - Dense(10)

on a batch of 128 digits of all labels, and on those of one label in it. The numbers
are shares: how much of the term arrives at the norm's input, relative to how much of
the loss itself does; 0 is blind. Layers are in training mode, but for "BN, inference".

Mean of 3 seeds, mixed labels, float32 (6 minutes on 2 cores of an Intel Xeon that
other work shared; TensorFlow); docs/results/blindness.md has all of it:

                         first    diagonal   off-diagonal   third
    BN                  1.8e-7      3.1e-7        0.99       0.66
    CBN, beta 0         1.9e-7      1.8e-7        0.99       0.66
    CBN, beta 0.5         0.43        0.46        1.0        0.63
    NoisyBN               0.10        0.22        1.0        0.71
    LpNorm inf          3.0e-7        2.2         1.1        1.8
    LN                    0.98        1.0         1.0        0.98
    WS                    1.1         1.0         1.0        1.0

Reference: Zhou, Shen, Chen, Tang and Zhang, Batch Normalization Is Blind to the First
and Second Derivatives of the Loss, 2022. https://arxiv.org/abs/2205.15146
"""

import dataclasses
import functools
import itertools

import keras
import numpy as np
from keras import layers
from matplotlib.figure import Figure

from keras_norms import CBN, CWN, WN, WS, LpNorm, NoisyBN
from keras_norms.diagnostics.blindness import TERMS, blindness
from recipes.engine import command, data, figures, results, settings
from recipes.engine.precision import available, precision
from recipes.engine.settings import setting

WIDTH, CLASSES = 32, 10
EPSILON = 1e-20  # as small as the paper's, for with a larger one some diagonal passes
AMAT_RATE = 0.05  # eta = 0.5


def _cbn(beta=0.0, moving=False):
    layer = CBN(epsilon=EPSILON, beta_initializer=keras.initializers.Constant(beta))
    if moving:
        # A statistic of batches before, which this batch does not have.
        layer.build((None, WIDTH))
        layer.moving_mean.assign(np.full(WIDTH, 0.3))
        layer.average_weight.assign(1.0)
        layer.set_learning_rate(AMAT_RATE)
    return layer


def _bn():
    return layers.BatchNormalization(epsilon=EPSILON)


# Name -> what makes the layer.
NORMS = {
    "none": lambda: layers.Activation("linear"),
    "BN": _bn,
    "BN, epsilon 1e-3": lambda: layers.BatchNormalization(),
    "BN, inference": _bn,
    "CBN": _cbn,
    "CBN, beta 0.5": functools.partial(_cbn, beta=0.5),
    "CBN, AMAT (eta 0.5)": functools.partial(_cbn, moving=True),
    "NoisyBN": lambda: NoisyBN(epsilon=EPSILON, seed=0),
    "LpNorm 1": lambda: LpNorm(1, epsilon=EPSILON),
    "LpNorm 2": lambda: LpNorm(2, epsilon=EPSILON),
    "LpNorm inf": lambda: LpNorm("inf", epsilon=EPSILON),
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

    norms: tuple[str, ...] = tuple(NORMS)  # no flag: there are commas in the names
    samples: int = setting(128, "In the batch.", at_least=16)
    seeds: int = setting(3, "Of weights and terms.", at_least=1)


def network(norm, image_shape, seed):
    """The network above; the same seed, the same weights."""
    keras.utils.set_random_seed(seed)
    inputs = layers.Input(image_shape)
    x = layers.Dense(WIDTH, activation="relu", kernel_initializer="he_normal")(
        layers.Flatten()(inputs)
    )
    x = norm(x)
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # To compile would take longer than the few gradients.
    model.compile("sgd", loss, run_eagerly=True)
    return model


def probe(name, x, y, seeds):
    """The `Blindness` of one norm for each seed.

    Args:
        name: Key of `NORMS`.
        x, y: The batch.
        seeds: Integer, of weights and terms, from 0 on.
    """
    found = []
    for seed in range(seeds):
        norm = NORMS[name]()
        model = network(norm, x.shape[1:], seed)
        training = "inference" not in name
        found.append(
            blindness(model, x, y, layers=[norm], seed=seed, training=training)
        )
    return found


def run(settings):
    """Probes every norm.

    Returns:
        The path of the directory with table.md, results.json and shares.png.
    """
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
    """The rows as Markdown, a line a norm."""
    header = ["norm", *TERMS, "shared"]
    text = ""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for batch in dict.fromkeys(row["batch"] for row in rows):
            lines = [
                [
                    row["norm"],
                    *(f"{row['shares'][term]:.1e}" for term in TERMS),
                    f"{row['shared']:.2f}",
                ]
                for row in rows
                if (row["dtype"], row["batch"]) == (dtype, batch)
            ]
            text += f"{dtype}, {batch}\n\n{results.markdown(header, lines)}\n"
    return text


def draw(path, rows):
    """Draws the shares in float32, of mixed labels."""
    rows = [r for r in rows if r["dtype"] == "float32" and r["batch"] == "mixed"]
    shares = np.array([[max(r["shares"][t], 1e-9) for t in TERMS] for r in rows])
    figure = Figure(figsize=(6, 0.3 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(np.log10(shares), vmin=-8, vmax=0.5, aspect="auto")
    axes.set_xticks(range(len(TERMS)), [term.replace("_", "-") for term in TERMS])
    axes.set_yticks(range(len(rows)), [row["norm"] for row in rows])
    axes.set_title("Share of a term that arrives at the input (float32)")
    figure.colorbar(picture, label="log10")
    figures.save(figure, path)


if __name__ == "__main__":
    command.run(run, Settings)
