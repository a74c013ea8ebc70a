r"""All scale-invariant norms lose accuracy under noise and attack; does decay help?

The small run, one on CIFAR-10 images, and the paper's, for a GPU:

    python -m recipes.spheres.robustness
    python -m recipes.spheres.robustness --dataset=cifar10 --data_dir=<where it is> \
        --train_size=20000 --epochs=15 --noise=0.25 --epsilon=0.0078431373 \
        --epsilon_2=0.4347 --steps=40 --step_size=0.0333 --test_size=1000 --seeds=3
    python -m recipes.spheres.robustness --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet101 --epochs=200 --batch_size=128 --learning_rate=1e-3 \
        --weight_decays=0,5e-4 --noise=0.25 --epsilon=0.0078431373 \
        --epsilon_2=0.4347 --steps=40 --step_size=0.0333 --test_size=10000

Claim (BN, GN, LN and WN; here CBN, WS and CWN as well): under Gaussian noise and the
BIM attack all of them lose accuracy, and less of it with weight decay, because the
growing norm of the weights amplifies the attack. Pixels are from 0 to 1; noise and
radii are in these units. The paper takes the settings of Galloway et al. (2019), whose
published evaluation (github.com/AngusG/bn-advex-zhang-fixup) has noise of deviation
1/4, an l_inf radius of 2/255, and 40 steps of 1/30 of the radius.

The small run (ResNet-8 on digits, 14 trainings) takes 4.5 minutes on two shared cores
of an AMD EPYC. All norms lose accuracy. With the noise and the steps of Galloway et al.
(--noise=0.25 --steps=40 --step_size=0.0333), under BIM (l_inf) BN loses 40.8 points
without decay and 39.4 with it (the paper, on CIFAR-10: 43.1 and 33.8), GN 38.3 and 38.1
(38.9 and 35.6). Without decay WS+GN loses least, 33.3, and CBN and WN most, 47.2. On
20,000 images of CIFAR-10 (three seeds), BN, GN, LN, WN and CBN lose 53.0, 43.9, 36.8,
43.7 and 56.7, with decay 50.9, 29.4, 20.7, 14.1 and 49.6. Decay costs 6 to 23 points of
clean accuracy.

On digits there is one run each, with 360 test images: the standard error is 2.6 points.
Decay helps five of seven norms there; in the paper it helps BN and GN on CIFAR-10, and
all four on CIFAR-100. The norm of scale-invariant weights cannot be the reason. See
docs/results/robustness.md.

Reference: Sun et al., AAAI 2020, Section 3.2. https://doi.org/10.1609/aaai.v34i04.6046
"""

import dataclasses
import itertools
import math

import keras
import numpy as np
import pandas as pd
from keras import ops

from keras_norms import diagnostics
from recipes.engine import classifier, command, figures, results, training
from recipes.engine.settings import setting
from recipes.spheres._growth_results import label_of
from recipes.spheres.weight_growth import Decays

FACTORS = (0.5, 1, 2)  # of epsilon, for the figure
SHOWN = ("clean", "noise", "noise_difference", "attacked", "attack_difference")
# Clean, under noise, under BIM; without and with decay; ResNet-101: Tables 1 and 2.
PAPER = {
    "CIFAR-10": {
        "bn": ((0.9687, 0.8125, 0.5380), (0.9375, 0.7812, 0.6000)),
        "group": ((0.9687, 0.9062, 0.5793), (0.9375, 0.8437, 0.5815)),
        "layer": ((0.8711, 0.8437, 0.5253), (0.9687, 0.8002, 0.5333)),
        "wn": ((0.8679, 0.7060, 0.5031), (0.9062, 0.7187, 0.4687)),
    },
    "CIFAR-100": {
        "bn": ((0.6875, 0.4596, 0.1397), (0.6563, 0.4953, 0.1558)),
        "group": ((0.6257, 0.4098, 0.2366), (0.6063, 0.4327, 0.2813)),
        "layer": ((0.6358, 0.3983, 0.2354), (0.6279, 0.4278, 0.2531)),
        "wn": ((0.6147, 0.3476, 0.1647), (0.6072, 0.3874, 0.1965)),
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attacked(classifier.Training):
    """A training whose network is attacked. Lengths are in units of the pixel range."""

    ATTACK = ("noise", "epsilon", "epsilon_2", "steps", "step_size", "test_size")
    VARIABLE = (*classifier.Training.VARIABLE, *ATTACK)

    noise: float = setting(
        0.2, "Deviation of the noise; pixels are from 0 to 1.", above=0
    )
    epsilon: float = setting(0.1, "Radius of the l_inf attack.", above=0)
    epsilon_2: float = setting(0.5, "Radius of the l_2 attack.", above=0)
    steps: int = setting(10, "Steps of the attack.", at_least=1)
    step_size: float | None = setting(
        None, "Length of a step over the radius; 1 / steps if not given.", above=0
    )
    test_size: int = setting(1000, "Number of test images to attack.", at_least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Decays, Attacked):
    """All of them attacked."""

    RUN = Attacked

    learning_rate: float = 0.05


def train(settings):
    """Trains one network and attacks it."""
    return classifier.train(settings, "robustness", at_end=measure)


def measure(model, problem, settings, run):
    """What noise and attacks cost a network; see `recipes.engine.training.train`."""
    network, x, y = pixels(model, problem.images, settings.test_size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    logits = network.predict(x, verbose=0)
    right = float((logits.argmax(-1) == y).mean())
    collapsed = diagnostics.Robustness(right, right, right, 0.0, 0.0, 1.0, len(x))

    def attacked(norm, epsilon):
        if not np.ptp(logits, 0).any():
            return collapsed._asdict()  # its outputs do not depend on the image
        options = {key: getattr(settings, key) for key in ("noise", "steps", "seed")}
        options |= {"norm": norm, "epsilon": epsilon, "verbose": 0}
        if settings.step_size is not None:
            options["step_size"] = settings.step_size * epsilon
        return diagnostics.robustness(network, x, y, loss, **options)._asdict()

    kernels = [v for v in model.trainable_variables if len(v.shape) == 4]
    squares = [np.square(ops.convert_to_numpy(v)).sum() for v in kernels]
    return {
        "inf": [attacked("inf", factor * settings.epsilon) for factor in FACTORS],
        "2": attacked(2, settings.epsilon_2),
        "weight_norm": float(np.sqrt(sum(squares))),
    }


def pixels(model, images, test_size=None):
    """A network for standardised images as one for pixels between 0 and 1.

    Returns that network, which shares the weights; test images in such pixels, if all
    images together attain both ends of the range; and their labels.
    """
    every = images.x_train, images.x_test
    low = np.minimum(*(x.min((0, 1, 2)) for x in every))
    high = np.maximum(*(x.max((0, 1, 2)) for x in every))
    span = np.maximum(high - low, 1e-7)
    inputs = keras.Input(images.x_train.shape[1:])
    standard = keras.layers.Rescaling(span.tolist(), low.tolist())(inputs)
    x = np.clip((images.x_test[:test_size] - low) / span, 0, 1)
    network = keras.Model(inputs, model(standard))
    return network, x.astype("float32"), images.y_test[:test_size]


def run(settings):
    """Trains and attacks; returns the directory with the table and the figure."""
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows, panels = [], {}
    for norm, decay in itertools.product(settings.norms, settings.weight_decays):
        found = outcomes.of(norm=norm, weight_decay=decay)
        alive = [each.results for each in found if not each.results["diverged"]]
        row = {"norm": norm, "weight_decay": decay, "diverged": len(found) - len(alive)}
        lost = [lost_of(each.results) for each in found]
        rows.append({**row, **summary(alive), "lost": lost, "runs": alive})
        panels.setdefault(label_of(decay), {})[norm] = {
            factor * settings.epsilon: [100 * r["inf"][i]["attacked"] for r in alive]
            for i, factor in enumerate(FACTORS)
        }
    directory = settings.directory("robustness")
    attack = {key: getattr(settings, key) for key in settings.ATTACK}
    results.write(directory, table(rows, settings), {"attack": attack, "rows": rows})
    labels = "epsilon, of the range of pixels", "accuracy under BIM, l∞ (%)"
    path = directory / "epsilon.png"
    figures.against(path, panels, *labels, settings.about(), base=2)
    return directory


def lost_of(found):
    """The accuracy that noise and BIM cost one run; NaN if it diverged."""
    inf = {} if found["diverged"] else found["inf"][FACTORS.index(1)]
    return [inf.get(key, math.nan) for key in SHOWN[2::2]]


def summary(found):
    """Over seeds: `inf` and `2`, dicts of `mean_and_std`, and that of `weight_norm`."""

    def over_seeds(lines):
        found = pd.DataFrame(lines)
        return {key: results.mean_and_std(found[key]) for key in found} or None

    return {
        "inf": over_seeds([each["inf"][FACTORS.index(1)] for each in found]),
        "2": over_seeds([each["2"] for each in found]),
        "weight_norm": results.mean_and_std([each["weight_norm"] for each in found]),
    }


def table(rows, settings):
    """The rows as Markdown."""
    header = ["norm", "weight decay", "clean", "noise", "difference", "BIM l∞"]
    header += ["difference", "BIM l2", "kernels"]
    header += [f"paper: {what}" for what in ("clean", "noise", "BIM l∞")]
    lines = []
    for row in rows:
        lost = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        start = [figures.name_of(row["norm"]) + lost, f"{row['weight_decay']:g}"]
        inf = row["inf"] or {}
        own = [results.spread(inf.get(key), 3) for key in SHOWN]
        paper = PAPER["CIFAR-10"].get(row["norm"], (("–",) * 3,) * 2)
        paper = paper[row["weight_decay"] > 0]
        two = results.spread((row["2"] or {}).get("attacked"), 3)
        size = results.spread(row["weight_norm"], 1)
        lines.append([*start, *own, two, size, *paper])
    return (
        f"{results.markdown(header, lines)}\n"
        f"Accuracy on test images. {results.note(settings.seeds)} The paper's is that "
        "of ResNet-101 on CIFAR-10 (Table 1). In units of the range of pixels: noise "
        f"of deviation {settings.noise:g}; BIM with epsilon {settings.epsilon:g} (l∞) "
        f"and {settings.epsilon_2:g} (l2), {settings.steps} steps. Kernels: the norm "
        f"of those of all convolutions together.\n\n{changes(rows)}"
    )


def changes(rows):
    """How weight decay changes the losses of accuracy, as Markdown."""
    header, lines = ["norm", "noise, here", "BIM l∞, here"], []
    header += [f"{what}, {of}" for of in PAPER for what in ("noise", "BIM l∞")]
    by_norm, decays = {}, [row["weight_decay"] for row in rows]
    for row in rows:
        by_norm.setdefault(row["norm"], {})[row["weight_decay"]] = np.array(row["lost"])
    least, largest = min(decays), max(decays)
    for norm, lost in by_norm.items():
        if least == largest or not {least, largest} <= lost.keys():
            continue
        by_seed = 100 * (lost[largest] - lost[least])
        by_seed = by_seed[~np.isnan(by_seed).any(1)]
        if not len(by_seed):
            continue  # with or without decay, all runs diverged
        own = [results.mean_and_std(column) for column in by_seed.T]
        cells = [("+" * (each["mean"] >= 0)) + results.spread(each, 1) for each in own]
        for of in PAPER.values():
            # Without decay and with it: clean, noise, attacked.
            without, decayed = np.array(of.get(norm, [[np.nan] * 3] * 2))
            published = (decayed[0] - decayed[1:]) - (without[0] - without[1:])
            cells += [f"{100 * d:+.1f}".replace("+nan", "–") for d in published]
        lines.append([figures.name_of(norm), *cells])
    if not lines:
        return ""
    return (
        "What the largest decay changes of the accuracy lost, in points\n\n"
        f"{results.markdown(header, lines)}\nNegative: less is lost with decay. "
        "A seed's two networks start from the same weights.\n"
    )


if __name__ == "__main__":
    command.run(run, Settings)
