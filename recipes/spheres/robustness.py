"""All scale-invariant norms lose accuracy under noise and attack; does decay help?

The small run, one on CIFAR-10 images, and the paper's, for a GPU:

    python -m recipes.spheres.robustness
    python -m recipes.spheres.robustness --dataset=cifar10 --data_dir=<where it is> \
        --train_size=3000 --batch_size=64 --epochs=12 --noise=0.05 \
        --epsilon=0.0078431373 --epsilon_2=0.25 --test_size=500
    python -m recipes.spheres.robustness --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet101 --epochs=200 --batch_size=128 --learning_rate=1e-3 \
        --weight_decays=0,5e-4 --noise=0.05 --epsilon=0.0078431373 --test_size=10000

Claim (Tables 1 and 2, BN, GN, LN and WN): under Gaussian noise and under the BIM attack
all of them lose accuracy, and with weight decay they lose less of it, for the growing
norm of the weights amplifies the attack. Here CBN, WS and CWN are attacked as well.

The network is one of pixels from 0 to 1; noise and radii are in these units, and the
paper does not give them. After the last epoch the first test images are attacked.

The small run (ResNet-8 on digits, 14 trainings) takes 4.6 minutes of one core of an
Intel Xeon. Clean accuracy, and what noise and BIM (l_inf) take of it, without and with
weight decay; the paper's, for CIFAR-10:

                  without decay          with decay       paper's: without    with
    BN         99.4   3.6   38.1     99.4   3.3   35.8      15.6  43.1     15.6  33.8
    GN         97.8   2.8   33.6     96.9   1.7   27.2       6.3  38.9      9.4  35.6
    LN         97.5   2.2   31.9     97.8   3.3   30.0       2.7  34.6     16.9  43.5
    WN         97.8   4.4   44.4     97.8   2.5   38.6      16.2  36.5     18.8  43.8
    CBN        98.9   5.0   45.0     99.7   4.7   38.6
    WS+GN      97.8   3.1   28.1     98.6   1.9   25.6
    CWN        98.1   4.7   36.7     97.2   5.0   39.2

One run each, 360 test images: the standard error is 2.6 points. Decay helps most norms
here, and in the paper BN and GN; the norm of scale-invariant weights cannot be why, see
docs/results/robustness.md.

Reference: Sun et al., New Interpretations of Normalization Methods in Deep Learning,
AAAI 2020, Section 3.2, Tables 1 and 2. https://doi.org/10.1609/aaai.v34i04.6046
"""

import dataclasses

import keras
import numpy as np
from keras import ops

from keras_norms import diagnostics
from recipes.engine import classifier, command, figures, results, training
from recipes.engine.settings import setting
from recipes.models import norms as norm_names
from recipes.spheres.weight_growth import NORMS, name_of

FACTORS = (0.5, 1, 2)  # of epsilon, for the figure
SHOWN = ("clean", "noise", "noise_difference", "attacked", "attack_difference")
# Clean, under noise and under BIM without and with decay, ResNet-101 on CIFAR-10.
PAPER = {
    "bn": ((0.9687, 0.8125, 0.5380), (0.9375, 0.7812, 0.6000)),
    "group": ((0.9687, 0.9062, 0.5793), (0.9375, 0.8437, 0.5815)),
    "layer": ((0.8711, 0.8437, 0.5253), (0.9687, 0.8002, 0.5333)),
    "wn": ((0.8679, 0.7060, 0.5031), (0.9062, 0.7187, 0.4687)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attacked(classifier.Training):
    """A training whose network is attacked; lengths are in units of pixels' range."""

    ATTACK = ("noise", "epsilon", "epsilon_2", "steps", "test_size")
    VARIABLE = (*classifier.Training.VARIABLE, *ATTACK)

    noise: float = setting(0.2, "Deviation of the noise.", above=0)
    epsilon: float = setting(0.1, "Radius of the l_inf ball.", above=0)
    epsilon_2: float = setting(0.5, "Radius of the l_2 ball.", above=0)
    steps: int = setting(10, "Of the attack.", at_least=1)
    test_size: int = setting(1000, "Test images attacked, the first.", at_least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Attacked, classifier.Grid):
    """Every norm, with and without weight decay."""

    RUN = Attacked

    model: str = "resnet8"
    activation: str = "relu"
    batch_size: int | None = 32
    learning_rate: float = 0.05
    seeds: int = 1
    norms: tuple[str, ...] = setting(NORMS, "Norms.", choices=sorted(norm_names.NORMS))
    weight_decays: tuple[float, ...] = setting((0, 5e-3), "Times weights.", at_least=0)


def train(settings):
    """Trains one network and attacks it."""
    return classifier.train(settings, "robustness", at_end=measure)


def measure(model, problem, settings, run):
    """What noise and attacks take of a network; see `recipes.engine.training.train`."""
    network, x, y = pixels(model, problem.images, settings.test_size)

    def attacked(norm, epsilon):
        return diagnostics.robustness(
            network,
            x,
            y,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            noise=settings.noise,
            epsilon=epsilon,
            norm=norm,
            steps=settings.steps,
            seed=settings.seed,
            verbose=0,
        )._asdict()

    kernels = [v for v in model.trainable_variables if len(v.shape) == 4]
    squares = [np.square(ops.convert_to_numpy(v)).sum() for v in kernels]
    return {
        "inf": [attacked("inf", factor * settings.epsilon) for factor in FACTORS],
        "2": attacked(2, settings.epsilon_2),
        "weight_norm": float(np.sqrt(sum(squares))),
    }


def pixels(model, images, test_size=None):
    """A network as one of pixels between 0 and 1, and test images in these.

    Args:
        model: A network of standardised images.
        images: The `ImageData`. The images must attain both ends of the range.
        test_size: Number of test images, all if `None`.

    Returns:
        A `keras.Model` that shares the weights, images and labels.
    """
    low, high = (
        reduce([part(x, (0, 1, 2)) for x in (images.x_train, images.x_test)], 0)
        for part, reduce in ((np.min, np.min), (np.max, np.max))
    )
    span = np.maximum(high - low, 1e-7)
    inputs = keras.Input(images.x_train.shape[1:])
    standard = keras.layers.Rescaling(span.tolist(), low.tolist())(inputs)
    x = np.clip((images.x_test[:test_size] - low) / span, 0, 1)
    network = keras.Model(inputs, model(standard))
    return network, x.astype("float32"), images.y_test[:test_size]


def run(settings):
    """Trains with every norm and weight decay, and attacks.

    Returns:
        The path of the directory with table.md, results.json and epsilon.png.
    """
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows, panels = [], {}
    for norm in settings.norms:
        for decay in settings.weight_decays:
            found = [
                outcome.results
                for outcome in outcomes.of(norm=norm, weight_decay=decay)
            ]
            alive = [each for each in found if not each["diverged"]]
            rows.append(
                {
                    "norm": norm,
                    "weight_decay": decay,
                    "diverged": len(found) - len(alive),
                    **summary(alive),
                    "runs": alive,
                }
            )
            label = f"decay {decay:g}" if decay else "no decay"
            panels.setdefault(label, {})[norm] = {
                factor * settings.epsilon: [
                    100 * each["inf"][place]["attacked"] for each in alive
                ]
                for place, factor in enumerate(FACTORS)
            }
    directory = settings.directory("robustness")
    attack = {key: getattr(settings, key) for key in settings.ATTACK}
    results.write(directory, table(rows, settings), {"attack": attack, "rows": rows})
    figures.against(
        directory / "epsilon.png",
        panels,
        "epsilon, of the range of pixels",
        "accuracy under BIM, l∞ (%)",
        settings.about(),
        base=2,
    )
    return directory


def summary(found):
    """Over seeds: `inf` and `2`, dicts of `mean_and_std`, and that of `weight_norm`."""
    if not found:
        return {"inf": None, "2": None, "weight_norm": None}
    one = FACTORS.index(1)
    chosen = {"inf": [each["inf"][one] for each in found]}
    chosen["2"] = [each["2"] for each in found]
    return {
        **{
            norm: {
                key: results.mean_and_std([each[key] for each in measured])
                for key in measured[0]
            }
            for norm, measured in chosen.items()
        },
        "weight_norm": results.mean_and_std([each["weight_norm"] for each in found]),
    }


def table(rows, settings):
    """The rows as Markdown."""
    header = ["norm", "weight decay", "clean", "noise", "difference", "BIM l∞"]
    header += ["difference", "paper: clean", "noise", "BIM l∞", "BIM l2", "norm"]
    lines = []
    for row in rows:
        name = name_of(row["norm"])
        if row["diverged"]:
            name += f" ({row['diverged']} diverged)"
        paper = PAPER.get(row["norm"], (("–",) * 3,) * 2)[row["weight_decay"] > 0]
        inf, two = row["inf"] or {}, row["2"] or {}
        lines.append(
            [
                name,
                f"{row['weight_decay']:g}",
                *(results.spread(inf.get(key), 3) for key in SHOWN),
                *paper,
                results.spread(two.get("attacked"), 3),
                results.spread(row["weight_norm"], 1),
            ]
        )
    return (
        f"{results.markdown(header, lines)}\n"
        f"Accuracy on test images. {results.note(settings.seeds)} The paper's is that "
        "of ResNet-101 on CIFAR-10 (Table 1). In units of the range of pixels: noise "
        f"of deviation {settings.noise:g}; BIM with epsilon {settings.epsilon:g} (l∞) "
        f"and {settings.epsilon_2:g} (l2), {settings.steps} steps. The last column is "
        "that of all convolutions' kernels together.\n"
    )


if __name__ == "__main__":
    command.run(run, Settings)
